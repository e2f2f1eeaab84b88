"""Write lanes as a self-contained web page: zoom with the wheel, drag to move, point at a block for its name.

The page holds all intervals as JSON, and its script draws them. With more than MAX_PIECES intervals, gaps inside a
block that are too short to be seen are closed to keep the page small. The page then says so.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import strict_json
from ..messages import printable
from ..profiler.intervals import Intervals, union

if TYPE_CHECKING:
    from .lanes import Picture

SCRIPT = Path(__file__).with_name("page.js")
MAX_PIECES = 100_000
RESOLUTION = 20_000  # gaps of at most the whole time divided by this are closed


def write_page(pictures: Sequence["Picture"], path: Path) -> None:
    end = max(picture.end_us for picture in pictures)
    pieces = sum(len(block.intervals) for picture in pictures for block in picture.blocks)
    gap = end / RESOLUTION if pieces > MAX_PIECES else 0.0
    rows = [_row(picture, gap) for picture in pictures]
    note = f"; gaps of less than {gap:,.1f} us inside a block are closed" if gap else ""
    data = strict_json.write({"end": end, "rows": rows}, separators=(",", ":")).replace("<", "\\u003c")
    names = " &middot; ".join(escape(printable(picture.title, 1000)) for picture in pictures)
    path.write_text(_PAGE.substitute(names=names, note=note, data=data, script=SCRIPT.read_text("utf-8")), "utf-8")


def _row(picture: "Picture", gap: float) -> dict[str, Any]:
    blocks = []
    for block in picture.blocks:
        intervals = close_gaps(block.intervals, gap) + picture.shift_us
        blocks.append([block.lane, block.name, picture.colour(block), intervals.round(2).tolist()])
    return {"title": picture.title, "blocks": blocks}


def close_gaps(intervals: Intervals, gap: float) -> Intervals:
    """Join intervals that are at most `gap` apart."""
    return union(intervals + np.array([0.0, gap])) - np.array([0.0, gap]) if gap else intervals


_PAGE = Template("""<!doctype html>
<meta charset="utf-8">
<title>$names</title>
<style>
  body { font: 14px system-ui, sans-serif; margin: 1em; color: #222; background: #fff }
  canvas { width: 100%; display: block; cursor: grab }
  #info { height: 1.5em; margin-top: .5em; white-space: pre }
</style>
<canvas id="lanes"></canvas>
<div id="info">wheel: zoom &nbsp; drag: move &nbsp; double click: show all$note</div>
<script type="application/json" id="data">$data</script>
<script>
$script
</script>
""")
