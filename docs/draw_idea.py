"""Draw docs/images/idea.png: the DualPipe schedule, and the inside of one overlapped pair.

    python docs/draw_idea.py

The upper part is a simulated step. A forward, an input gradient and a weight gradient take 1 each, a pair takes 3. The
lower part is one layer of a pair.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from moe_dualpipe.schedule import Costs, Timeline, build, simulate
from moe_dualpipe.tools.drawing.figures import new_figure, save_figure
from moe_dualpipe.tools.drawing.timeline import COLORS, LABELS, paler
from moe_dualpipe.tools.drawing.timeline_figure import draw_timeline

FORWARD, BACKWARD, WEIGHT, COMMUNICATION = COLORS["F"], COLORS["B"], COLORS["W"], "#d9d9d9"


def draw_schedule(axes: Axes, timeline: Timeline) -> None:
    draw_timeline(axes, timeline, font_size=8)
    schedule = timeline.schedule
    half = schedule.num_micro_batches // 2
    axes.set_title(
        f"DualPipe on {schedule.num_ranks} ranks: micro-batches 0 to {half - 1} enter at rank 0, {half} to "
        f"{2 * half - 1} at rank {schedule.num_ranks - 1}.\nA black frame is one forward and one backward that run as "
        "a pair.",
        fontsize=10, loc="left",
    )  # fmt: skip


def draw_pair(axes: Axes) -> None:
    # Milliseconds per layer in DeepSeek's training profile (github.com/deepseek-ai/profile-data), 64-way experts.
    compute = [
        ("attn", "F", 4.36, FORWARD), ("mlp", "B", 5.31, BACKWARD), ("mlp", "W", 6.38, WEIGHT),
        ("mlp", "F", 4.60, FORWARD), ("attn", "B", 9.34, BACKWARD), ("attn", "W", 2.39, WEIGHT),
    ]  # fmt: skip
    # A transfer starts after the compute that feeds it and the transfer before it. combine(B) starts in one layer and
    # ends in the next, so it is drawn at both ends.
    communication = [
        ("combine", "B", 0, 3.11), ("dispatch", "F", 4.36, 6.69), ("dispatch", "B", 11.05, 7.49),
        ("combine", "F", 20.65, 8.68), ("combine", "B", 29.99, 2.39),
    ]  # fmt: skip
    at = 0.0
    for name, letter, width, color in compute:
        draw_box(axes, f"{name}\n({letter})", at, width, 0, color)
        at += width
    for name, letter, start, width in communication:
        draw_box(axes, f"{name}\n({letter})", start, width, -1, COMMUNICATION)
    axes.set_yticks([0, -1], ["compute", "all-to-all"], fontsize=8)
    axes.set_title(
        "One layer inside a pair, with the times of DeepSeek's published trace: while the tokens of\none micro-batch "
        "are in the all-to-all, the GPU computes the other.",
        fontsize=10, loc="left",
    )  # fmt: skip


def draw_box(axes: Axes, label: str, start: float, width: float, row: int, color: str) -> None:
    axes.barh(row, width, left=start, height=0.86, color=color, edgecolor="white")
    axes.text(start + width / 2, row, label, ha="center", va="center", fontsize=8, linespacing=1.05)


def main() -> None:
    figure = new_figure(8, 4.6)
    top, bottom = figure.subplots(2, 1, height_ratios=[4, 3])
    draw_schedule(top, simulate(build("dualpipe", 4, 10), Costs(F=1, B=2, W=1, FB=3)))
    draw_pair(bottom)
    for axes in (top, bottom):
        axes.set_xticks([])
        axes.set_xlabel("time", fontsize=8, loc="right", labelpad=1)
        axes.set_frame_on(False)
        axes.tick_params(length=0)
        axes.margins(0.005)
    entries = [Patch(facecolor=color, label=LABELS[letter]) for letter, color in COLORS.items()]
    entries += [
        Patch(facecolor="white", edgecolor="black", label="overlapped pair"),
        Patch(facecolor=paler(FORWARD, 0.5), label="paler: micro-batches that flow up"),
        Patch(facecolor=COMMUNICATION, label="all-to-all"),
    ]
    figure.legend(
        handles=entries,
        loc="outside lower left",
        ncols=4,
        fontsize=8,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.2,
    )
    path = Path(__file__).parent / "images" / "idea.png"
    save_figure(figure, path)
    print(path)


if __name__ == "__main__":
    main()
