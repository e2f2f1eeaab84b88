"""Predict the times of a schedule from the costs of its actions.

>>> from moe_dualpipe.schedule import Costs, build, simulate
>>> timeline = simulate(build("dualpipe", 8, 20), Costs(F=2, B=5, W=2, FB=7))
>>> timeline.makespan, timeline.bubble[0], max(timeline.peak_activations)
(156, 16, 9)

Each rank starts each action as early as possible. Nothing is rounded: integer costs give integer times.
"""

import itertools
import math
from dataclasses import dataclass, fields

from ..messages import plural
from .actions import Action, Backward, Forward, Overlap, Part
from .schedule import Schedule
from .timeline import Timeline
from .walk import walk

Cost = float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations of the actions of one micro-batch on one stage, in any unit: one number, or one per stage.

    Raises ValueError unless all costs are positive (`comm` may be 0) and W < B.
    """

    F: Cost = 1
    """A forward."""
    B: Cost = 2
    """A full backward. The input gradient I takes B - W."""
    W: Cost | None = None
    """The weight gradient of a backward. None: B / 2."""
    FB: Cost | None = None
    """An overlapped pair. None: F + B, no gain.
    A number per stage is for a pair of this stage alone. A pair of two stages saves the mean of what theirs save."""
    comm: float = 0
    """The transfer of a tensor to another rank. Transfers do not slow down compute or each other."""

    def __post_init__(self) -> None:
        lengths: dict[str, int] = {}
        for name in (field.name for field in fields(self)):
            numbers = () if (cost := getattr(self, name)) is None else (cost,)
            if isinstance(cost, list | tuple):
                numbers = tuple(cost)
                object.__setattr__(self, name, numbers)
                lengths[name] = len(numbers)
                if not numbers:
                    raise ValueError(f"cost {name} is empty: give one number, or one per stage")
            least, nearest = ("at least 0", 0) if name == "comm" else ("greater than 0", 1)
            for number in numbers:
                if not (math.isfinite(number) and (number > 0 or (number == 0 and name == "comm"))):
                    raise ValueError(f"cost {name} must be a finite number {least}: got {number:g}; use {nearest}")
        if len(set(lengths.values())) > 1:
            got = ", ".join(f"{length} for {name}" for name, length in lengths.items())
            raise ValueError(f"per-stage costs must have the same length: got {got}")
        for stage in range(max(lengths.values(), default=1)):
            if not self.weight(stage) < (full := at(self.B, stage)):
                raise ValueError(
                    f"cost W is part of B and must be smaller: got W={self.weight(stage)} and B={full}; "
                    f"use W={_ratio(full, 2)}, or a larger B"
                )
        if isinstance(self.FB, tuple):
            for i, j in itertools.permutations(range(len(self.FB)), 2):
                if (pair := self.pair(i, j)) <= 0:
                    raise ValueError(
                        f"cost FB is too small: a forward on stage {i} and a backward on stage {j} "
                        f"would take {pair:g}; use a larger FB"
                    )

    def weight(self, stage: int) -> float:
        """The duration of a weight gradient on `stage`."""
        return _ratio(at(self.B, stage), 2) if self.W is None else at(self.W, stage)

    def pair(self, forward: int, backward: int) -> float:
        """The duration of an overlapped pair of a forward and a backward on these stages."""
        if self.FB is not None and (forward == backward or not isinstance(self.FB, tuple)):
            return at(self.FB, forward)
        saved = 0 if self.FB is None else _ratio(self._saved(forward) + self._saved(backward), 2)
        return at(self.F, forward) + at(self.B, backward) - saved

    def _saved(self, stage: int) -> float:
        return 0 if self.FB is None else at(self.F, stage) + at(self.B, stage) - at(self.FB, stage)

    def of(self, action: Action) -> float:
        """The duration of `action`."""
        match action:
            case Overlap(forward, backward):
                return self.pair(forward.stage, backward.stage)
            case Forward(stage):
                return at(self.F, stage)
            case Backward(stage, _, Part.FULL):
                return at(self.B, stage)
            case Backward(stage, _, Part.INPUT):
                return at(self.B, stage) - self.weight(stage)
            case Backward(stage):
                return self.weight(stage)

    def divided(self, num_stages: int, into: int) -> "Costs":
        """Return the costs of the same model split into `into` stages: neighboring stages are merged or split.

        `comm` stays the same. Raises ValueError if neither number of stages divides the other.
        """
        if num_stages % into and into % num_stages:
            raise ValueError(f"{plural(num_stages, 'stage')} cannot be merged or split evenly into {into}")

        def divide(cost: Cost) -> Cost:
            if not isinstance(cost, tuple):
                return _ratio(cost * num_stages, into)
            if into >= num_stages:
                return tuple(_ratio(number * num_stages, into) for number in cost for _ in range(into // num_stages))
            size = num_stages // into
            return tuple(sum(cost[i * size : (i + 1) * size]) for i in range(into))

        self.check_stages(num_stages)
        optional = (None if cost is None else divide(cost) for cost in (self.W, self.FB))
        return Costs(divide(self.F), divide(self.B), *optional, comm=self.comm)

    def check_stages(self, num_stages: int) -> None:
        """Raise ValueError if a cost has one number per stage, but not `num_stages` numbers."""
        for field in fields(self):
            cost = getattr(self, field.name)
            if isinstance(cost, tuple) and len(cost) != num_stages:
                raise ValueError(
                    f"cost {field.name} has {plural(len(cost), 'number')} for {plural(num_stages, 'stage')}: "
                    f"give 1 or {num_stages}"
                )


def at(cost: Cost, stage: int) -> float:
    """The cost of a stage."""
    return cost[stage] if isinstance(cost, tuple) else cost


def _ratio(number: float, by: int) -> float:
    """Return number / by, as an integer if possible."""
    return number // by if number % by == 0 else number / by


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate one step of `schedule` with the given costs.

    Raises ValueError for costs of another number of stages, and DeadlockError if the actions cannot run in their order
    (`validate` shows where).
    """
    costs.check_stages(schedule.num_stages)
    return Timeline(schedule, walk(schedule, costs.of, costs.comm))
