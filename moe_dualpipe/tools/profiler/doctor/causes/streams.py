"""Transfers of different groups on one stream, which wait for each other although their links may be free.

torch.distributed gives each process group its own stream. Transfers of two groups share a stream if both use one
communicator or one side stream. Then each waits for the other.

Transfers of one group share their links, so more streams would not send more. So only transfers of different groups
are separated. If groups are unknown, transfers of different annotations are, and each gets half of the bandwidth while
both run.
"""

from dataclasses import replace

import numpy as np

from ..case import Case, Change, Finding
from ..inputs import LATE, NEAR
from ..replay import ASSUMED, DATA, Floats, Graph, Ints

LEAST = 3


def find(case: Case) -> list[Finding]:
    """Find transfers that wait only for an unrelated transfer before them on their stream."""
    view = case.view
    groups = [_group(case, event) for event in range(len(view.events))]
    waiting = [
        event for event in np.flatnonzero(case.is_comm & (case.previous >= 0)).tolist()
        if case.is_comm[case.previous[event]] and groups[event] != groups[int(case.previous[event])]
        and view.start[event] - view.end[case.previous[event]] <= NEAR
    ]  # fmt: skip
    events = np.array(waiting, np.int64)
    waited = view.end[case.previous[events]] - _could_start(case)[events] if len(events) else np.empty(0)
    events, waited = events[waited > LATE], waited[waited > LATE]
    if len(events) < LEAST:
        return []
    worst = int(np.argmax(waited))
    first, second = (case.place(int(e)) for e in (case.previous[events[worst]], events[worst]))
    known = all(case.view.events[event].collective is not None for event in events.tolist())
    assumption = "do not share links." if known else "share the bandwidth while they run at once."
    evidence = (
        f"{len(events):,} transfers waited for the transfer before them on their stream: {waited.sum():,.0f} us in "
        f"total, {waited[worst]:,.0f} us at most ({second} waited for {first}).",
        f"They had been launched, and their input was ready. The gain assumes that the groups {assumption}",
    )
    change = _apart(case, groups, events, waited, known)
    start, end = view.start[events], view.end[events]
    return [case.finding("shared-stream", events, start - waited, end, evidence, change, costs=waited)]


def _group(case: Case, event: int) -> str:
    collective = case.view.events[event].collective
    if collective is not None and (collective.group or collective.ranks):
        return f"{collective.group} {collective.ranks}"
    return case.view.labels[event]


def _could_start(case: Case) -> Floats:
    """When each event was launched and its known and assumed inputs were ready, whatever else its stream had to do."""
    view, graph, waits = case.view, case.graph, case.graph.waits
    calls = np.array([call.start for call in view.calls] or [0.0])
    ready = np.full(len(graph.start), -np.inf)
    inputs = np.isin(waits.kind, (DATA, ASSUMED))
    np.maximum.at(ready, waits.target[inputs], (graph.start + graph.duration)[waits.source[inputs]])
    launched = np.where(view.launch >= 0, calls[view.launch] + case.latency, view.start)
    return np.maximum(ready[case.nodes.event], launched)


def _apart(case: Case, groups: list[str], events: Ints, waited: Floats, known: bool) -> Change:
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
    longer = np.zeros(len(case.graph.start))
    if not known:
        first, second = nodes[case.previous[events]], nodes[events]
        slowed = np.minimum(case.graph.duration[second], waited)
        np.add.at(longer, first, slowed)
        np.add.at(longer, second, slowed)

    def change(graph: Graph) -> Graph:
        return replace(graph, before=np.where(before != case.graph.before, before, graph.before),
                       duration=graph.duration + longer)  # fmt: skip

    return change
