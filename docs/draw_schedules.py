"""Draw docs/images/schedules/*.svg: every schedule on four ranks with eight micro-batches, to one scale.

    python docs/draw_schedules.py

The model has four stages with the costs F = 1, B = 2, W = 1 and FB = 3. Interleaved 1F1B, ZB-V and DualPipeV put two
stages on each rank and hold each stage once, so they split the model into eight stages.
"""

from pathlib import Path

from moe_dualpipe.schedule import Costs
from moe_dualpipe.schedule.compare import compare
from moe_dualpipe.tools.drawing.captions import timeline_summary
from moe_dualpipe.tools.drawing.figures import new_figure, save_figure
from moe_dualpipe.tools.drawing.timeline_plot import add_timeline_legend, draw_timeline

OUT = Path(__file__).parent / "images" / "schedules"
RANKS, MICRO_BATCHES = 4, 8


def main() -> None:
    OUT.mkdir(exist_ok=True)
    entries = compare(RANKS, MICRO_BATCHES, Costs(F=1, B=2, W=1, FB=3))
    timelines = {e.name: e.timeline for e in entries if e.num_ranks == RANKS and e.timeline is not None}
    longest = max(timeline.makespan for timeline in timelines.values())
    for name, timeline in timelines.items():
        figure = new_figure(8, 2.1)
        axes = figure.add_subplot()
        draw_timeline(axes, timeline, font_size=8)
        axes.set_xlim(0, longest)
        axes.set_title(f"{name}: {timeline_summary(timeline).splitlines()[0]}", fontsize=10, loc="left")
        add_timeline_legend(axes, timeline)
        save_figure(figure, OUT / f"{name}.svg")
        print(OUT / f"{name}.svg")


if __name__ == "__main__":
    main()
