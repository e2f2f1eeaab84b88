"""Transfers of different groups on one stream, which wait for each other although their links may be free.

torch.distributed gives each process group its own stream. Transfers of two groups share a stream if both use one
communicator or one side stream. Then each waits for the other.

Transfers of one group share their links, so more streams would not send more. So only transfers of different recorded
groups are separated.
"""

from dataclasses import replace

import numpy as np

from ..case import Case, Change, Finding
from ..inputs import LATE, NEAR
from ..replay import Graph, Ints

LEAST = 3


def find(case: Case) -> list[Finding]:
    """Find transfers that wait only for an unrelated transfer before them on their stream."""
    view = case.view
    recorded = [event.collective for event in view.events]
    groups = [f"{one.group} {one.ranks}" if one is not None and (one.group or one.ranks) else "" for one in recorded]
    waiting = [
        event for event in np.flatnonzero(case.is_comm & (case.previous >= 0)).tolist()
        if groups[event] and "" != groups[int(case.previous[event])] != groups[event]
        and view.start[event] - view.end[case.previous[event]] <= NEAR
    ]  # fmt: skip
    events = np.array(waiting, np.int64)
    waited = view.end[case.previous[events]] - case.could_start[events]
    events, waited = events[waited > LATE], waited[waited > LATE]
    if len(events) < LEAST:
        return []
    worst = int(np.argmax(waited))
    first, second = (case.place(int(e)) for e in (case.previous[events[worst]], events[worst]))
    evidence = (
        f"{len(events):,} transfers waited for the transfer before them on their stream: {waited.sum():,.0f} us in "
        f"total, {waited[worst]:,.0f} us at most ({second} waited for {first}).",
        "They had been launched, and their input was ready. The gain assumes that the groups do not share links.",
    )
    change = _apart(case, groups, events)
    start, end = view.start[events], view.end[events]
    return [case.finding("shared-stream", events, start - waited, end, evidence, change, costs=waited)]


def _apart(case: Case, groups: list[str], events: Ints) -> Change:
    """A change after which transfers follow only those of their group. Other work on the stream goes with the next
    transfer."""
    view, nodes = case.view, case.nodes.event
    streams = np.unique(view.stream[events])
    before = case.graph.before.copy()
    last: dict[tuple[int, str], int] = {}
    following: dict[int, str] = {}
    own = np.flatnonzero(np.isin(view.stream, streams)).tolist()
    group_of: dict[int, str] = {}
    for event in reversed(own):
        stream = int(view.stream[event])
        if case.is_comm[event]:
            following[stream] = groups[event]
        group_of[event] = following[stream] if stream in following else groups[event]
    for event in own:
        key = int(view.stream[event]), group_of[event]
        before[nodes[event]] = nodes[last[key]] if key in last else -1
        last[key] = event

    def change(graph: Graph) -> Graph:
        return replace(graph, before=np.where(before != case.graph.before, before, graph.before))

    return change
