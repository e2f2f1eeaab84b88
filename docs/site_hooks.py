"""MkDocs hooks, and the files of docs/play.html.

Links to repository files outside docs/ become plain code, because the site does not contain them. play_files.js is
written beside play.html: play.py and the modules that it imports, which the page runs under Pyodide.

    python docs/site_hooks.py FOLDER [PYODIDE]    write the page as a folder; with Pyodide's files, it needs no network
"""

import base64
import io
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("__init__.py", "messages.py", "schedule/*.py", "tools/__init__.py", "tools/drawing/*.py")
PYODIDE = ("pyodide.js", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")

_LINK = re.compile(r"\[([^\]]+)\]\(\.\./(?!images/)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace `[text](../path)` by `text` as code.

    Example: "[the loop](../moe_dualpipe/training/loop.py)" -> "`the loop`".
    """
    return _LINK.sub(lambda link: link[1] if "`" in link[1] else f"`{link[1]}`", markdown)


def on_post_build(config: dict[str, str], **_: object) -> None:
    write_play_files(Path(config["site_dir"]))


def write_play_files(folder: Path, pyodide: Path | None = None) -> None:
    """Write play_files.js: the modules as a zip file, and Pyodide if its folder is given, all in base64.

    In one script, because a page that is opened as a file may read no other kind of file.
    """
    sys.path.insert(0, str(ROOT))
    from moe_dualpipe.schedule import NAMES

    package, packed = ROOT / "moe_dualpipe", io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for pattern in SOURCES for path in package.glob(pattern)):
            archive.writestr(str(path.relative_to(ROOT)), path.read_bytes())
        archive.writestr("play.py", (ROOT / "docs" / "play.py").read_bytes())
    contents = {"sources.zip": packed.getvalue()}
    contents |= {name: (pyodide / name).read_bytes() for name in PYODIDE} if pyodide else {}
    files = {name: base64.b64encode(content).decode() for name, content in contents.items()}
    (folder / "play_files.js").write_text(f"const PLAY_FILES = {json.dumps(files | {'names': NAMES})};\n")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name in ("play.html", "learn_dualpipe.md"):
        shutil.copy(ROOT / "docs" / name, out)
    write_play_files(out, *map(Path, sys.argv[2:]))
    print(out / "play.html")
