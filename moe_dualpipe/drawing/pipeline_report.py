"""The steps of a pipeline in a table, as JSON, and as a picture: measured above predicted."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..profiler.pipeline import RecordedPipeline, step_breakdowns
from ..schedule import Costs, Timeline
from .figures import new_figure, save_figure
from .tables import markdown
from .timeline_figure import add_timeline_legend, draw_timeline


def rank_name(rank: int, data_rank: int, data_ranks: int) -> str:
    """`pipeline rank 0`, with `, data rank 1` where there are several."""
    return f"pipeline rank {rank}" + (f", data rank {data_rank}" if data_ranks > 1 else "")


def pipeline_text(pipelines: Sequence[RecordedPipeline]) -> str:
    """Where the typical step of each pipeline went, and the bubble that its measured costs predict."""
    headings = {
        "step": "step, ms", "forward": "forward", "backward": "backward", "weights": "weights", "pairs": "pairs",
        "waiting": "of these waiting", "bubble": "bubble", "predicted_bubble": "predicted", "gradients": "gradients",
        "optimizer": "optimizer", "rest": "rest",
    }  # fmt: skip
    rows = [["", *headings.values()]]
    for data_rank, pipeline in enumerate(pipelines):
        for rank, account in enumerate(step_breakdowns(pipeline)):
            name = rank_name(rank, data_rank, len(pipelines))
            rows.append([name, *(f"{getattr(account, key):,.1f}" for key in headings)])
    lines = [markdown(rows)]
    for data_rank, pipeline in enumerate(pipelines):
        measured, predicted = pipeline.timeline(pipeline.typical), pipeline.predicted
        which = f"data rank {data_rank}, " if len(pipelines) > 1 else ""
        lines.append(
            f"{which}{pipeline.schedule.name}: {measured.makespan:,.1f} ms, {measured.bubble_share:.1%} of it bubble; "
            f"predicted from the measured {_words(pipeline.costs)}: {predicted.makespan:,.1f} ms, "
            f"{predicted.bubble_share:.1%}"
        )
    return "\n\n".join(lines)


def _words(costs: Costs) -> str:
    """`F 21 to 24, B 45, W 12, FB 60 ms`, over the stages."""
    words = []
    for kind in ("F", "B", "W", "FB"):
        cost = getattr(costs, kind)
        if isinstance(cost, tuple):
            least, most = f"{min(cost):,.3g}", f"{max(cost):,.3g}"
            words.append(f"{kind} {least}" + (f" to {most}" if most != least else ""))
    return ", ".join(words) + " ms"


def pipeline_objects(pipelines: Sequence[RecordedPipeline]) -> list[dict[str, Any]]:
    """For `json`: one for each pipeline."""
    return [
        {
            "schedule": pipeline.schedule.name,
            "step": pipeline.steps[0][pipeline.typical].number,
            "costs_ms": asdict(pipeline.costs),
            "makespan_ms": pipeline.timeline(pipeline.typical).makespan,
            "predicted_makespan_ms": pipeline.predicted.makespan,
            "ranks_ms": [asdict(account) for account in step_breakdowns(pipeline)],
        }
        for pipeline in pipelines
    ]


def save_pipeline_figure(pipelines: Sequence[RecordedPipeline], path: Path) -> None:
    """Draw the typical step of each pipeline, measured above predicted. Raises ImportError without matplotlib."""
    rows: list[tuple[str, Timeline]] = []
    for data_rank, pipeline in enumerate(pipelines):
        which = f", data rank {data_rank}" if len(pipelines) > 1 else ""
        measured = pipeline.timeline(pipeline.typical)
        number = pipeline.steps[0][pipeline.typical].number
        rows += [(f"step {number} measured{which}", measured), (f"predicted{which}", pipeline.predicted)]
    end = max(float(timeline.makespan) for _, timeline in rows)
    height = sum(0.75 + 0.32 * timeline.schedule.num_ranks for _, timeline in rows)
    figure = new_figure(16, height + 0.5)
    heights = [timeline.schedule.num_ranks + 1 for _, timeline in rows]
    grid = figure.subplots(len(rows), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (title, timeline) in zip(grid, rows, strict=True):
        draw_timeline(axes, timeline, font_size=6)
        axes.set_xlim(0, end)
        axes.set_xlabel("ms", fontsize=8, loc="right", labelpad=1)
        axes.set_title(
            f"{title}: {float(timeline.makespan):,.1f} ms, {timeline.bubble_share:.1%} bubble", fontsize=9, loc="left"
        )
    add_timeline_legend(grid[-1], rows[-1][1])
    save_figure(figure, path)
