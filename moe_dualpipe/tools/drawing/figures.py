"""Create and save matplotlib figures. matplotlib is imported when the first figure is created."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...messages import printable, quoted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches. Raises ImportError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'moe-dualpipe[viz]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def plain_text(name: str) -> str:
    """Return a name from a file for a figure: "$" begins no formula, and a leading "_" hides no entry of a legend."""
    text = printable(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def save_figure(figure: "Figure", path: Path) -> None:
    """Save a figure in the format of the suffix. In an SVG, text stays text; equal figures give equal files."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "moe-dualpipe"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def check_output(path: Path, suffixes: Sequence[str]) -> None:
    """Raise ValueError unless a file with one of the suffixes can be created at `path`."""
    if not path.name.lower().endswith(tuple(suffixes)):
        use = f"one of {', '.join(suffixes)}" if len(suffixes) > 1 else suffixes[0]
        raise ValueError(f"cannot write {quoted(path.name)}: use {use}")
    if path.is_dir():
        raise ValueError(f"cannot write {quoted(str(path))}: it is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {quoted(str(path))}: the folder {quoted(str(path.parent))} does not exist")
