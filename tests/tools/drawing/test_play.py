"""docs/play.html draws with this project's code, and shows the numbers of `schedule compare`."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from docs.play import play
from moe_dualpipe import cli
from moe_dualpipe.schedule import NAMES, Costs, Overlap
from moe_dualpipe.schedule.compare import compared
from moe_dualpipe.tools.drawing.timeline import boxes

ROOT = Path(__file__).parents[3]
PYODIDE = ROOT / "build" / "pyodide" / "package"  # make play
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
COSTS = {"F": 2, "B": 5, "W": 1.5, "FB": 6, "comm": 0.25}


def ask(*schedules: str, ranks: int = 4, micro_batches: int = 8, **costs: float) -> dict[str, Any]:
    request = {"schedules": schedules, "ranks": ranks, "micro_batches": micro_batches, "costs": COSTS | costs}
    return json.loads(play(json.dumps(request | {"width": 500})))


@pytest.mark.parametrize("ranks,micro_batches", [(4, 8), (2, 7), (6, 12)])
def test_the_command_on_the_page_prints_the_numbers_on_the_page(ranks, micro_batches, capsys):
    found = ask(*NAMES, ranks=ranks, micro_batches=micro_batches)
    assert cli.main([*found["command"].split()[1:], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)[: len(NAMES)]
    shown = [{key: one[key] for key in one if key not in ("svg", "summary")} for one in found["schedules"]]
    assert shown == printed
    for one in (one for one in shown if "problem" not in one):
        assert max(one["least_of_rank"]) == one["least"] <= one["step_time"]


def test_a_picture_has_every_box_in_its_place_and_both_have_one_scale():
    slow, fast = ask("gpipe", "dualpipe")["schedules"]
    entry = compared("dualpipe", 4, 4, 8, Costs(**COSTS))
    row = [box for rank in range(4) for box in boxes(entry.timeline, rank)]
    drawn = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" height="22" fill="#', fast["svg"])
    scale = (500 - 49) / slow["step_time"]
    for box, (left, width) in zip(row, drawn, strict=True):
        assert float(left) == pytest.approx(48 + box.start * scale, abs=0.06)
        assert float(width) == pytest.approx((box.end - box.start) * scale, abs=0.06)
    pairs = sum(isinstance(action, Overlap) for actions in entry.timeline.schedule.actions for action in actions)
    assert fast["svg"].count("pair") == pairs > 0


def test_what_cannot_run_says_why():
    odd, fine = ask("dualpipe", "1f1b", ranks=3)["schedules"]
    assert odd["problem"].startswith("dualpipe needs an even number of pipeline ranks: got 3; use 4") and "svg" in fine
    assert [one["problem"] for one in ask("1f1b", "zbv", W=9)["schedules"]] == [
        "cost W is part of B and must be smaller: got W=9 and B=5; use W=2.5, or a larger B"
    ] * 2


def test_the_packed_modules_are_all_that_the_page_needs(tmp_path):
    """They run alone, without installed packages. The page names what they return."""
    subprocess.run([sys.executable, "docs/site_hooks.py", tmp_path], cwd=ROOT, check=True, capture_output=True)
    packed = json.loads((tmp_path / "play_files.js").read_text().removeprefix("const PLAY_FILES = ").rstrip(";\n"))
    assert packed["names"] == [*NAMES]
    alone = (
        "import sys, base64; open('a.zip', 'wb').write(base64.b64decode(sys.stdin.read())); sys.path[0:0] = ['a.zip'];"
        "from play import play; print(play(sys.argv[1]), end='')"
    )
    request = json.dumps({"schedules": ["zbv"], "ranks": 2, "micro_batches": 4, "costs": COSTS, "width": 300})
    command = [sys.executable, "-I", "-S", "-c", alone, request]
    done = subprocess.run(
        command, cwd=tmp_path, input=packed["sources.zip"], capture_output=True, text=True, check=True
    )
    assert done.stdout == play(request)
    page = (ROOT / "docs" / "play.html").read_text()
    (one,) = json.loads(done.stdout)["schedules"]
    table = page[page.index("const TABLE") : page.index("];", page.index("const TABLE"))]
    for key in re.findall(r', "(\w+)"\]', table):
        assert len(one[key]) == one["ranks"]
    assert len(page.splitlines()) <= 250


class Browser:
    """Headless Chromium, over its debugging pipe: JSON messages that end in a zero byte."""

    def __init__(self, url: str, width: int, folder: Path):
        (read, self.write), (self.read, write) = os.pipe(), os.pipe()
        options = f"--headless=new --no-sandbox --disable-gpu --user-data-dir={folder}"
        command = f"exec {CHROMIUM} {options} --remote-debugging-pipe 3<&{read} 4>&{write}"
        self.process = subprocess.Popen(["bash", "-c", command], pass_fds=(read, write), stderr=subprocess.DEVNULL)
        self.numbers, self.rest, self.session = count(1), b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                self.rest += os.read(self.read, 1 << 20)
            line, _, self.rest = self.rest.partition(b"\0")
            if (answer := json.loads(line)).get("id") == number:
                return answer["result"]

    def get(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + 120
        while not self.get(expression):
            assert time.monotonic() < deadline, self.get("document.body.innerText")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=39)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.skipif(not PYODIDE.exists(), reason="Pyodide is not here: make play")
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser_a_key_on_a_slider_redraws_with_the_numbers_of_compare(width, tmp_path, capsys):
    subprocess.run([sys.executable, "docs/site_hooks.py", tmp_path, PYODIDE], cwd=ROOT, check=True, capture_output=True)
    browser = Browser(f"file://{tmp_path}/play.html#second=zbv&F=2&B=5&W=2&FB=6", width, tmp_path / "profile")
    try:
        browser.wait("document.body.dataset.drawn")
        browser.get("document.getElementById('micro_batches').focus()")
        browser.press("ArrowRight")
        browser.wait("document.body.dataset.drawn > 1")
        text, command, link = (
            browser.get(expression)
            for expression in ("document.body.innerText", "command.textContent", "location.hash")
        )
        assert browser.get("document.documentElement.scrollWidth") <= browser.get("innerWidth") == width
    finally:
        browser.process.terminate()
        browser.process.wait()
    assert "--micro-batches 9 " in command and "micro_batches=9" in link and "second=zbv" in link
    assert cli.main([*command.split()[1:], "--json"]) == 0
    entries = {one["schedule"]: one for one in json.loads(capsys.readouterr().out) if one["ranks"] == 4}
    for name in ("1f1b", "zbv"):
        one = entries[name]
        assert f"step {one['step_time']:g}, bubble {one['bubble'][0]:g} per rank" in text
        columns = "bubble", "peak_activations", "peak_deferred", "parameters", "least_of_rank"
        for rank in range(4):
            assert "\t".join(f"{value:g}" for value in (rank, *(one[key][rank] for key in columns))) in text
