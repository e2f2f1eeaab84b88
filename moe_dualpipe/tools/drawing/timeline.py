"""The boxes, colors, title and summary that all drawings of a timeline share. Standard library only.

As in DeepSeek's figure, forwards are orange, backwards green, and separate weight gradients blue. The first stage of a
rank has full colors, its other stages have paler ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...messages import plural
from ...schedule import Forward, Overlap, Schedule, Timeline, members
from .tables import format_number, format_range

COLORS = {"F": "#f6b26b", "B": "#93c47d", "I": "#bcd86a", "W": "#6fa8dc"}
LABELS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

_FORWARD_SHARE = 1 / 3  # of the frame of a pair; the timeline does not say how the pair divides its time


@dataclass(frozen=True, slots=True)
class Box:
    """The box of an action, or of the forward or the backward of a pair (`framed`)."""

    start: float
    end: float
    letter: str
    stage: int
    micro_batch: int
    framed: bool = False


def boxes(timeline: Timeline, rank: int) -> Iterator[Box]:
    """Yield the boxes of `rank` from left to right: two adjacent ones for a pair, one for any other action."""
    for span in timeline.spans[rank]:
        start, end, pair = float(span.start), float(span.end), isinstance(span.action, Overlap)
        middle = start + (end - start) * _FORWARD_SHARE if pair else end
        for member, left, right in zip(members(span.action), (start, middle), (middle, end), strict=False):
            letter = "F" if isinstance(member, Forward) else member.part.value
            yield Box(left, right, letter, member.stage, member.micro_batch, framed=pair)


def letters(timeline: Timeline) -> list[str]:
    """Return the letters of all boxes, in the order of COLORS."""
    present = {box.letter for rank in range(timeline.schedule.num_ranks) for box in boxes(timeline, rank)}
    return [letter for letter in COLORS if letter in present]


def has_pairs(timeline: Timeline) -> bool:
    return any(isinstance(span.action, Overlap) for spans in timeline.spans for span in spans)


def shortest(timeline: Timeline) -> float:
    """Return the length of the shortest box that must fit its number: at least a quarter of the median length."""
    every = (box.end - box.start for rank in range(timeline.schedule.num_ranks) for box in boxes(timeline, rank))
    durations = sorted(duration for duration in every if duration > 0)
    return max(durations[0], durations[len(durations) // 2] / 4)


def shade(timeline: Timeline, rank: int, box: Box) -> str:
    """Return the color of a box: paler for each further stage of the rank."""
    stages = timeline.schedule.placement.stages[rank]
    return paler(COLORS[box.letter], 0.5 * stages.index(box.stage) / max(1, len(stages) - 1))


def paler(color: str, toward_white: float) -> str:
    return "#" + "".join(f"{round(part + (255 - part) * toward_white):02x}" for part in bytes.fromhex(color[1:]))


def timeline_summary(timeline: Timeline) -> str:
    """Return two lines: the step time and the bubble, then the peak memory of any rank, in stages of the schedule."""
    deferred = f", {max(timeline.peak_deferred)} deferred W" if max(timeline.peak_deferred) else ""
    activations = plural(max(timeline.peak_activations), "micro-batch", "es")
    bubble = f"{format_range(timeline.bubble)} per rank ({timeline.bubble_share:.1%})"
    return (
        f"step {format_number(timeline.makespan)}, bubble {bubble}\n"
        f"peak: activations of {activations}{deferred}, parameters of {plural(max(timeline.parameters), 'stage')}"
    )


def timeline_title(timeline: Timeline) -> str:
    return f"{timeline.schedule.name}: {schedule_sizes(timeline.schedule)}"


def schedule_sizes(schedule: Schedule) -> str:
    """Return a text such as `4 ranks, 8 stages, 16 micro-batches`."""
    micro_batches = plural(schedule.num_micro_batches, "micro-batch", "es")
    return f"{plural(schedule.num_ranks, 'rank')}, {plural(schedule.num_stages, 'stage')}, {micro_batches}"
