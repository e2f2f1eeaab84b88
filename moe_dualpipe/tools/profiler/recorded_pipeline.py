"""Find the training steps in the recordings of ranks, and compare a pipeline's step with its simulation.

The training loop annotates steps and STEP_PARTS; the executor annotates actions, such as "0F3".

The recordings of all ranks form a Timeline, as a simulation returns. The schedule is simulated with the measured costs
of F, B, W and FB. If the measured timeline is longer, the rest is waiting time that the schedule does not cause.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from typing import Any

from ...overlap.labels import STEP_PARTS
from ...schedule import Action, Backward, Costs, Forward, Overlap, Schedule, Span, Timeline, simulate
from ..drawing.tables import markdown
from .communication import NAMES
from .host import as_device
from .intervals import as_intervals, intervals_of, union, union_length
from .trace import DeviceEvent, HostEvent, Trace, TraceError
from .windows import annotated_steps

HEADINGS = {
    "step": "step, ms", "forward": "forward", "backward": "backward", "weights": "weights", "pairs": "pairs",
    "waiting": "idle inside", "bubble": "bubble", "predicted_bubble": "predicted", "gradients": "gradients",
    "optimizer": "optimizer", "rest": "rest",
}  # fmt: skip
"""Columns of the table, by the part of the step."""
_PARTS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights", "FB": "pairs"}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank, in microseconds. All ranks count times from the same moment."""

    number: int
    start: float
    end: float
    spans: tuple[Span, ...]
    """Each action, from the start of its first computation to the end of its last one."""
    waiting: float
    """Time in the spans without computation: exposed expert communication, and Python."""
    parts: Mapping[str, tuple[float, float]]
    """Start and end of each of STEP_PARTS that launched work."""


def recorded_steps(trace: Trace, actions: Sequence[Action], since_us: float = 0.0) -> list[Step]:
    """Return the steps of a rank that runs `actions` in each step. Raises TraceError if the trace lacks an action.

    since_us: the origin of the returned times, on the clock of the host: when all ranks left the same barrier.
    """
    trace = as_device(trace, NAMES)
    texts = {str(action): action for action in actions}
    annotations = [event for event in trace.annotations if event.name in texts or event.name in STEP_PARTS]
    around = trace.innermost_around(annotations)
    launched: dict[HostEvent, list[DeviceEvent]] = defaultdict(list)
    for event in trace.device_events:
        if event.correlation in around:
            launched[around[event.correlation]].append(event)
    steps, by = [], trace.base_us - since_us
    for number, step in annotated_steps(trace):
        inside = sorted((a for a in annotations if step.start <= a.start < step.end), key=lambda a: a.start)
        computed = {a: [e for e in launched[a] if e.kind != "comm"] for a in inside if a.name in texts}
        if [texts[annotation.name] for annotation in computed] != list(actions) or not all(computed.values()):
            raise TraceError(f"the recording of {step.name} lacks actions of the schedule")
        extents = _in_turns(map(_extent, computed.values()))
        compute = union(intervals_of(event for events in computed.values() for event in events))
        waiting = union_length(union(as_intervals(extents))) - union_length(compute)
        spans = (Span(action, a + by, b + by) for action, (a, b) in zip(actions, extents, strict=True))
        ends = {a.name: _extent(launched[a]) for a in inside if a.name in STEP_PARTS and launched[a]}
        parts = {part: (start + by, end + by) for part, (start, end) in ends.items()}
        steps.append(Step(number, step.start + by, step.end + by, tuple(spans), waiting, parts))
    return steps


def _extent(events: Sequence[DeviceEvent]) -> tuple[float, float]:
    return min(event.start for event in events), max(event.end for event in events)


