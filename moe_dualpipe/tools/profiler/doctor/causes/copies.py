"""Copies and fills beside which nothing is computed."""

import numpy as np

from ...account import copy_name
from ...intervals import difference, length_before
from ..case import Case, Finding, shorter
from ..view import COMPUTE, COPY


def find(case: Case) -> list[Finding]:
    """Find copies and fills on the path of the computation."""
    view = case.view
    exposed = length_before(difference(np.array([[0.0, case.window_us]]), case.spans((COMPUTE,))))
    fills = np.array(["memset" in event.name.lower() for event in view.events], bool)
    found = []
    for key, wanted in (("copies", ~fills), ("memsets", fills)):
        events = np.flatnonzero((view.kind == COPY) & wanted)
        costs = exposed(view.end[events]) - exposed(view.start[events])
        if not costs.any():
            continue
        size = sum(view.events[event].bytes for event in events.tolist())
        evidence = (f"Nothing was computed for {costs.sum():,.0f} us during {len(events):,} of them: {size:,} bytes.",)
        change = shorter(case.nodes.event[events], costs)
        names = [copy_name(view.events[event]) for event in events.tolist()]
        found.append(case.finding(
            key, events, view.start[events], view.end[events], evidence, change, costs=costs, places=names,
        ))  # fmt: skip
    return found
