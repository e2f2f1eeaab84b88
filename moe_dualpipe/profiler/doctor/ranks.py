"""Match the transfers of several ranks: what each would take if all ranks joined at once, and who joined last.

The k-th collective of a group is the same on all its ranks. It is shortest on the rank that joined last, because it
ends on all ranks together. This needs no common clock.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from .case import Case
from .causes.exposed import is_point_to_point
from .replay import Ints


def join(cases: Sequence[Case]) -> Iterator[tuple[Case, Ints | None]]:
    """Yield each case with the times of its transfers without waits, and the case that joined last in each event.

    Without other ranks that have the same collectives, the times are unknown (None).
    """
    groups: dict[tuple[object, ...], list[tuple[int, list[int]]]] = defaultdict(list)
    for number, case in enumerate(cases):
        for key, events in _collectives(case).items():
            groups[key].append((number, events))
    times = [case.view.duration.copy() for case in cases]
    last = [np.full(len(case.view.events), -1, np.int64) for case in cases]
    found = set[int]()
    for members in groups.values():
        if len(members) < 2 or len({len(events) for _, events in members}) > 1:
            continue
        durations = np.array([cases[number].view.duration[events] for number, events in members])
        numbers = np.array([number for number, _ in members])
        for number, events in members:
            times[number][events] = durations.min(axis=0)
            last[number][events] = numbers[durations.argmin(axis=0)]
            found.add(number)
    for number, case in enumerate(cases):
        if number in found:
            yield replace(case, comm_us=times[number]), last[number]
        else:
            yield case, None


def _collectives(case: Case) -> dict[tuple[object, ...], list[int]]:
    """The events of each collective's name and group, in order."""
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for event in np.flatnonzero(case.is_comm).tolist():
        if is_point_to_point(case, event):
            continue
        one = case.view.events[event]
        c = one.collective
        found[(one.name,) if c is None else (one.name, c.name, c.ranks or c.description or c.group)].append(event)
    return found