def _in_turns(extents: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Move the start of each extent after the end of the previous one. On a GPU they can overlap: a side stream can
    still pack the rows of an action when the next action starts."""
    turns, free = [], -inf
    for start, end in extents:
        start = max(start, free)
        free = max(start, end)
        turns.append((start, free))
    return turns


def measured_costs(schedule: Schedule, spans: Iterable[Span]) -> Costs:
    """Return the mean measured cost of each kind of action on each stage.

    With means, the computation time of the simulation equals that of the recording. If a stage has no action of a kind,
    its cost is the mean of the other stages.
    The pairs of a stage save the mean of what all pairs with this stage save, but a pair is never shorter than its
    longer member alone, which may have been one of the first actions, and slow. W is None (half of B) if no weight
    gradient was measured alone.
    """
    alone: dict[str, dict[int, list[float]]] = {kind: defaultdict(list) for kind in "FBIW"}
    pairs: list[tuple[int, int, float]] = []
    for span in spans:
        match span.action:
            case Overlap(forward, backward):
                pairs.append((forward.stage, backward.stage, span.duration))
            case Forward(stage) | Backward(stage):
                alone[_kind(span)][stage].append(span.duration)
    means = {kind: {stage: statistics.fmean(times) for stage, times in of.items()} for kind, of in alone.items()}
    inputs, weights = means["I"], means["W"]
    means["B"] = {stage: inputs[stage] + weights[stage] for stage in inputs if stage in weights} | means["B"]
    f, b, w = (_on_every_stage(means[kind], schedule.num_stages) for kind in "FBW")
    assert f and b, "a schedule has forwards and backwards alone: those before the first pair"
    if w:
        w = tuple(min(weight, 0.9 * whole) for weight, whole in zip(w, b, strict=True))
    if not pairs:
        return Costs(f, b, w)
    saved: dict[int, list[float]] = defaultdict(list)
    for i, j, duration in pairs:
        for stage in (i, j):
            saved[stage].append(f[i] + b[j] - duration)
    mean = statistics.fmean(itertools.chain.from_iterable(saved.values()))
    both = ((f[i], b[i], statistics.fmean(saved.get(i, [mean]))) for i in range(schedule.num_stages))
    return Costs(f, b, w, tuple(max(one, other, one + other - less) for one, other, less in both))


def _kind(span: Span) -> str:
    """F, B, I or W as in the notation of schedules, FB for a pair."""
    if isinstance(span.action, Overlap):
        return "FB"
    return "F" if isinstance(span.action, Forward) else span.action.part.value


def _on_every_stage(means: Mapping[int, float], num_stages: int) -> tuple[float, ...] | None:
    """The mean of each stage, with the mean of the others for a stage without one; None without any."""
    if not means:
        return None
    mean = statistics.mean(means.values())
    return tuple(means.get(stage, mean) for stage in range(num_stages))


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
    def measured(self) -> Timeline:
        """The timeline of the typical step."""
        return self.timeline(self.typical)

    @cached_property
    def costs(self) -> Costs:
        """The measured costs of the typical step, in milliseconds."""
        return measured_costs(self.schedule, itertools.chain.from_iterable(self.measured.spans))

    @cached_property
    def predicted(self) -> Timeline:
        return simulate(self.schedule, self.costs)

    def as_object(self) -> dict[str, Any]:
        """A JSON object. Times are in milliseconds."""
        return {
            "schedule": self.schedule.name,
            "step": self.steps[0][self.typical].number,
            "costs_ms": asdict(self.costs),
            "makespan_ms": self.measured.makespan,
            "predicted_makespan_ms": self.predicted.makespan,
            "ranks_ms": step_breakdowns(self),
        }


def step_breakdowns(pipeline: RecordedPipeline) -> list[dict[str, float]]:
    """Return the parts of the typical step's time on each rank, in milliseconds.

    step is from the earliest start to the latest end on any rank. It is the sum of forward, backward, weights, pairs,
    bubble, gradients, optimizer (both after all ranks have finished the pipeline) and rest: data loading, metrics, and
    Python. waiting is the time without computation inside forward, backward, weights and pairs.
    """
    same = [steps[pipeline.typical] for steps in pipeline.steps]
    whole = (max(step.end for step in same) - min(step.start for step in same)) / 1e3
    end = max(step.spans[-1].end for step in same)
    found = []
    for rank, step in enumerate(same):
        sums = dict.fromkeys(_PARTS.values(), 0.0)
        for span in pipeline.measured.spans[rank]:
            sums[_PARTS[_kind(span)]] += span.duration
        sums["bubble"] = pipeline.measured.bubble[rank]
        for part in STEP_PARTS:
            start, until = step.parts.get(part, (end, end))
            sums[part] = max(0.0, until - max(start, end)) / 1e3
        rest = whole - sum(sums.values())
        idle = {"waiting": step.waiting / 1e3, "predicted_bubble": pipeline.predicted.bubble[rank]}
        found.append({"step": whole, **sums, "rest": rest, **idle})
    return found


def pipelines_text(pipelines: Sequence[RecordedPipeline]) -> str:
    """Return a table of how each rank spent the step of median length, and its bubble, measured and predicted."""
    rows, lines = [["", *HEADINGS.values()]], []
    for data_rank, pipeline in enumerate(pipelines):
        replica = f"data rank {data_rank}" if len(pipelines) > 1 else ""
        for rank, breakdown in enumerate(step_breakdowns(pipeline)):
            name = ", ".join(filter(None, (f"pipeline rank {rank}", replica)))
            rows.append([name, *(f"{breakdown[key]:,.1f}" for key in HEADINGS)])
        measured, predicted = pipeline.measured, pipeline.predicted
        result = (
            f"{pipeline.schedule.name}: {measured.makespan:,.1f} ms, bubble {measured.bubble_share:.1%}; "
            f"predicted from the measured {_costs_text(pipeline.costs)}: {predicted.makespan:,.1f} ms, "
            f"bubble {predicted.bubble_share:.1%}"
        )
        lines.append(", ".join(filter(None, (replica, result))))
    return "\n\n".join([markdown(rows), *lines])


def _costs_text(costs: Costs) -> str:
    """Return the range of each cost over the stages: `F 21 to 24, B 45, W 12, FB 60 ms`."""
    parts = []
    for kind in ("F", "B", "W", "FB"):
        if isinstance(cost := getattr(costs, kind), tuple):
            least, most = f"{min(cost):,.3g}", f"{max(cost):,.3g}"
            parts.append(f"{kind} {least}" + (f" to {most}" if most != least else ""))
    return ", ".join(parts) + " ms"
