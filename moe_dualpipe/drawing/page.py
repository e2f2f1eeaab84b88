"""Lanes as a web page that needs nothing else: zoom with the wheel, move with the mouse, point at a block for its name.

The page holds the intervals as JSON and draws them itself. Of more than MOST pieces, gaps inside a block that are far
too short to be seen are closed, and the page says so: a trace of a million kernels stays a page.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from ..profiler.intervals import Intervals, union

if TYPE_CHECKING:
    from .lanes import Picture

SCRIPT = Path(__file__).with_name("page.js")
MOST = 100_000
RESOLUTION = 20_000
"""A gap shorter than this part of the whole is closed, where there are more than MOST pieces."""


def write_page(pictures: Sequence["Picture"], path: Path) -> None:
    end = max(picture.end_us for picture in pictures)
    pieces = sum(len(block.intervals) for picture in pictures for block in picture.blocks)
    gap = end / RESOLUTION if pieces > MOST else 0.0
    rows = [_row(picture, gap) for picture in pictures]
    note = f"; gaps inside of a block below {gap:,.1f} us are closed" if gap else ""
    data = json.dumps({"end": end, "rows": rows}, separators=(",", ":")).replace("<", "\\u003c")
    names = " &middot; ".join(escape(picture.title) for picture in pictures)
    path.write_text(_PAGE.substitute(names=names, note=note, data=data, script=SCRIPT.read_text("utf-8")), "utf-8")


def _row(picture: "Picture", gap: float) -> dict[str, Any]:
    blocks = []
    for block in picture.blocks:
        intervals = _closed(block.intervals, gap) + picture.shift_us
        blocks.append([block.lane, block.name, picture.colour(block), intervals.round(2).tolist()])
    return {"title": picture.title, "blocks": blocks}


def _closed(intervals: Intervals, gap: float) -> Intervals:
    if not gap:
        return intervals
    widened = union(intervals + np.array([0.0, gap]))
    return widened - np.array([0.0, gap])


_PAGE = Template("""<!doctype html>
<meta charset="utf-8">
<title>$names</title>
<style>
  body { font: 14px system-ui, sans-serif; margin: 1em; color: #222; background: #fff }
  canvas { width: 100%; display: block; cursor: grab }
  #told { height: 1.5em; margin-top: .5em; white-space: pre }
</style>
<canvas id="lanes"></canvas>
<div id="told">wheel: zoom &nbsp; drag: move &nbsp; double click: everything$note</div>
<script type="application/json" id="data">$data</script>
<script>
$script
</script>
""")
