"""Which schedule for this model on these ranks? All of them, at the same work.

The model is cut into `num_stages` stages whose costs are known. A schedule that puts one stage on a rank needs as many
ranks as stages; one that puts two there needs half as many. So there are two fair questions, and a table for each:
given as many ranks as stages, and given half as many. Where a schedule wants other stages than the model's, neighbours
are joined or cut, with their costs; memory is counted in the model's stages throughout.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .build import NAMES, build, placement_of
from .simulate import Costs, simulate
from .timeline import Timeline


@dataclass(frozen=True, slots=True)
class ComparedSchedule:
    """One schedule on `num_ranks` ranks: its timeline, or the problem for which there is none."""

    name: str
    num_ranks: int
    timeline: Timeline | None
    problem: str = ""
    stage_size: Fraction = Fraction(1)
    """How many of the model's stages one of the schedule's is."""

    def as_object(self) -> dict[str, Any]:
        """For `json`: times in the unit of the costs, memory in stages of the model, one number for each rank."""
        identity = {"schedule": self.name, "ranks": self.num_ranks}
        if (timeline := self.timeline) is None:
            return {**identity, "problem": self.problem}
        return {
            **identity,
            "stages": timeline.schedule.num_stages,
            "step_time": _plain(timeline.makespan),
            "bubble": [_plain(bubble) for bubble in timeline.bubble],
            "bubble_share": timeline.bubble_share,
            "peak_activations": self.in_model_stages(timeline.peak_activations),
            "peak_deferred": self.in_model_stages(timeline.peak_deferred),
            "parameters": self.in_model_stages(timeline.parameters),
        }

    def in_model_stages(self, counts: tuple[int, ...]) -> list[float]:
        return [_plain(count * self.stage_size) for count in counts]


def _plain(value: float | Fraction) -> float:
    """A number that `json` can write: whole ones as integers, others as floats."""
    return int(value) if value == int(value) else float(value)


def compare(num_stages: int, num_micro_batches: int, costs: Costs, num_chunks: int = 2) -> tuple[ComparedSchedule, ...]:
    """Every schedule on `num_stages` ranks, then on half as many (where that is a whole number).

    num_chunks: the stages on each rank of interleaved_1f1b. Raises ValueError for fewer than one stage or two chunks,
    costs of another number of stages, and so few micro-batches that no schedule runs.
    """
    if num_stages < 1:
        raise ValueError(f"a model has at least one stage: got {num_stages}; use 1 or more")
    placement_of("interleaved_1f1b", num_stages, num_chunks)  # its error
    costs.check_stages(num_stages)
    several = (num_stages,) if num_stages % 2 else (num_stages, num_stages // 2)
    if num_micro_batches < several[-1]:
        raise ValueError(
            f"no schedule runs with fewer micro-batches than ranks: got {num_micro_batches} for {several[-1]} ranks; "
            f"use at least {several[-1]}"
        )
    return tuple(
        _entry(name, num_ranks, num_stages, num_micro_batches, costs, num_chunks)
        for num_ranks in several
        for name in NAMES
    )


def _entry(
    name: str, num_ranks: int, num_stages: int, num_micro_batches: int, costs: Costs, num_chunks: int
) -> ComparedSchedule:
    try:
        schedule = build(name, num_ranks, num_micro_batches, num_chunks if name == "interleaved_1f1b" else None)
        timeline = simulate(schedule, costs.divided(num_stages, schedule.num_stages))
    except ValueError as error:
        problem = str(error)
        return ComparedSchedule(name, num_ranks, None, problem if problem.startswith(name) else f"{name}: {problem}")
    return ComparedSchedule(name, num_ranks, timeline, stage_size=Fraction(num_stages, schedule.num_stages))
