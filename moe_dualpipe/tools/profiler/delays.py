"""How late transfers start: the time from when a transfer could run to the start of its kernel.

A transfer can run when it is launched, its stream is free, and its input is computed. Its input is taken to be the last
computation of the same chunk, "(F)" or "(B)", that was launched before it. From then on, it waits only for a free
multiprocessor or hardware queue.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from ...overlap.labels import letter_of
from .trace import DeviceEvent, Trace


@dataclass(frozen=True, slots=True)
class Delay:
    """The transfers with one annotation, such as "dispatch(F)". Times are in microseconds."""

    name: str
    times: int
    total_us: float
    longest_us: float


def start_delays(trace: Trace, compute: Iterable[DeviceEvent], comm: Iterable[DeviceEvent]) -> tuple[Delay, ...]:
    """The delays of all transfers with known launches, by annotation. Empty for CPU traces, which have no launches."""
    kinds = [(event, is_comm) for is_comm, events in enumerate((compute, comm)) for event in events]
    launched = [
        (trace.launches[event.correlation].end, event, is_comm)
        for event, is_comm in kinds
        if event.correlation in trace.launches
    ]
    input_ends: dict[str | None, float] = defaultdict(lambda: float("-inf"))  # by letter
    stream_ends: dict[str, float] = defaultdict(lambda: float("-inf"))
    found: dict[str, list[float]] = defaultdict(list)
    for queued, event, is_comm in sorted(launched, key=itemgetter(0)):
        annotation = trace.annotation_of(event)
        letter = letter_of(annotation.name) if annotation else None
        if is_comm and annotation is not None and letter:
            ready = max(queued, input_ends[letter], stream_ends[event.stream])
            found[annotation.name].append(max(0.0, event.start - ready))
        elif not is_comm:
            input_ends[letter] = max(input_ends[letter], event.end)
        stream_ends[event.stream] = max(stream_ends[event.stream], event.end)
    return tuple(Delay(name, len(us), sum(us), max(us)) for name, us in found.items())
