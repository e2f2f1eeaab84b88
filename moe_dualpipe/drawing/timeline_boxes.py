"""What a picture of a timeline consists of, in whichever medium: boxes, their colours, and what is written beside them.

Forwards are orange, backwards green, weight gradients alone blue, as in DeepSeek's figure. A rank's further stages, or
the other flow, have paler colours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..schedule.actions import Backward, Forward, Overlap
from ..schedule.schedule import Schedule
from ..schedule.timeline import Timeline

COLOURS = {"F": "#f6b26b", "B": "#93c47d", "I": "#bcd86a", "W": "#6fa8dc"}
LABELS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

_FORWARD_SHARE = 1 / 3
"""How much of a pair's frame its forward gets; nothing says where inside of it the one or the other runs."""


@dataclass(frozen=True, slots=True)
class Box:
    """What is drawn for an action, or for one half of a pair."""

    start: float
    end: float
    letter: str
    stage: int
    micro_batch: int
    framed: bool = False


def boxes(timeline: Timeline, rank: int) -> Iterator[Box]:
    """The boxes of `rank`, from left to right; the two halves of a pair follow each other."""
    for span in timeline.spans[rank]:
        start, end = float(span.start), float(span.end)
        match span.action:
            case Overlap(forward, backward):
                middle = start + (end - start) * _FORWARD_SHARE
                yield Box(start, middle, "F", forward.stage, forward.micro_batch, framed=True)
                yield Box(middle, end, "B", backward.stage, backward.micro_batch, framed=True)
            case Forward(stage, micro_batch):
                yield Box(start, end, "F", stage, micro_batch)
            case Backward(stage, micro_batch, part):
                yield Box(start, end, part.value, stage, micro_batch)


def timeline_summary(timeline: Timeline) -> str:
    """Two lines: the time of a step and what of it is bubble; what the fullest rank holds, in the schedule's stages."""
    deferred = max(timeline.peak_deferred)
    bubble = f"{format_range(timeline.bubble)} per rank ({timeline.bubble_share:.1%})"
    return (
        f"step {format_number(timeline.makespan)}, bubble {bubble}\n"
        f"peak: activations of {_count(max(timeline.peak_activations), 'micro-batch', 'es')}, "
        + (f"{deferred} deferred W, " if deferred else "")
        + f"parameters of {_count(max(timeline.parameters), 'stage')}"
    )


def timeline_title(timeline: Timeline) -> str:
    return f"{timeline.schedule.name}: {schedule_sizes(timeline.schedule)}"


def schedule_sizes(schedule: Schedule) -> str:
    """`4 ranks, 8 stages, 16 micro-batches`."""
    micro_batches = _count(schedule.num_micro_batches, "micro-batch", "es")
    return f"{_count(schedule.num_ranks, 'rank')}, {_count(schedule.num_stages, 'stage')}, {micro_batches}"


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{ending if number != 1 else ''}"


def format_number(value: float) -> str:
    """Six digits, or all of a larger number; never an exponent for a large one."""
    return f"{float(value):.0f}" if abs(value) >= 1e6 else f"{float(value):g}"


def format_range(values: tuple[float, ...]) -> str:
    """`5`, or `4 to 5` where ranks differ by more than rounding."""
    least, most = format_number(min(values)), format_number(max(values))
    return least if least == most else f"{least} to {most}"


def letters(timeline: Timeline) -> list[str]:
    """The kinds of boxes that there are, in the order of COLOURS."""
    present = {box.letter for rank in range(timeline.schedule.num_ranks) for box in boxes(timeline, rank)}
    return [letter for letter in COLOURS if letter in present]


def has_pairs(timeline: Timeline) -> bool:
    return any(isinstance(span.action, Overlap) for spans in timeline.spans for span in spans)


def shortest(timeline: Timeline) -> float:
    """The shortest box that has to hold its number: one of less than a quarter of the median need not."""
    every = (box.end - box.start for rank in range(timeline.schedule.num_ranks) for box in boxes(timeline, rank))
    durations = sorted(duration for duration in every if duration > 0)
    return max(durations[0], durations[len(durations) // 2] / 4)


def shade(timeline: Timeline, rank: int, box: Box) -> str:
    """The colour of the action, paler for each further stage that the rank holds."""
    stages = timeline.schedule.placement.stages[rank]
    return paler(COLOURS[box.letter], 0.5 * stages.index(box.stage) / max(1, len(stages) - 1))


def paler(colour: str, towards_white: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * towards_white):02x}" for part in parts)
