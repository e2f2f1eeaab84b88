"""Draw docs/images/idea.png: the DualPipe schedule, and what an overlapped pair does inside.

    python docs/draw_idea.py

The upper half is the schedule as `moe_dualpipe.schedule.simulate` has it, with unit costs (forward 1, input gradient 1,
weight gradient 1, pair 3). The lower half is one layer of such a pair.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from moe_dualpipe.drawing.timeline_boxes import COLOURS
from moe_dualpipe.drawing.timeline_figure import draw_timeline
from moe_dualpipe.schedule import Costs, Timeline, build, simulate

FORWARD, BACKWARD, WEIGHT, COMMUNICATION = COLOURS["F"], COLOURS["B"], COLOURS["W"], "#d9d9d9"


def draw_schedule(axes: Axes, timeline: Timeline) -> None:
    draw_timeline(axes, timeline)
    schedule = timeline.schedule
    axes.set_title(
        f"DualPipe, {schedule.num_ranks} ranks, {schedule.num_micro_batches} micro-batches: half of them flow down, "
        "half up; in a frame, one forward runs with one backward",
        fontsize=9, loc="left",
    )  # fmt: skip


def draw_pair(axes: Axes) -> None:
    # Milliseconds per layer in DeepSeek's training profile (github.com/deepseek-ai/profile-data), 64-way experts.
    compute = [
        ("attn(F)", 4.36, FORWARD), ("mlp(B)", 5.31, BACKWARD), ("mlp(W)", 6.38, WEIGHT), ("mlp(F)", 4.60, FORWARD),
        ("attn(B)", 9.34, BACKWARD), ("attn(W)", 2.39, WEIGHT),
    ]  # fmt: skip
    # A transfer starts when the compute that feeds it and the transfer before it are done; combine(B) reaches from one
    # layer into the next, so it is drawn at both ends.
    communication = [
        ("combine(B)", 0, 3.11), ("dispatch(F)", 4.36, 6.69), ("dispatch(B)", 11.05, 7.49), ("combine(F)", 20.65, 8.68),
        ("", 29.99, 2.39),
    ]  # fmt: skip
    at = 0
    for name, width, colour in compute:
        axes.barh(0, width, left=at, height=0.86, color=colour, edgecolor="white")
        axes.text(at + width / 2, 0, name, ha="center", va="center", fontsize=8)
        at += width
    for name, start, width in communication:
        axes.barh(-1, width, left=start, height=0.86, color=COMMUNICATION, edgecolor="white")
        axes.text(start + width / 2, -1, name, ha="center", va="center", fontsize=8)
    axes.set_yticks([0, -1], ["compute", "communication"])
    axes.set_title(
        "Inside a frame, one layer, with the times of DeepSeek's published trace: while one micro-batch's tokens are "
        "in the all-to-all, the other's attention and MLP run",
        fontsize=9, loc="left",
    )  # fmt: skip


def main() -> None:
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 4), height_ratios=[4, 2], layout="constrained")
    draw_schedule(top, simulate(build("dualpipe", 4, 10), Costs(F=1, B=2, W=1, FB=3)))
    draw_pair(bottom)
    for axes in (top, bottom):
        axes.set_xticks([])
        axes.set_xlabel("")
        axes.set_frame_on(False)
        axes.tick_params(length=0)
        axes.margins(0.005)
    path = Path(__file__).parent / "images" / "idea.png"
    figure.savefig(path, dpi=130)
    print(path)


if __name__ == "__main__":
    main()
