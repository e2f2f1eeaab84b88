"""Compare all schedules for the same model on the same number of ranks.

Problem: a schedule with two stages per rank needs half as many ranks for the same stages, so it is not fair to fix only
the number of ranks or only the number of stages. The schedules are therefore compared twice: on as many ranks as the
model has stages, and on half as many. If a schedule has another number of stages, neighboring stages of the model are
merged or split, with their costs. Memory is always counted in stages of the model.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..messages import plural
from .bound import least_times
from .build import NAMES, build, check_chunks, placement_of, takes_chunks
from .filled import Memory
from .simulate import Costs, simulate
from .timeline import Timeline


@dataclass(frozen=True, slots=True)
class ComparedSchedule:
    """One schedule on `num_ranks` ranks: its timeline, or the reason why it cannot run."""

    name: str
    num_ranks: int
    timeline: Timeline | None
    problem: str = ""
    stage_size: Fraction = Fraction(1)  # stages of the model per stage of the schedule
    leasts: tuple[float, ...] = ()  # the bound that the work of each rank gives

    @property
    def least(self) -> float:
        """No order of the same actions on the same ranks, within the same memory, takes less time."""
        return max(self.leasts)

    def as_object(self) -> dict[str, Any]:
        """Return a JSON object. Times are in the unit of the costs, memory is in stages of the model."""
        identity = {"schedule": self.name, "ranks": self.num_ranks}
        if (timeline := self.timeline) is None:
            return identity | {"problem": self.problem}
        return identity | {
            "stages": timeline.schedule.num_stages,
            "step_time": _plain(timeline.makespan),
            "least": _plain(self.least),
            "least_of_rank": [_plain(least) for least in self.leasts],
            "bubble": [_plain(bubble) for bubble in timeline.bubble],
            "bubble_share": timeline.bubble_share,
            "peak_activations": self.in_model_stages(timeline.peak_activations),
            "peak_deferred": self.in_model_stages(timeline.peak_deferred),
            "parameters": self.in_model_stages(timeline.parameters),
        }

    def in_model_stages(self, counts: tuple[int, ...]) -> list[float]:
        return [_plain(count * self.stage_size) for count in counts]


def _plain(value: float | Fraction) -> float:
    """Convert to int (whole numbers) or float, which JSON can hold."""
    return int(value) if value == int(value) else float(value)


def compare(num_stages: int, num_micro_batches: int, costs: Costs, num_chunks: int = 2) -> tuple[ComparedSchedule, ...]:
    """Simulate every schedule on `num_stages` ranks, then on half as many if `num_stages` is even.

    num_chunks: stages per rank of interleaved schedules. Raises ValueError for fewer than one stage or two chunks, for
    costs of another number of stages, and if no schedule can run with so few micro-batches.
    """
    if num_stages < 1:
        raise ValueError(f"a model has at least one stage: got {num_stages}; use 1 or more")
    placement_of("interleaved_1f1b", num_stages, num_chunks)  # raises for an invalid num_chunks
    costs.check_stages(num_stages)
    check_chunks(num_micro_batches, num_stages)
    rank_counts = (num_stages,) if num_stages % 2 else (num_stages, num_stages // 2)
    if num_micro_batches < (least := rank_counts[-1]):
        raise ValueError(
            "no schedule runs with fewer micro-batches than ranks: "
            f"got {num_micro_batches} for {plural(least, 'rank')}; use at least {least}"
        )
    return tuple(
        compared(name, num_ranks, num_stages, num_micro_batches, costs, num_chunks)
        for num_ranks in rank_counts
        for name in NAMES
    )


def compared(
    name: str, num_ranks: int, num_stages: int, num_micro_batches: int, costs: Costs, num_chunks: int = 2
) -> ComparedSchedule:
    """Simulate one schedule for a model of `num_stages` stages, whose costs these are. See `compare`."""
    try:
        schedule = build(name, num_ranks, num_micro_batches, num_chunks if takes_chunks(name) else None)
        divided = costs.divided(num_stages, schedule.num_stages)
        timeline = simulate(schedule, divided)
    except ValueError as error:
        problem = str(error)
        problem = problem if problem.startswith(name) else f"{name}: {problem}"
        return ComparedSchedule(name, num_ranks, None, problem)
    size = Fraction(num_stages, schedule.num_stages)
    leasts = least_times(schedule.placement, num_micro_batches, divided, Memory.of(schedule))
    return ComparedSchedule(name, num_ranks, timeline, stage_size=size, leasts=leasts)
