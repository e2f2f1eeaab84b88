"""Compare a pipeline's recorded training step with its simulation.

The recordings of all ranks form a Timeline, as a simulation returns. The schedule is simulated with the measured costs
of F, B, W and FB. If the measured timeline is longer, the rest is waiting time that the schedule does not cause.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ...overlap.labels import STEP_PARTS
from ...schedule import Costs, Schedule, Timeline, simulate
from ...schedule.actions import Action, Backward, Forward, Overlap, Part
from ...schedule.walk import Span
from .steps import Step


def measured_costs(schedule: Schedule, spans: Iterable[Span]) -> Costs:
    """Return the mean measured cost of each kind of action on each stage.

    With means, the computation time of the simulation equals that of the recording. If a stage has no action of a kind,
    its cost is the mean of the other stages.
    The pairs of a stage save the mean of what all pairs with this stage save, but a pair is never shorter than its
    longer member alone, which may have been one of the first actions, and slow. W is None (half of B) if no weight
    gradient was measured alone.
    """
    found: dict[str, dict[int, list[float]]] = {kind: defaultdict(list) for kind in ("F", "B", "I", "W")}
    pairs: list[tuple[int, int, float]] = []
    for span in spans:
        match span.action:
            case Overlap(forward, backward):
                pairs.append((forward.stage, backward.stage, span.duration))
            case Forward(stage):
                found["F"][stage].append(span.duration)
            case Backward(stage, _, part):
                found[{Part.FULL: "B", Part.INPUT: "I", Part.WEIGHT: "W"}[part]][stage].append(span.duration)
    at = {kind: {stage: statistics.fmean(times) for stage, times in of.items()} for kind, of in found.items()}
    for stage in set(at["I"]) & set(at["W"]) - set(at["B"]):
        at["B"][stage] = at["I"][stage] + at["W"][stage]
    stages = range(schedule.num_stages)

    def every(kind: str) -> tuple[float, ...] | None:
        mean = statistics.mean(at[kind].values()) if at[kind] else None
        return None if mean is None else tuple(at[kind].get(stage, mean) for stage in stages)

    forwards, backwards, weights = map(every, "FBW")
    assert forwards and backwards, "a schedule has forwards and backwards alone: those before the first pair"
    if weights:
        weights = tuple(min(w, 0.9 * b) for w, b in zip(weights, backwards, strict=True))
    saved: dict[int, list[float]] = defaultdict(list)
    for i, j, duration in pairs:
        for stage in (i, j):
            saved[stage].append(forwards[i] + backwards[j] - duration)
    mean = statistics.fmean(itertools.chain.from_iterable(saved.values())) if pairs else 0
    alone = tuple(
        max(f, b, f + b - statistics.fmean(saved.get(stage, [mean])))
        for stage, (f, b) in enumerate(zip(forwards, backwards, strict=True))
    )
    return Costs(forwards, backwards, weights, alone if pairs else None)


@dataclass(frozen=True)
class RecordedPipeline:
    """The recorded steps of each rank of one pipeline, `steps[rank]`, on the same clock."""

    schedule: Schedule
    steps: Sequence[Sequence[Step]]

    def timeline(self, index: int) -> Timeline:
        """The timeline of the step with this index, in milliseconds from its first computation."""
        first = min(steps[index].spans[0].start for steps in self.steps if steps[index].spans)
        spans = (
            tuple(Span(s.action, (s.start - first) / 1e3, (s.end - first) / 1e3) for s in steps[index].spans)
            for steps in self.steps
        )
        return Timeline(self.schedule, tuple(spans))

    @cached_property
    def typical(self) -> int:
        """The index of the step whose timeline has the median length."""
        times = [self.timeline(index).makespan for index in range(len(self.steps[0]))]
        return times.index(statistics.median_low(times))

    @cached_property
    def costs(self) -> Costs:
        """The measured costs of the typical step, in milliseconds."""
        return measured_costs(self.schedule, [span for row in self.timeline(self.typical).spans for span in row])

    @cached_property
    def predicted(self) -> Timeline:
        return simulate(self.schedule, self.costs)


def step_breakdowns(pipeline: RecordedPipeline) -> list[dict[str, float]]:
    """Return the parts of the typical step's time on each rank, in milliseconds.

    step is from the earliest start to the latest end on any rank. It is the sum of forward, backward, weights, pairs,
    bubble, gradients, optimizer (both after all ranks have finished the pipeline) and rest: data loading, metrics, and
    Python. waiting is the time without computation inside forward, backward, weights and pairs.
    """
    index, predicted = pipeline.typical, pipeline.predicted
    timeline = pipeline.timeline(index)
    same = [steps[index] for steps in pipeline.steps]
    whole = (max(step.end for step in same) - min(step.start for step in same)) / 1e3
    end = max(step.spans[-1].end for step in same)
    found = []
    for rank, step in enumerate(same):
        sums: dict[str, float] = dict.fromkeys(("forward", "backward", "weights", "pairs"), 0.0)
        for span in timeline.spans[rank]:
            sums[_column(span.action)] += span.duration
        sums["bubble"] = timeline.bubble[rank]
        sums |= {part: _after(step.parts.get(part), end) for part in STEP_PARTS}
        rest = whole - sum(sums.values())
        idle = {"waiting": step.waiting / 1e3, "predicted_bubble": predicted.bubble[rank]}
        found.append({"step": whole, **sums, "rest": rest, **idle})
    return found


def _after(extent: tuple[float, float] | None, moment: float) -> float:
    """The length of the extent after a moment, in milliseconds."""
    return max(0.0, extent[1] - max(extent[0], moment)) / 1e3 if extent else 0.0


def _column(action: Action) -> Literal["forward", "backward", "weights", "pairs"]:
    match action:
        case Overlap():
            return "pairs"
        case Forward():
            return "forward"
        case Backward(_, _, Part.WEIGHT):
            return "weights"
        case Backward():
            return "backward"
