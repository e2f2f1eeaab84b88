"""Draw docs/images/schedules/*.png: every schedule on four ranks with eight micro-batches, on one scale.

    python docs/draw_schedules.py

All train the same model, of four stages whose forward takes 1, backward 2 (half of it weight gradients) and pair 3; a
schedule with two stages on a rank that does not hold each twice has it cut into eight.
"""

from pathlib import Path

from matplotlib.figure import Figure

from moe_dualpipe.drawing.timeline_boxes import timeline_summary
from moe_dualpipe.drawing.timeline_figure import add_timeline_legend, draw_timeline
from moe_dualpipe.schedule import Costs
from moe_dualpipe.schedule.compare import compare

OUT = Path(__file__).parent / "images" / "schedules"
RANKS, MICRO_BATCHES = 4, 8


def main() -> None:
    OUT.mkdir(exist_ok=True)
    entries = compare(RANKS, MICRO_BATCHES, Costs(F=1, B=2, W=1, FB=3))
    timelines = {e.name: e.timeline for e in entries if e.num_ranks == RANKS and e.timeline is not None}
    longest = max(timeline.makespan for timeline in timelines.values())
    for name, timeline in timelines.items():
        figure = Figure(figsize=(11, 2.1), layout="constrained")
        axes = figure.add_subplot()
        draw_timeline(axes, timeline)
        axes.set_xlim(0, longest)
        axes.set_title(f"{name}: {timeline_summary(timeline).splitlines()[0]}", fontsize=9, loc="left")
        add_timeline_legend(axes, timeline)
        figure.savefig(OUT / f"{name}.png", dpi=110)
        print(OUT / f"{name}.png")


if __name__ == "__main__":
    main()
