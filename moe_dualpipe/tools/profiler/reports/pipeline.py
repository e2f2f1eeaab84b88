"""The recorded steps of pipelines as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ....schedule import Costs
from ...drawing.tables import markdown
from ..pipeline import RecordedPipeline, step_breakdowns

HEADINGS = {
    "step": "step, ms", "forward": "forward", "backward": "backward", "weights": "weights", "pairs": "pairs",
    "waiting": "idle inside", "bubble": "bubble", "predicted_bubble": "predicted", "gradients": "gradients",
    "optimizer": "optimizer", "rest": "rest",
}  # fmt: skip
"""Columns of the table, by the part of the step."""


def pipeline_text(pipelines: Sequence[RecordedPipeline]) -> str:
    """Return a table of how each rank spent the step of median length, and its bubble, measured and predicted."""
    rows, lines = [["", *HEADINGS.values()]], []
    for data_rank, pipeline in enumerate(pipelines):
        for rank, breakdown in enumerate(step_breakdowns(pipeline)):
            of = f", data rank {data_rank}" if len(pipelines) > 1 else ""
            rows.append([f"pipeline rank {rank}{of}", *(f"{breakdown[key]:,.1f}" for key in HEADINGS)])
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
            "ranks_ms": step_breakdowns(pipeline),
        }
        for pipeline in pipelines
    ]
