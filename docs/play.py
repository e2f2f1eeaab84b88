"""What docs/play.html shows: schedules for one model, as pictures and numbers. Standard library only.

The page runs this module in the browser, under Pyodide. So it draws the boxes of `schedule show`, and its numbers are
those of `schedule compare`.
"""

import json
from typing import Any

from moe_dualpipe.schedule import Costs
from moe_dualpipe.schedule.compare import ComparedSchedule, compared
from moe_dualpipe.tools.drawing.tables import format_number, format_range
from moe_dualpipe.tools.drawing.timeline import COLORS, LABELS, boxes, shade, shortest

_ROW, _LEFT, _LEAST = 26, 48, 5  # pixels: the height of a rank, the room for its name, and the width of a box


def play(request: str) -> str:
    """Return JSON for the page: `command`, `legend` and `schedules`, each with a `problem`, or `svg` and numbers.

    request: JSON with `schedules` (names), `ranks`, `micro_batches`, `costs` and the `width` of a picture in pixels;
    it is wider if boxes would be too narrow.
    """
    asked = json.loads(request)
    ranks, micro_batches, costs = asked["ranks"], asked["micro_batches"], asked["costs"]
    options = " ".join(f"--cost.{name} {format_number(cost)}" for name, cost in costs.items())
    try:
        entries = [compared(name, ranks, ranks, micro_batches, Costs(**costs)) for name in asked["schedules"]]
    except ValueError as error:  # the costs
        entries = [ComparedSchedule(name, ranks, None, str(error)) for name in asked["schedules"]]
    timelines = [entry.timeline for entry in entries if entry.timeline]
    until = max((float(timeline.makespan) for timeline in timelines), default=1)
    readable = _LEFT + 1 + max((until / shortest(timeline) for timeline in timelines), default=0) * _LEAST
    return json.dumps({
        "command": f"moe-dualpipe schedule compare --stages {ranks} --micro-batches {micro_batches} {options}",
        "legend": [(COLORS[letter], LABELS[letter]) for letter in COLORS],
        "schedules": [_shown(entry, until, max(asked["width"], readable)) for entry in entries],
    })  # fmt: skip


def _shown(entry: ComparedSchedule, until: float, width: float) -> dict[str, Any]:
    if (timeline := entry.timeline) is None:
        return entry.as_object()
    step, bubble = format_number(timeline.makespan), format_range(timeline.bubble)
    summary = (
        f"step {step}, bubble {bubble} per rank ({timeline.bubble_share:.1%}), "
        f"at least {format_number(entry.least)} in any order with the same memory"
    )
    return entry.as_object() | {"summary": summary, "svg": _svg(entry, until, width)}


def _svg(entry: ComparedSchedule, until: float, width: float) -> str:
    assert entry.timeline is not None
    scale, parts = (width - _LEFT - 1) / until, []
    start = float(entry.timeline.start)
    for rank in range(entry.num_ranks):
        top = rank * _ROW + 2
        parts.append(f'<text x="0" y="{top + 15}">rank {rank}</text>')
        frame = 0.0
        for box in boxes(entry.timeline, rank):
            left, size = _LEFT + (box.start - start) * scale, (box.end - box.start) * scale
            color, height = shade(entry.timeline, rank, box), _ROW - 4
            parts.append(f'<rect x="{left:.1f}" y="{top}" width="{size:.1f}" height="{height}" fill="{color}"/>')
            if size > 7 * len(str(box.micro_batch)) + 1:
                middle = f'x="{left + size / 2:.1f}" y="{top + 15}" text-anchor="middle"'
                parts.append(f"<text {middle}>{box.micro_batch}</text>")
            if box.framed and box.letter == "F":
                frame = left
            elif box.framed:
                around = f'x="{frame:.1f}" y="{top}" width="{left + size - frame:.1f}" height="{height}"'
                parts.append(f'<rect {around} class="pair"/>')
    head = f'<svg role="img" width="{width}" height="{entry.num_ranks * _ROW}" aria-label="timeline of {entry.name}">'
    return "".join([head, *parts, "</svg>"])
