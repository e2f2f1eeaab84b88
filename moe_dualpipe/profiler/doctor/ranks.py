"""What the transfers of several ranks would take if all ranks joined at once, and who joined last.

The same collective on several ranks is a meeting (../meetings.py). It is shortest on the rank that joined last, because
it ends on all ranks together. This needs no common clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..meetings import Meeting
from .case import Case
from .causes.exposed import is_point_to_point
from .replay import Ints


def join(cases: Sequence[Case], meetings: Sequence[Meeting]) -> Iterator[tuple[Case, Ints | None]]:
    """Yield each case with the times of its transfers without waits, and the case that joined last in each event.

    A case without meetings has unknown times (None). Sends and receives are left out: their causes are others.
    """
    places = {
        id(case.view.events[event]): (number, event)
        for number, case in enumerate(cases)
        for event in np.flatnonzero(case.is_comm).tolist()
        if not is_point_to_point(case, event)
    }
    times = [case.view.duration.copy() for case in cases]
    last = [np.full(len(case.view.events), -1, np.int64) for case in cases]
    found = set[int]()
    for meeting in meetings:
        members = [places[id(event)] for event in meeting.events if id(event) in places]
        if len(members) < len(meeting.events):
            continue
        late = members[meeting.members.index(meeting.last)][0]
        for number, event in members:
            times[number][event], last[number][event] = meeting.shortest_us, late
            found.add(number)
    for number, case in enumerate(cases):
        if number in found:
            yield replace(case, comm_us=times[number]), last[number]
        else:
            yield case, None
