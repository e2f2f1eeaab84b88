"""Text and figures show every action of a timeline at its time and in its color."""

import re
import sys
import xml.etree.ElementTree
from collections import Counter
from typing import Any

import pytest

from moe_dualpipe.schedule import (
    Costs,
    Forward,
    Overlap,
    Schedule,
    build,
    members,
    simulate,
)
from moe_dualpipe.tools.drawing.timeline import COLORS, boxes
from moe_dualpipe.tools.drawing.timeline_figure import draw_timeline, save_timeline, timeline_figure
from moe_dualpipe.tools.drawing.timeline_text import timeline_text

COSTS = Costs(F=2, B=5, W=2, FB=6)
SIZES = [("dualpipe", 4, 10), ("zbv", 3, 6), ("interleaved_1f1b", 2, 4), ("1f1b", 1, 1), ("chimera", 8, 16)]
timelines = pytest.mark.parametrize("timeline", [simulate(build(*size), COSTS) for size in SIZES], ids=map(str, SIZES))
PAIR = simulate(build("dualpipe", 2, 4), COSTS)


def named(line):
    return re.findall(r"[A-Za-z]\d+", line)


@timelines
def test_boxes_equal_the_actions_and_their_times(timeline):
    for rank, spans in enumerate(timeline.spans):
        row = iter(boxes(timeline, rank))
        for span in spans:
            mine = [next(row) for _ in members(span.action)]
            assert (mine[0].start, mine[-1].end) == (span.start, span.end)
            if isinstance(span.action, Overlap):  # a third is the forward's
                assert mine[0].end == mine[1].start == span.start + (span.end - span.start) / 3
            for box, member in zip(mine, members(span.action), strict=True):
                letter = "F" if isinstance(member, Forward) else member.part.value
                assert (box.letter, box.stage, box.micro_batch) == (letter, member.stage, member.micro_batch)
                assert box.framed == isinstance(span.action, Overlap)
        assert next(row, None) is None


@timelines
def test_figures_up_to_one_time_have_one_scale(timeline):
    figure = timeline_figure(timeline, until=200)
    assert figure.axes[0].get_xlim() == (0, 200) and figure.get_figwidth() == 8


# ---- Text ----


@timelines
@pytest.mark.parametrize("width", [40, 61, 80, 133, 2000])
def test_text_has_every_box_once_in_bands_that_fit(timeline, width):
    lines = timeline_text(timeline, width).splitlines()
    assert max(map(len, lines)) <= width
    bands = [float(line.split()[1]) for line in lines if line.startswith("time")]
    assert bands == sorted(set(bands)) and bands[0] == 0 and bands[-1] < timeline.makespan
    for rank, stages in enumerate(timeline.schedule.placement.stages):
        own = [line[len(f"rank {rank}  ") :] for line in lines if line.startswith(f"rank {rank} ")]
        row, every = "".join(own), list(boxes(timeline, rank))
        letters = Counter(b.letter if b.stage == stages[0] else b.letter.lower() for b in every)
        assert len(own) == len(bands)
        assert Counter(name[0] for name in named(row)) == letters
        assert row.count("[") == row.count("]") == sum(box.framed for box in every) / 2
        assert Counter(int(name[1:]) for name in named(row)) == Counter(box.micro_batch for box in every)


# ---- Figures ----


@timelines
def test_a_figure_shows_every_box_at_its_place_and_in_its_color(timeline):
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    axes: Any = Figure().add_subplot()
    draw_timeline(axes, timeline)
    every = [(rank, box) for rank in range(timeline.schedule.num_ranks) for box in boxes(timeline, rank)]
    labels = [(round(-label.get_position()[1]), label.get_position()[0], label.get_text()) for label in axes.texts]
    assert sorted(labels) == sorted((rank, (b.start + b.end) / 2, str(b.micro_batch)) for rank, b in every)
    for rank, stages in enumerate(timeline.schedule.placement.stages):
        filled, framed = axes.collections[2 * rank : 2 * rank + 2]
        row = list(boxes(timeline, rank))
        edges = [path.get_extents() for path in filled.get_paths()]
        assert [(e.x0, e.x1) for e in edges] == [pytest.approx((b.start, b.end)) for b in row]
        for box, color in zip(row, filled.get_facecolors(), strict=True):
            assert (to_hex(color) == COLORS[box.letter]) == (box.stage == stages[0])
        pairs = [s for s in timeline.spans[rank] if isinstance(s.action, Overlap)]
        edges = [path.get_extents() for path in framed.get_paths()]
        assert [(e.x0, e.x1) for e in edges] == [(s.start, s.end) for s in pairs]
        assert framed.zorder > filled.zorder


@pytest.mark.parametrize("size", [("dualpipe", 4, 16), ("zbv", 2, 12), ("1f1b", 1, 101), ("zbv", 2, 200)], ids=str)
@pytest.mark.quick("('dualpipe', 4, 16)", "('zbv', 2, 200)")
def test_numbers_in_a_figure_fit_into_their_boxes_or_are_left_out(size):
    """The narrowest box is wider than the widest number, as rendered."""
    figure = timeline_figure(simulate(build(*size), COSTS))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    widest = max((label.get_window_extent().width for label in axes.texts), default=0)
    unit = axes.transData.transform((1, 0))[0] - axes.transData.transform((0, 0))[0]
    assert widest < 2 * unit and figure.get_figwidth() <= 60 and bool(axes.texts) == (size[2] < 200)


def test_each_further_stage_is_paler():
    axes: Any = timeline_figure(simulate(build("interleaved_1f1b", 1, 1, 3), COSTS)).axes[0]
    white = 1 - axes.collections[0].get_facecolors()[:3, :3]
    assert white[1] == pytest.approx(white[0] * 0.75, abs=0.005)
    assert white[2] == pytest.approx(white[0] * 0.5, abs=0.005)


def test_saved_files(tmp_path):
    timeline = simulate(build("dualpipev", 2, 6), COSTS)
    for name in ("a.svg", "a.PNG", "a.csv", "b.svg"):
        save_timeline(timeline, tmp_path / name)
    assert xml.etree.ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert "dualpipev: 2 ranks, 4 stages, 6 micro-batches" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")
    assert Schedule.from_csv((tmp_path / "a.csv").read_text()) == timeline.schedule
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    with pytest.raises(ValueError, match=r"cannot write 'a.pdf': use one of .svg, .png, .csv"):
        save_timeline(timeline, tmp_path / "a.pdf")


def test_a_figure_without_matplotlib_says_how_to_install_it(monkeypatch, tmp_path):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"figures need matplotlib: pip install 'moe-dualpipe\[viz\]'"):
        save_timeline(simulate(build("1f1b", 2, 2), Costs()), tmp_path / "figure.svg")
