"""When every action of a schedule ran, or would run, and what follows from that: bubbles and memory.

One type for simulated and for measured times, so that both are drawn, compared and exported by the same code.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .actions import Forward, Part, halves
from .schedule import Schedule
from .walk import Span


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds at one moment, each counted in micro-batches of one stage."""

    time: float
    activations: int
    """Forwards whose B or I has not ended: their activations are alive."""
    deferred: int
    """I without its W yet: what the weight gradients need is alive. Apart from `activations`, never in both."""


@dataclass(frozen=True)
class Timeline:
    """`spans[r]` are the actions of rank `r` in the order of their start, in any unit of time, on one clock.

    Raises ValueError when the spans are not the actions of `schedule`, or overlap on a rank.
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
                raise ValueError(f"the spans of rank {rank} are not the actions that {self.schedule.name} gives it")
            for i, span in enumerate(spans):
                what = f"{span.action} on rank {rank} starts at {span.start}"
                if span.end < span.start:
                    raise ValueError(f"{what} and ends before that, at {span.end}")
                if i and span.start < spans[i - 1].end:
                    raise ValueError(f"{what}, but the rank is busy until {spans[i - 1].end}")

    @property
    def start(self) -> float:
        """When the first action of any rank starts."""
        return min(spans[0].start for spans in self.spans if spans)

    @property
    def makespan(self) -> float:
        """From the first start on any rank to the last end on any: the time of a step."""
        return max(spans[-1].end for spans in self.spans if spans) - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """The time in which each rank computes."""
        return tuple(sum(span.duration for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The time in which each rank waits: makespan - busy."""
        makespan = self.makespan
        return tuple(makespan - busy for busy in self.busy)

    @property
    def total_bubble(self) -> float:
        return sum(self.bubble)

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time that is bubble, from 0 to 1."""
        return float(self.total_bubble / (self.makespan * self.schedule.num_ranks))

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The most micro-batches of one stage whose activations each rank holds at once: forwards without B or I."""
        return tuple(max((held.activations for held in self.held(rank)), default=0) for rank in self._ranks)

    @property
    def peak_deferred(self) -> tuple[int, ...]:
        """The most micro-batches of one stage whose weight gradients each rank owes at once: I without W."""
        return tuple(max((held.deferred for held in self.held(rank)), default=0) for rank in self._ranks)

    @property
    def parameters(self) -> tuple[int, ...]:
        """How many stages' parameters each rank holds."""
        return tuple(len(stages) for stages in self.schedule.placement.stages)

    @property
    def _ranks(self) -> range:
        return range(self.schedule.num_ranks)

    def held(self, rank: int) -> Iterator[Held]:
        """What `rank` holds, whenever that changes: a forward allocates when it starts, a backward frees at its end."""
        activations = deferred = 0
        for span in self.spans[rank]:
            if any(isinstance(half, Forward) for half in halves(span.action)):
                activations += 1
                yield Held(span.start, activations, deferred)
            for half in halves(span.action):
                if isinstance(half, Forward):
                    continue
                activations -= half.part is not Part.WEIGHT
                deferred += {Part.INPUT: 1, Part.WEIGHT: -1, Part.FULL: 0}[half.part]
                yield Held(span.end, activations, deferred)
