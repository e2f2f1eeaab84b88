"""The start and end of every action of a schedule, and what follows from them: bubbles and memory.

Simulated and measured times have the same type, so that the same code draws, compares and exports both.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..messages import plural
from .actions import Forward, Part, members
from .schedule import Schedule
from .walk import Span


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds at one moment: the number of micro-batches, summed over its stages, or bytes."""

    time: float
    activations: int
    """Activations: held from the start of a forward to the end of its B or I."""
    deferred: int
    """What a deferred W needs: held from the end of its I to its own end. Not counted in `activations`."""


@dataclass(frozen=True)
class Timeline:
    """`spans[r]` are the actions of rank `r`, ordered by start, in any unit of time. All ranks share one clock.

    Raises ValueError if the spans of a rank are not its actions in `schedule`, or if they overlap.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        if len(self.spans) != self.schedule.num_ranks:
            raise ValueError(
                f"spans for {plural(len(self.spans), 'rank')}, but {self.schedule.name} has {self.schedule.num_ranks}"
            )
        for rank, (spans, actions) in enumerate(zip(self.spans, self.schedule.actions, strict=True)):
            if tuple(span.action for span in spans) != actions:
                raise ValueError(f"the spans of rank {rank} are not its actions in {self.schedule.name}")
            for i, span in enumerate(spans):
                what = f"{span.action} on rank {rank} starts at {span.start}"
                if span.end < span.start:
                    raise ValueError(f"{what} but ends at {span.end}")
                if i and span.start < spans[i - 1].end:
                    raise ValueError(f"{what}, but the rank is busy until {spans[i - 1].end}")

    @property
    def start(self) -> float:
        """The earliest start on any rank."""
        return min(spans[0].start for spans in self.spans if spans)

    @property
    def makespan(self) -> float:
        """The time of a step: from the earliest start to the latest end on any rank."""
        return max(spans[-1].end for spans in self.spans if spans) - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """The compute time of each rank."""
        return tuple(sum(span.duration for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The idle time of each rank: makespan - busy."""
        makespan = self.makespan
        return tuple(makespan - busy for busy in self.busy)

    @property
    def total_bubble(self) -> float:
        return sum(self.bubble)

    @property
    def bubble_share(self) -> float:
        """The bubble of all ranks as a fraction of their time, from 0 to 1."""
        return float(self.total_bubble / (self.makespan * self.schedule.num_ranks))

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The largest number of `Held.activations` on each rank."""
        return self._peaks(lambda held: held.activations)

    @property
    def peak_deferred(self) -> tuple[int, ...]:
        """The largest number of `Held.deferred` on each rank."""
        return self._peaks(lambda held: held.deferred)

    def peak_bytes(self, activations: Sequence[int], deferred: Sequence[int]) -> tuple[int, ...]:
        """The peak of activations and deferred weight gradients together on each rank, from bytes per stage."""
        return self._peaks(lambda held: held.activations + held.deferred, activations, deferred)

    def _peaks(self, amount: Callable[[Held], int], *sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(map(amount, self.held(rank, *sizes)), default=0) for rank in range(self.schedule.num_ranks))

    @property
    def parameters(self) -> tuple[int, ...]:
        """The number of stages on each rank."""
        return tuple(len(stages) for stages in self.schedule.placement.stages)

    def held(
        self, rank: int, activations: Sequence[int] | None = None, deferred: Sequence[int] | None = None
    ) -> Iterator[Held]:
        """Yield what `rank` holds after each change. A forward allocates when it starts, a backward frees when it ends.

        activations, deferred: the size of each stage's activations, and of what its deferred weight gradients need.
            None: 1 for every stage, so that micro-batches are counted.
        """
        ones = (1,) * self.schedule.num_stages
        activations, deferred = activations or ones, deferred or ones
        alive = waiting = 0
        for span in self.spans[rank]:
            for member in members(span.action):
                if isinstance(member, Forward):
                    alive += activations[member.stage]
                    yield Held(span.start, alive, waiting)
                else:
                    alive -= 0 if member.part is Part.WEIGHT else activations[member.stage]
                    waiting += {Part.INPUT: 1, Part.WEIGHT: -1, Part.FULL: 0}[member.part] * deferred[member.stage]
                    yield Held(span.end, alive, waiting)
