"""What the transfers of several ranks would take if all ranks joined at once, and who joined last.

The events of one collective on several ranks are a meeting (../matching.py). A collective ends on all ranks at the same
time, so its event is shortest on the rank that joined last. This needs no common clock.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..matching import Meeting
from .case import Case
from .causes.exposed import is_point_to_point
from .replay import Floats, Ints


class Met(NamedTuple):
    """The n collectives that the same M ranks have in common, in order."""

    ranks_M: Ints
    """Positions of the ranks."""
    events_Mn: Ints
    durations_Mn: Floats

    @property
    def own_us(self) -> Floats:
        """What each collective takes once all ranks have joined. Shape [n]."""
        return self.durations_Mn.min(axis=0)


def meetings_of(cases: Sequence[Case], meetings: Sequence[Meeting]) -> list[Met]:
    """The collectives whose events are all in `cases`. Sends and receives are left out: they have other causes."""
    places = {
        id(case.view.events[event]): (rank, event)
        for rank, case in enumerate(cases)
        for event in np.flatnonzero(case.is_comm).tolist()
        if not is_point_to_point(case, event)
    }
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    for meeting in meetings:
        members = [places[id(event)] for event in meeting.events if id(event) in places]
        if len(members) == len(meeting.events):
            ranks, events = zip(*members, strict=True)
            groups[ranks].append(events)
    found = []
    for ranks, events_nM in groups.items():
        events_Mn = np.array(events_nM, np.int64).T
        durations = [cases[rank].view.duration[events] for rank, events in zip(ranks, events_Mn, strict=True)]
        found.append(Met(np.array(ranks, np.int64), events_Mn, np.array(durations)))
    return found


def largest(values: Sequence[Floats], meetings: Sequence[Met]) -> list[Floats]:
    """For each collective, the largest value on any of its ranks. values: of the events of each rank."""
    found = [own.copy() for own in values]
    for met in meetings:
        every_Mn = [values[rank][events] for rank, events in zip(met.ranks_M, met.events_Mn, strict=True)]
        for rank, events in zip(met.ranks_M, met.events_Mn, strict=True):
            found[rank][events] = np.max(every_Mn, axis=0)
    return found


class Joined(NamedTuple):
    """Who joined each event of a case last: the number of that case, or -1; and the longest wait for it."""

    last: Ints
    waited_us: Floats


def join(cases: Sequence[Case], meetings: Sequence[Met]) -> Iterator[tuple[Case, Joined | None]]:
    """Yield each case with the durations of its transfers without waits, and who joined last.

    For a case without meetings, both are unknown (None).
    """
    times = [case.view.duration.copy() for case in cases]
    joined = [Joined(np.full(len(case.view.events), -1, np.int64), np.zeros(len(case.view.events))) for case in cases]
    found = set[int]()
    for met in meetings:
        for number, events in zip(met.ranks_M.tolist(), met.events_Mn, strict=True):
            times[number][events] = met.own_us
            joined[number].last[events] = met.ranks_M[met.durations_Mn.argmin(axis=0)]
            joined[number].waited_us[events] = met.durations_Mn.max(axis=0) - met.own_us
            found.add(number)
    for number, case in enumerate(cases):
        if number in found:
            yield replace(case, comm_us=times[number]), joined[number]
        else:
            yield case, None
