"""The recorded steps of pipelines as a table, as JSON, and as a figure of the measured and the predicted timeline."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....schedule import Costs, Timeline
from ...drawing.figures import new_figure, save_figure
from ...drawing.tables import markdown
from ...drawing.timeline_plot import add_timeline_legend, draw_timeline, size_for_numbers
from ..pipeline import RecordedPipeline, step_breakdowns

HEADINGS = {
    "step": "step, ms", "forward": "forward", "backward": "backward", "weights": "weights", "pairs": "pairs",
    "waiting": "idle inside", "bubble": "bubble", "predicted_bubble": "predicted", "gradients": "gradients",
    "optimizer": "optimizer", "rest": "rest",
}  # fmt: skip
"""Columns of the table, by the attribute of StepBreakdown."""


def rank_name(rank: int, data_rank: int, data_ranks: int) -> str:
    """Return `pipeline rank 0`, followed by `, data rank 1` if there are several data ranks."""
    return f"pipeline rank {rank}" + (f", data rank {data_rank}" if data_ranks > 1 else "")


def pipeline_text(pipelines: Sequence[RecordedPipeline]) -> str:
    """Return a table of how each rank spent the step of median length, and its bubble, measured and predicted."""
    rows, lines = [["", *HEADINGS.values()]], []
    for data_rank, pipeline in enumerate(pipelines):
        for rank, breakdown in enumerate(step_breakdowns(pipeline)):
            name = rank_name(rank, data_rank, len(pipelines))
            rows.append([name, *(f"{getattr(breakdown, key):,.1f}" for key in HEADINGS)])
        measured, predicted = pipeline.timeline(pipeline.typical), pipeline.predicted
        which = f"data rank {data_rank}, " if len(pipelines) > 1 else ""
        lines.append(
            f"{which}{pipeline.schedule.name}: {measured.makespan:,.1f} ms, bubble {measured.bubble_share:.1%}; "
            f"predicted from the measured {_costs_text(pipeline.costs)}: {predicted.makespan:,.1f} ms, "
            f"bubble {predicted.bubble_share:.1%}"
        )
    return "\n\n".join([markdown(rows), *lines])


def _costs_text(costs: Costs) -> str:
    """Return the range of each cost over the stages: `F 21 to 24, B 45, W 12, FB 60 ms`."""
    parts = []
    for kind in ("F", "B", "W", "FB"):
        if isinstance(cost := getattr(costs, kind), tuple):
            least, most = f"{min(cost):,.3g}", f"{max(cost):,.3g}"
            parts.append(f"{kind} {least}" + (f" to {most}" if most != least else ""))
    return ", ".join(parts) + " ms"


def pipeline_objects(pipelines: Sequence[RecordedPipeline]) -> list[dict[str, Any]]:
    """Return one JSON object per pipeline. Times are in milliseconds."""
    return [
        {
            "schedule": pipeline.schedule.name,
            "step": pipeline.steps[0][pipeline.typical].number,
            "costs_ms": asdict(pipeline.costs),
            "makespan_ms": pipeline.timeline(pipeline.typical).makespan,
            "predicted_makespan_ms": pipeline.predicted.makespan,
            "ranks_ms": [asdict(breakdown) for breakdown in step_breakdowns(pipeline)],
        }
        for pipeline in pipelines
    ]


def save_pipeline_figure(pipelines: Sequence[RecordedPipeline], path: Path) -> None:
    """Draw the step of median length of each pipeline, measured and predicted, on one time axis.

    Raises ImportError if matplotlib is not installed.
    """
    rows: list[tuple[str, Timeline]] = []
    for data_rank, pipeline in enumerate(pipelines):
        which = f", data rank {data_rank}" if len(pipelines) > 1 else ""
        measured = f"step {pipeline.steps[0][pipeline.typical].number} measured{which}"
        rows += [(measured, pipeline.timeline(pipeline.typical)), (f"predicted{which}", pipeline.predicted)]
    end = max(float(timeline.makespan) for _, timeline in rows)
    longest = max((pipeline.predicted for pipeline in pipelines), key=lambda timeline: timeline.makespan)
    width, font_size = size_for_numbers(longest, width=9, font_size=8)
    figure = new_figure(width, 0.5 + sum(0.75 + 0.32 * timeline.schedule.num_ranks for _, timeline in rows))
    heights = [timeline.schedule.num_ranks + 1 for _, timeline in rows]
    grid = figure.subplots(len(rows), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (title, timeline) in zip(grid, rows, strict=True):
        draw_timeline(axes, timeline, font_size)
        axes.set_xlim(0, end)
        axes.set_xlabel("ms", fontsize=8, loc="right", labelpad=1)
        title += f": {float(timeline.makespan):,.1f} ms, {timeline.bubble_share:.1%} bubble"
        axes.set_title(title, fontsize=10, loc="left")
    add_timeline_legend(grid[-1], rows[-1][1])
    save_figure(figure, path)
