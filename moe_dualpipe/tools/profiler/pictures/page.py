"""Write lanes as a self-contained web page, which works without a network.

The page holds the numbers and names as JSON (page_data.py). Its script draws them; the parts of the script and the
style are in web/. A browser runs no other script: the page allows only the one with this hash. Names stay text, because
JSON never ends a script and the script never writes markup.
"""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template

from ....data import strict_json
from ....messages import printable
from .page_data import page_data
from .picture import Picture

WEB = Path(__file__).with_name("web")
SCRIPTS = (
    "data", "view", "paint", "lanes", "overview", "ruler", "memory", "details", "legend", "search", "verdicts", "keys",
    "main",
)  # fmt: skip


def write_page(pictures: Sequence[Picture], path: Path, note: str = "") -> None:
    """Write the page. note: a sentence that it shows below the lanes."""
    text = strict_json.write(page_data(pictures, note), separators=(",", ":")).replace("<", "\\u003c")
    title = " · ".join(printable(picture.title, 200) for picture in pictures)
    script, style = page_script(), (WEB / "page.css").read_text("utf-8")
    parts = {"title": escape(title), "data": text, "script": script, "style": style, "hash": _hash(script)}
    template = Template((WEB / "page.html").read_text("utf-8"))
    path.write_text(template.substitute(parts), "utf-8")


def page_script() -> str:
    """The parts of the script as one function, so that they share names only with each other."""
    parts = [(WEB / f"{name}.js").read_text("utf-8") for name in SCRIPTS]
    return "\n".join(['"use strict";', "(() => {", *parts, "})();"])


def _hash(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()
