"""Draw docs/images/idea.png: the DualPipe schedule, and what an overlapped pair does inside.

    python docs/draw_idea.py

The upper half is the real schedule of `moe_dualpipe.schedule`, each action started as soon as what it needs is there,
with unit costs (forward 1, input gradient 1, weight gradient 1, pair 3). The lower half is one layer of such a pair.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from moe_dualpipe.schedule import Action, Backward, Forward, Overlap, Part, Schedule, build, halves
from moe_dualpipe.schedule.comms import gives, needs

FORWARD, BACKWARD, WEIGHT, COMMUNICATION = "#f6b26b", "#93c47d", "#6fa8dc", "#d9d9d9"


def duration(action: Action) -> int:
    return 3 if isinstance(action, Overlap) else sum(2 if is_full(half) else 1 for half in halves(action))


def is_full(half: Forward | Backward) -> bool:
    return isinstance(half, Backward) and half.part is Part.FULL


def starts(schedule: Schedule) -> list[list[int]]:
    """When each action starts if every rank works through its list as early as it can."""
    done, times = {}, [[] for _ in schedule.actions]
    free = [0] * schedule.num_ranks
    while any(len(t) < len(actions) for t, actions in zip(times, schedule.actions, strict=True)):
        for rank, actions in enumerate(schedule.actions):
            if len(times[rank]) == len(actions):
                continue
            action = actions[len(times[rank])]
            wanted = [need for half in halves(action) for need in needs(half, schedule.num_stages)]
            if all(need in done for need in wanted):
                start = max([free[rank], *(done[need] for need in wanted)])
                times[rank].append(start)
                free[rank] = start + duration(action)
                done |= {gives(half): free[rank] for half in halves(action)}
    return times


def draw_schedule(axes: Axes, schedule: Schedule) -> None:
    def cell(rank: int, start: float, width: float, colour: str, text: str) -> None:
        axes.barh(-rank, width, left=start, height=0.86, color=colour, edgecolor="white", linewidth=1, zorder=1)
        axes.text(start + width / 2, -rank, text, ha="center", va="center", fontsize=7, zorder=3)

    for rank, (actions, times) in enumerate(zip(schedule.actions, starts(schedule), strict=True)):
        for action, start in zip(actions, times, strict=True):
            match action:
                case Overlap(forward, backward):
                    cell(rank, start, 1, FORWARD, str(forward.micro_batch))
                    cell(rank, start + 1, 2, BACKWARD, str(backward.micro_batch))
                    axes.barh(-rank, 3, left=start, height=0.86, fill=False, edgecolor="black", linewidth=1.2, zorder=2)
                case Forward(_, micro_batch):
                    cell(rank, start, 1, FORWARD, str(micro_batch))
                case Backward(_, micro_batch, part):
                    colour = WEIGHT if part is Part.WEIGHT else BACKWARD
                    cell(rank, start, duration(action), colour, str(micro_batch))
    axes.set_yticks([-r for r in range(schedule.num_ranks)], [f"rank {r}" for r in range(schedule.num_ranks)])
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
    draw_schedule(top, build("dualpipe", 4, 10))
    draw_pair(bottom)
    for axes in (top, bottom):
        axes.set_xticks([])
        axes.set_frame_on(False)
        axes.tick_params(length=0)
        axes.margins(0.005)
    path = Path(__file__).parent / "images" / "idea.png"
    figure.savefig(path, dpi=130)
    print(path)


if __name__ == "__main__":
    main()
