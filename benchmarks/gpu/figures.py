"""Draw the results of the GPU suite: expert MLP rates as bars, training losses as curves."""

from pathlib import Path
from typing import Any

from .report import PHASES, implementation_names, shape_name, title_of

COLORS = ("#d1495b", "#2e4057", "#66a182", "#edae49", "#8d96a3", "#00798c", "#7d5ba6")


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """Write a PNG for each section that has results; return the paths. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    if results.get("experts", {}).get("shapes"):
        drawn.append(_experts(results["experts"], out / "experts.png"))
    if any(run["status"] == "timed" for run in results.get("training", {}).get("runs", {}).values()):
        drawn.append(_training(results["training"], out / "training.png"))
    return drawn


def _experts(record: dict[str, Any], path: Path) -> Path:
    """Draw one panel for forward and one for forward + backward: bars per shape, the dense matmul dashed."""
    from matplotlib import pyplot as plt

    shapes = record["shapes"]
    names = [n for n in implementation_names(record) if any("both" in e["contestants"].get(n, {}) for e in shapes)]
    fig, axes = plt.subplots(2, 1, figsize=(max(7.0, 1.6 * len(shapes) + 2), 7), sharex=True, layout="constrained")
    width = 0.8 / max(1, len(names))
    for axis, phase in zip(axes, ("forward", "both"), strict=True):
        for i, name in enumerate(names):
            timed = [(x, e["contestants"].get(name, {})) for x, e in enumerate(shapes)]
            bars = [(x, outcome[phase]) for x, outcome in timed if phase in outcome]
            at = [x + (i - (len(names) - 1) / 2) * width for x, _ in bars]
            heights = [m["median"] for _, m in bars]
            errors = [[m["median"] - m["low"] for _, m in bars], [m["high"] - m["median"] for _, m in bars]]
            style = {"label": title_of(name), "color": COLORS[i % 7], "error_kw": {"lw": 1}}
            drawn = axis.bar(at, heights, width * 0.92, yerr=errors, **style)
            axis.bar_label(drawn, fmt=lambda v: f"{v:.3g}", fontsize=7, padding=2)
        for x, entry in enumerate(shapes):
            if "dense" in entry:
                label = "dense matmul" if x == 0 else None
                axis.hlines(entry["dense"]["median"], x - 0.45, x + 0.45, "black", "dashed", lw=1, label=label)
        axis.margins(x=0.01)
        axis.set_ylabel("TFLOP/s")
        axis.set_title(PHASES[phase].capitalize(), fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.1), frameon=False)
    axes[1].set_xticks(range(len(shapes)), [_label(entry["shape"]) for entry in shapes], fontsize=7)
    axes[1].set_xlabel("T, D, F, E, K")
    fig.savefig(path, dpi=150)
    plt.close(fig)
    return path


def _label(shape: dict[str, Any]) -> str:
    """Return the sizes and, on a second line, the first words of the note."""
    note = shape.get("note", "").partition(",")[0]
    sizes = shape_name({**shape, "note": ""})
    return f"{sizes}\n{note}" if note else sizes


def _training(record: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot as plt

    fig, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    titles = {"triton": "Triton kernels", "reference": "torch grouped_mm", "loop": "a loop over experts"}
    for (name, run), color in zip(record["runs"].items(), COLORS, strict=False):
        if run["status"] == "timed":
            seconds, losses = zip(*run["curve"], strict=True)
            axis.plot(seconds, losses, color=color, label=f"{titles[name]}, {run['steps']} steps")
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("training loss, nats per byte")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    fig.savefig(path, dpi=150)
    plt.close(fig)
    return path
