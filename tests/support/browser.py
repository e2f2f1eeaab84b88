"""A headless Chromium for tests, driven by chromedriver over WebDriver (https://www.w3.org/TR/webdriver2/).

    with browser(folder) as page:
        page.open(path)
        page.keys("/", "gemm", ENTER)
        assert page.text("#hits") == "1 of 3"

Time passes only for the browser: `page.script` waits until two frames are drawn, so what it returns is what is shown.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

TAB, ENTER, ESCAPE, SPACE, SHIFT = "\ue004", "\ue007", "\ue00c", " ", "\ue008"
LEFT, RIGHT = "\ue012", "\ue014"  # the codes of keys: https://www.w3.org/TR/webdriver2/#keyboard-actions
INSTALL = "needs chromium and chromedriver: apt-get install chromium chromium-driver"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id in answers, fixed by the protocol
_ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--disable-extensions",
    "--force-device-scale-factor=1", "--window-size=1280,800",
)  # fmt: skip
_SETTLED = """
return new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))).then(() => { %s });
"""


def programs() -> tuple[str, str] | None:
    """The paths of Chromium and chromedriver; None if one of them is not installed."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return (chromium, driver) if chromium and driver else None


class Page:
    """One tab of a running browser. Raises RuntimeError with the browser's message if a command fails."""

    def __init__(self, address: str, folder: Path, chromium: str) -> None:
        self._open = build_opener(ProxyHandler({})).open  # not through a proxy
        self._session = address
        options = {"binary": chromium, "args": [*_ARGUMENTS, f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session += "/session/" + self._post("/session", capabilities={"alwaysMatch": wanted})["sessionId"]
        self._post("/timeouts", script=20_000, pageLoad=60_000)

    def _post(self, path: str, **body: Any) -> Any:
        return self._ask(Request(self._session + path, json.dumps(body).encode(), method="POST"))

    def _ask(self, request: Request) -> Any:
        try:
            with self._open(request, timeout=90) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, path: Path) -> None:
        self._post("/url", url=path.resolve().as_uri())

    def before_scripts(self, script: str) -> None:
        """Run this script in every page opened from now on, before the page's own scripts."""
        self.devtools("Page.addScriptToEvaluateOnNewDocument", source=script)

    def devtools(self, command: str, **parameters: Any) -> Any:
        """Run a command of https://chromedevtools.github.io/devtools-protocol/."""
        return self._post("/goog/cdp/execute", cmd=command, params=parameters)

    def resize(self, width: int, height: int) -> None:
        self._post("/window/rect", width=width, height=height)

    def script(self, body: str, *arguments: Any) -> Any:
        """Return what the body of a function returns, once the page is drawn. `arguments` are `given` there."""
        body = f"const given = {json.dumps(arguments)}; {body}"
        return self._post("/execute/sync", script=_SETTLED % body, args=[])

    def text(self, selector: str) -> str:
        return self.script("return document.querySelector(given[0]).textContent", selector)

    def errors(self) -> list[str]:
        """What the console has shown since the last call: exceptions and refused scripts too."""
        return [entry["message"] for entry in self._post("/se/log", type="browser")]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(b64decode(self._ask(Request(self._session + "/screenshot"))))

    def keys(self, *texts: str, held: str = "") -> None:
        """Press the keys of all texts, while the key `held` is down."""
        strokes = [{"type": kind, "value": key} for text in texts for key in text for kind in ("keyDown", "keyUp")]
        around = [{"type": "keyDown", "value": held}], [{"type": "keyUp", "value": held}]
        actions = [*around[0], *strokes, *around[1]] if held else strokes
        self._post("/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def click(self, selector: str, x: float | None = None, y: float | None = None, times: int = 1) -> None:
        """Click on an element at this point from its upper left corner; by default in its middle."""
        press = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}] * times
        self._pointer(self._move(selector, x, y), *press)

    def hover(self, selector: str, x: float, y: float) -> None:
        self._pointer(self._move(selector, x, y))

    def drag(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        down, up = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        path = [self._move(selector, *point) for point in (start, middle, end)]
        self._pointer(path[0], down, *path[1:], up)

    def wheel(self, selector: str, x: float, y: float, down: int, held: str = "") -> None:
        """Turn the wheel by so many pixels, while the key `held` is down."""
        at = self._move(selector, x, y)
        scroll = {"type": "scroll", "x": at["x"], "y": at["y"], "deltaX": 0, "deltaY": down, "duration": 0}
        key = [{"type": "keyDown", "value": held}, {"type": "pause"}, {"type": "keyUp", "value": held}]
        devices = [{"type": "wheel", "id": "wheel", "actions": [{"type": "pause"}, scroll, {"type": "pause"}]}]
        devices += [{"type": "key", "id": "keys", "actions": key}] if held else []
        self._post("/actions", actions=devices)

    def _pointer(self, *actions: dict[str, Any]) -> None:
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": list(actions)}
        self._post("/actions", actions=[mouse])

    def _move(self, selector: str, x: float | None, y: float | None) -> dict[str, Any]:
        """The action that moves the mouse to a point of an element, which is scrolled into the window."""
        place = "const found = document.querySelector(given[0]); found.scrollIntoView({ block: 'nearest' });"
        left, top, width, height = self.script(
            f"{place} const box = found.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]", selector
        )
        x, y = width / 2 if x is None else x, height / 2 if y is None else y
        return {"type": "pointerMove", "duration": 0, "x": round(left + x), "y": round(top + y)}

    def close(self) -> None:
        self._ask(Request(self._session, method="DELETE"))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser with an empty profile in `folder`, and end it. Raises RuntimeError if it is not installed."""
    found = programs()
    if found is None:
        raise RuntimeError(INSTALL)
    chromium, driver = found
    command = [driver, "--port=0", f"--log-path={folder / 'driver.log'}"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            ports = (re.search(r"started successfully on port (\d+)", line) for line in process.stdout)
            port = next((found[1] for found in ports if found), None)
            if port is None:
                raise RuntimeError(f"chromedriver did not start: exit code {process.wait()}")
            page = Page(f"http://127.0.0.1:{port}", folder / "profile", chromium)
            yield page
            page.close()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
