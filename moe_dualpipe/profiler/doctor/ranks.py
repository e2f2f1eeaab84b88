"""Match the transfers of several ranks: what each would take if all ranks joined at once, and who joined last.

The k-th collective of a group is the same on all its ranks. It is shortest on the rank that joined last, because it
ends on all ranks together. This needs no common clock.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .case import Case
from .causes.exposed import is_point_to_point
from .replay import Floats, Ints


class Met(NamedTuple):
    """The n collectives of one kind that the M ranks of a group have in common."""

    ranks_M: Ints
    """Positions of the ranks."""
    events_Mn: Ints
    durations_Mn: Floats

    @property
    def own_us(self) -> Floats:
        """What each collective takes once all ranks have joined. Shape [n]."""
        return self.durations_Mn.min(axis=0)


def meetings_of(cases: Sequence[Case]) -> list[Met]:
    groups: dict[tuple[object, ...], list[tuple[int, list[int]]]] = defaultdict(list)
    for number, case in enumerate(cases):
        for key, events in _collectives(case).items():
            groups[key].append((number, events))
    found = []
    for members in groups.values():
        if len(members) > 1 and len({len(events) for _, events in members}) == 1:
            durations = np.array([cases[number].view.duration[events] for number, events in members])
            numbers, events = zip(*members, strict=True)
            found.append(Met(np.array(numbers, np.int64), np.array(events, np.int64), durations))
    return found


def largest(values: Sequence[Floats], meetings: Sequence[Met]) -> list[Floats]:
    """For each collective, the largest value on any of its ranks. values: of the events of each rank."""
    found = [own.copy() for own in values]
    for met in meetings:
        every_Mn = [values[rank][events] for rank, events in zip(met.ranks_M, met.events_Mn, strict=True)]
        for rank, events in zip(met.ranks_M, met.events_Mn, strict=True):
            found[rank][events] = np.max(every_Mn, axis=0)
    return found


def join(cases: Sequence[Case], meetings: Sequence[Met]) -> Iterator[tuple[Case, Ints | None]]:
    """Yield each case with the times of its transfers without waits, and the case that joined last in each event.

    Without other ranks that have the same collectives, the times are unknown (None).
    """
    times = [case.view.duration.copy() for case in cases]
    last = [np.full(len(case.view.events), -1, np.int64) for case in cases]
    found = set[int]()
    for met in meetings:
        for number, events in zip(met.ranks_M.tolist(), met.events_Mn, strict=True):
            times[number][events] = met.own_us
            last[number][events] = met.ranks_M[met.durations_Mn.argmin(axis=0)]
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
