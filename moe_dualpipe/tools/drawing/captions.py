"""The captions of timelines, and numbers as text."""

from ...messages import plural
from ...schedule.schedule import Schedule
from ...schedule.timeline import Timeline


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


def format_number(value: float) -> str:
    """Format with six significant digits, or as an integer from one million on."""
    return f"{float(value):.0f}" if abs(value) >= 1e6 else f"{float(value):g}"


def format_range(values: tuple[float, ...]) -> str:
    """Return `4 to 5`, or `5` if all values are equal up to rounding."""
    least, most = format_number(min(values)), format_number(max(values))
    return least if least == most else f"{least} to {most}"
