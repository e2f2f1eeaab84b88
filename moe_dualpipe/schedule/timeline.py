"""The start and end of every action of a schedule, and what follows from them: bubbles and memory.

Simulated and measured times have the same type, so that the same code draws, compares and exports both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .actions import Forward, Part, halves
from .schedule import Schedule
from .walk import Span


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds at one moment: numbers of micro-batches of one stage, or bytes."""

    time: float
    activations: int
    """Activations from the start of a forward to the end of its B or I."""
    deferred: int
    """Inputs and gradients from the end of an I to the end of its W. Not counted in `activations`."""


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
                f"spans for {len(self.spans)} ranks, but {self.schedule.name} has {self.schedule.num_ranks}"
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
        """Compute time of each rank."""
        return tuple(sum(span.duration for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Idle time of each rank: makespan - busy."""
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
        return tuple(max((held.activations for held in self.held(rank)), default=0) for rank in self._ranks)

    @property
    def peak_deferred(self) -> tuple[int, ...]:
        """The largest number of `Held.deferred` on each rank."""
        return tuple(max((held.deferred for held in self.held(rank)), default=0) for rank in self._ranks)

    def peak_bytes(self, activations: Sequence[int], deferred: Sequence[int]) -> tuple[int, ...]:
        """The peak of activations and deferred weight gradients together on each rank, from bytes per stage."""
        return tuple(
            max((held.activations + held.deferred for held in self.held(rank, activations, deferred)), default=0)
            for rank in self._ranks
        )

    @property
    def parameters(self) -> tuple[int, ...]:
        """The number of stages on each rank."""
        return tuple(len(stages) for stages in self.schedule.placement.stages)

    @property
    def _ranks(self) -> range:
        return range(self.schedule.num_ranks)

    def held(
        self, rank: int, activations: Sequence[int] | None = None, deferred: Sequence[int] | None = None
    ) -> Iterator[Held]:
        """What `rank` holds after each change. A forward allocates when it starts, a backward frees when it ends.

        activations, deferred: the size of each stage's activations, and of what its deferred weight gradients need.
            None: 1 for every stage, so that sizes are counted in micro-batches.
        """
        ones = (1,) * self.schedule.num_stages
        activations, deferred = activations or ones, deferred or ones
        alive = waiting = 0
        for span in self.spans[rank]:
            for half in halves(span.action):
                if isinstance(half, Forward):
                    alive += activations[half.stage]
                    yield Held(span.start, alive, waiting)
                    continue
                alive -= 0 if half.part is Part.WEIGHT else activations[half.stage]
                waiting += {Part.INPUT: 1, Part.WEIGHT: -1, Part.FULL: 0}[half.part] * deferred[half.stage]
                yield Held(span.end, alive, waiting)
