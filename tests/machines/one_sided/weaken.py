"""Recordings with one fence of a kernel removed or weakened, wherever it runs."""

from collections.abc import Iterator

from tests.machines.one_sided.events import Atomic, Barrier, Event, Launch, Recording

_WEAKER = {"acquire": ["relaxed"], "release": ["relaxed"], "acq_rel": ["acquire", "release"]}


def weakened(recording: Recording) -> Iterator[tuple[str, Recording]]:
    """Yield (fence and change, recording) for each barrier, wait, ordering and scope."""
    launches = [launch for launches in recording.ranks for launch in launches]
    names = {
        name: None
        for launch in launches
        for paths in launch.programs
        for events in paths.values()
        for event in events
        for name in _changes(launch, event)
    }
    for name in names:
        ranks = [[_change(launch, name) for launch in launches] for launches in recording.ranks]
        yield name, recording._replace(ranks=ranks)


def _change(launch: Launch, name: str) -> Launch:
    programs = [
        {
            path: [new for event in events if (new := _changes(launch, event).get(name, event)) is not None]
            for path, events in paths.items()
        }
        for paths in launch.programs
    ]
    return launch._replace(programs=tuple(programs))


def _changes(launch: Launch, event: Event) -> dict[str, Event | None]:
    """What may become of an event, by name."""
    match event:
        case Barrier():
            return {f"{event.line} -> removed": None}
        case Atomic(wanted=None, writes=False):  # looks whether something has failed
            return {}
        case Atomic():
            line = event.line if event.wanted is None else f"{launch.kernel}, {event.line}"
            weaker = _WEAKER.get(event.sem, [])
            found: dict[str, Event | None] = {f"{line} -> {sem}": event._replace(sem=sem) for sem in weaker}
            if event.wanted is not None:
                found[f"{line} -> no wait"] = event._replace(wanted=0)
            if event.sem == "acq_rel":
                found[f"{line} -> cta"] = event._replace(scope="cta")
            elif event.scope == "sys":
                found[f"{line} -> gpu"] = event._replace(scope="gpu")
            elif event.exchange:
                found[f"{line} -> removed"] = None
            return found
    return {}
