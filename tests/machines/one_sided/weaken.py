"""Recordings with one fence of a kernel removed or weakened, wherever it runs."""

from collections.abc import Iterator, Mapping

import pytest

from tests.machines.one_sided.events import Atomic, Barrier, Event, HazardError, Launch, Recording
from tests.machines.one_sided.search import explore


def check_fences(recording: Recording, hazards: Mapping[str, str]) -> None:
    """Check that a recording is safe, and that it is not without any of its fences: `hazards` says what goes wrong."""
    assert explore(recording) > 100
    found = set()
    for name, weaker in weakened(recording):
        fence = name.rpartition(" -> ")[0]
        with pytest.raises(HazardError, match=hazards[fence]):
            explore(weaker)
        found.add(fence)
    assert found == hazards.keys()


def weakened(recording: Recording) -> Iterator[tuple[str, Recording]]:
    """Yield (fence and change, recording) for each barrier, wait, ordering and scope."""
    launches = [launch for launches in recording.ranks for launch in launches]
    names = {
        name: None
        for launch in launches
        for events in launch.programs
        for event in events
        for name in _changes(launch, event)
    }
    for name in names:
        ranks = [[_change(launch, name) for launch in launches] for launches in recording.ranks]
        yield name, recording._replace(ranks=ranks)


def _change(launch: Launch, name: str) -> Launch:
    programs = [
        [new for event in events if (new := _changes(launch, event).get(name, event)) is not None]
        for events in launch.programs
    ]
    return launch._replace(programs=tuple(programs))


def _changes(launch: Launch, event: Event) -> dict[str, Event | None]:
    """What may become of an event, by name."""
    match event:
        case Barrier():
            return {f"{event.line} -> removed": None}
        case Atomic(wanted=None, exchange=False):  # looks whether something has failed
            return {}
        case Atomic():
            line = event.line if event.wanted is None else f"{launch.kernel}, {event.line}"
            found: dict[str, Event | None] = {f"{line} -> relaxed": event._replace(sem="relaxed")}
            found[f"{line} -> gpu"] = event._replace(scope="gpu")
            if event.wanted is not None:
                found[f"{line} -> no wait"] = event._replace(wanted=0)
            return found
    return {}
