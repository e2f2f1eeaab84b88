"""A timeline as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing.

Each rank is a process with its actions, a counter of what it holds, and arrows for transfers to other ranks. The format
is Google's "Trace Event Format".
"""

from typing import Any

from ...schedule.actions import Action, Backward, Forward, Overlap, Part, members
from ...schedule.timeline import Timeline
from ...schedule.walk import Result, needs, produces


def chrome_trace(timeline: Timeline, microseconds: float = 1000) -> dict[str, Any]:
    """Return the trace as a JSON object. microseconds: the length of one unit of the timeline's time in the trace."""
    events: list[dict[str, Any]] = []
    computed: dict[Result, tuple[int, float]] = {}  # the rank, and a time inside the action

    def at(time: float) -> float:
        return float(time - timeline.start) * microseconds

    for rank, spans in enumerate(timeline.spans):
        events += [
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
            {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
            {"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "actions"}},
        ]
        for span in spans:
            events.append({
                "ph": "X", "pid": rank, "tid": 0, "name": str(span.action), **_describe(span.action),
                "ts": at(span.start), "dur": float(span.duration) * microseconds,
            })  # fmt: skip
            for member in members(span.action):
                computed[produces(member)] = rank, at((span.start + span.end) / 2)
        for held in timeline.held(rank):
            counts = {"activations": held.activations, "deferred weight gradients": held.deferred}
            events.append({"ph": "C", "pid": rank, "name": "micro-batches held", "ts": at(held.time), "args": counts})

    arrows = 0
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            for need in (
                need for member in members(span.action) for need in needs(member, timeline.schedule.num_stages)
            ):
                source, time = computed[need]
                if source != rank:
                    both = {"name": "transfer", "cat": "transfer", "id": arrows, "tid": 0}
                    events.append({"ph": "s", "pid": source, "ts": time, **both})
                    events.append({"ph": "f", "bp": "e", "pid": rank, "ts": at(span.start), **both})
                    arrows += 1
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": timeline.schedule.name}}


def _describe(action: Action) -> dict[str, Any]:
    """Return the category and the arguments of the event of `action`."""
    if isinstance(action, Overlap):
        forward, backward = action.forward, action.backward
        return {"cat": "overlapped pair", "args": {
            "forward stage": forward.stage, "forward micro-batch": forward.micro_batch,
            "backward stage": backward.stage, "backward micro-batch": backward.micro_batch,
        }}  # fmt: skip
    weight = isinstance(action, Backward) and action.part is Part.WEIGHT
    category = "forward" if isinstance(action, Forward) else "weight gradient" if weight else "backward"
    return {"cat": category, "args": {"stage": action.stage, "micro-batch": action.micro_batch}}
