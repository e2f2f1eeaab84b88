"""Training curves of one or more runs, from the records of `metrics.jsonl`.

Each panel shows one quantity for all runs. A panel without data is left out. Noisy values are drawn pale, with their
running mean on top.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .figures import new_figure, plain_text, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST = 1e100  # matplotlib cannot draw larger numbers
Record = Mapping[str, Any]
Along = Literal["step", "tokens", "hours"]


@dataclass(frozen=True, slots=True)
class Panel:
    """A quantity of the records. `title` includes the unit. `smooth`: pale values with a running mean on top."""

    key: str
    title: str
    smooth: bool = False
    log: bool = False


PANELS = (
    Panel("loss", "training loss (validation: dots), nats per token", smooth=True),
    Panel("grad_norm", "gradient norm", smooth=True, log=True),
    Panel("lr", "learning rate"),
    Panel("tokens_per_s", "tokens/s", smooth=True),
    Panel("mfu", "model FLOPs utilization", smooth=True),
    Panel("expert_load_max_over_mean", "load of the busiest expert / mean load", smooth=True),
    Panel("dead_experts", "fraction of experts without a token", smooth=True),
    Panel("sequence_loss", "sequence-wise auxiliary loss", smooth=True),
    Panel("z_loss", "router z-loss", smooth=True),
    Panel("mtp_loss", "multi-token prediction (MTP) loss, nats per token", smooth=True),
    Panel("peak_memory_mb", "peak memory, MB"),
)


def save_curves(runs: Mapping[str, Sequence[Record]], path: Path, along: Along = "step") -> None:
    """Draw the curves of the named runs. The suffix of `path` is the file format, `along` is the x axis.

    Raises ImportError if matplotlib is not installed.
    """
    panels = [panel for panel in PANELS if any(panel.key in record for records in runs.values() for record in records)]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.6 * columns, 2.7 * rows + 0.4)
    from matplotlib.ticker import EngFormatter  # after new_figure, which reports a missing matplotlib

    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        for i, records in enumerate(runs.values()):
            _draw(axes, panel, records, positions(records, along), f"C{i}")
        axes.set_title(panel.title, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(along, fontsize=8, loc="right", labelpad=1)
        if along == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 120k, 3M
        if panel.log:
            axes.set_yscale("log")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if len(runs) > 1:
        from matplotlib.lines import Line2D

        lines = [Line2D([], [], color=f"C{i}", label=plain_text(name)) for i, name in enumerate(runs)]
        figure.legend(handles=lines, loc="outside upper left", ncols=len(lines), fontsize=9, frameon=False)
    save_figure(figure, path)


def positions(records: Sequence[Record], along: Along) -> dict[int, float]:
    """Return the x position of each recorded step. Tokens and hours are counted from the first record.

    Example: if steps 3 and 4 are recorded, with 8 tokens each, their positions in tokens are 8 and 16.
    """
    if along == "step":
        return {record["step"]: record["step"] for record in records}
    key, unit = ("tokens", 1) if along == "tokens" else ("seconds", 3600)
    steps = [record for record in records if "loss" in record]
    done = accumulate(record[key] / unit for record in steps)
    return {r["step"]: 0.0 for r in records[:1]} | {r["step"]: x for r, x in zip(steps, done, strict=True)}


def running_mean(values: Sequence[float], share: float = 0.04) -> list[float]:
    """Return the mean of each value and the values before it, in a window of `share` of the number of values.

    Example: [1, 2, 3, 4] with a window of two gives [1, 1.5, 2.5, 3.5].
    """
    width = max(1, round(len(values) * share))
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - width) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, 1)]


def _draw(axes: "Axes", panel: Panel, records: Sequence[Record], where: Mapping[int, float], color: str) -> None:
    placed = [(where[r["step"]], r) for r in records if r["step"] in where]
    # A NaN or an infinity would make every later mean a NaN.
    finite = [(x, r) for x, r in placed if r.get(panel.key) is not None and abs(r[panel.key]) < _MOST]
    x, y = [x for x, _ in finite], [r[panel.key] for _, r in finite]
    if panel.smooth:
        axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
    marker = "." if len(x) == 1 else None  # a line needs two points
    axes.plot(x, running_mean(y) if panel.smooth else y, color=color, linewidth=1.4, marker=marker)
    if panel.key == "loss":
        validated = [(x, r["validation_loss"]) for x, r in placed if r.get("validation_loss") is not None]
        if validated:
            axes.plot(*zip(*validated, strict=True), "o", color=color, markersize=4)


def run_summary(name: str, records: Sequence[Record]) -> str:
    """Return one line: the last step, its losses, and the median speed."""
    steps = [record for record in records if "loss" in record]
    validation = [r["validation_loss"] for r in records if "validation_loss" in r]
    if not steps:
        return f"{name}: no step recorded yet"
    speeds = sorted(record["tokens_per_s"] for record in steps)
    parts = [f"step {steps[-1]['step']}", f"loss {_format(steps[-1]['loss'])}"]
    parts += [f"validation {_format(validation[-1])}"] if validation else []
    return f"{name}: {', '.join(parts)}, {speeds[len(speeds) // 2]:,.0f} tokens/s (median)"


def _format(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"
