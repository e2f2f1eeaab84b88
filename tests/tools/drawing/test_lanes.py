"""Lanes as an image: bars and names at their places, and a legend of the colors drawn."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.cli import main
from moe_dualpipe.tools.drawing.timeline_boxes import LABELS
from moe_dualpipe.tools.profiler.intervals import difference, union, union_length
from moe_dualpipe.tools.profiler.pictures.lanes import MAX_PICTURES, save_lanes
from moe_dualpipe.tools.profiler.pictures.lanes_image import _LANE_HEIGHTS, _PIXELS, lanes_figure
from moe_dualpipe.tools.profiler.pictures.palette import EXPOSED, HIDDEN, STYLES
from moe_dualpipe.tools.profiler.pictures.picture import Picture
from tests.support.lanes import Work, lanes_of
from tests.support.traces import annotation, kernel, launch, write

pytest.importorskip("matplotlib")


def picture(*works, shift=0.0, title=""):
    return Picture(title, lanes_of(*works), shift)


def phases(*works):
    """A picture of phases: (name, start, end) in milliseconds."""
    return picture(*(Work("k", a * 1e3, b * 1e3, phase=n) for n, a, b in works), title="title")


def texts(tmp_path, *pictures):
    """Draw the pictures as an image and return its texts."""
    save_lanes(pictures, tmp_path / "lanes.svg")
    return re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "lanes.svg").read_text())


def panel(*works, shift=0.0):
    return lanes_figure([picture(*works, shift=shift)]).axes[0]


def bars(axes, color):
    """The bars of a color: (start, end, height of the bar in heights of its row)."""
    from matplotlib.colors import to_hex

    colored = [group for group in axes.collections if [to_hex(ink) for ink in group.get_facecolor()] == [color]]
    extents = [path.get_extents() for group in colored for path in group.get_paths()]
    return [(box.x0 * 1e3, box.x1 * 1e3, box.height / _LANE_HEIGHTS[0]) for box in extents]


def color_of(label):
    return next(style.color for style in STYLES if style.label == label)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("gam"), st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=9),
    st.integers(0, 5),
)
def test_bars_cover_the_time_of_their_work(drawn, shift):
    """In a time axis of at most 75 us, a pixel is 0.0625 us. Exposed communication is drawn over hidden one."""
    kinds = {"g": ("GEMM", 0), "a": ("elementwise", 0), "m": ("communication", 1)}
    works = [Work(what, a, a + length, kinds[what][1], category=kinds[what][0], row=int(what == "a"))
             for what, a, length in drawn]  # fmt: skip
    shown, axes = picture(*works, shift=float(shift)), panel(*works, shift=float(shift))
    for label, chosen in (("GEMM", "g"), ("elementwise", "a"), (HIDDEN.label, "m")):
        busy = union(np.array([(w.start, w.end) for w in works if w.name == chosen]).reshape(-1, 2)) + shift
        drawn_bars = union(np.array([bar[:2] for bar in bars(axes, color_of(label))]).reshape(-1, 2))
        apart = union_length(difference(busy, drawn_bars)) + union_length(difference(drawn_bars, busy))
        assert apart <= 2 * len(busy) * shown.end_us / _PIXELS
    exposed = [bar[:2] for bar in bars(axes, EXPOSED.color)]
    assert exposed == [pytest.approx((a + shift, b + shift)) for a, b in shown.lanes.exposed.tolist()]


def test_a_pixel_shows_the_style_with_the_most_time():
    pairs = [("gemm", "GEMM", 0, 7), ("add", "elementwise", 7, 10)]
    works = [Work(name, 10 * i + a, 10 * i + b, category=kind) for i in range(5000) for name, kind, a, b in pairs]
    axes = panel(*works)
    assert [bar[:2] for bar in bars(axes, color_of("GEMM"))] == [pytest.approx((0, 50_000))]
    assert not bars(axes, color_of("elementwise"))


def test_many_short_exposures_are_as_high_as_their_share():
    """A quarter of many transfers is exposed: a quarter of the row is red. A long exposed one is as high as the row."""
    kernels = [Work("gemm", 10 * i, 10 * i + 7.5) for i in range(5000)]
    transfers = [Work("nccl", 10 * i, 10 * i + 10, lane=1) for i in range(5000)]
    axes = panel(*kernels, *transfers, Work("nccl", 60_000, 70_000, lane=1))
    assert bars(axes, EXPOSED.color) == [pytest.approx((7.5, 50_000, 0.25)), pytest.approx((60_000, 70_000, 1))]


def test_labels_lie_inside_their_work():
    generator = np.random.default_rng(0)
    edges = np.concatenate([[0], np.cumsum(generator.integers(20, 60, 12))]) * 1.0
    works = [(f"MWMW{i}", a, b) for i, (a, b) in enumerate(pairwise(edges.tolist()))]
    figure = lanes_figure([phases(*works)])
    figure.savefig("/dev/null", format="png", dpi=100)
    (axes,) = figure.axes
    boxes = [axes.transData.inverted().transform_bbox(text.get_window_extent()) for text in axes.texts]
    assert len(boxes) > 8
    assert all(any(a <= box.x0 and box.x1 <= b for _, a, b in works) for box in boxes)


def test_colors_can_be_told_apart():
    """Text has a contrast of at least 4.5 to 1 on its color (WCAG 2.1), and no two colors are equal."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for style in STYLES:
        low, high = sorted([luminance(style.color), luminance(style.ink)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, style
    assert len({style.color for style in STYLES}) == len({style.label for style in STYLES}) == len(STYLES)


OTHERS = (
    Work("gemm", 0, 50), Work("add", 50, 60, category="elementwise"), Work("odd", 60, 70, category="unheard of"),
    Work("ncclA", 40, 100, lane=1, category="communication"), Work("Memcpy", 80, 90, lane=2, category="copy"),
)  # fmt: skip
STRIP = Work("gemm", 0, 50, phase="mlp(F)"), Work("ncclA", 0, 100, lane=1, phase="combine(B)")


@pytest.mark.parametrize("shown,legend,lanes", [
    (phases(("mlp(B)", 0, 900), ("attn(W)", 900, 999.5), ("mlp(F)", 999.5, 1000)), [LABELS["B"], LABELS["W"]], 1),
    (phases(("mlp(I)", 0, 900), ("", 900, 1000)), [LABELS["I"], "other"], 1),
    (picture(*OTHERS), ["GEMM", "elementwise", "other", HIDDEN.label, "copies", EXPOSED.label], 3),
    (picture(*OTHERS[:3]), ["GEMM", "elementwise", "other"], 1),
    (picture(Work("gemm", 0, 9), Work("ncclA", 2, 7, lane=1)), ["GEMM", HIDDEN.label], 2),
    (picture(*STRIP), [LABELS["F"], LABELS["B"], EXPOSED.label], 2),
])  # fmt: skip
def test_the_legend_has_the_colors_that_can_be_seen_and_lanes_without_work_are_left_out(tmp_path, shown, legend, lanes):
    found = texts(tmp_path, shown)
    assert found[-len(legend) :] == legend
    assert [text for text in found[: -len(legend)] if text in ("computation", "communication", "copies")] == [
        "computation", "communication", "copies",
    ][:lanes]  # fmt: skip


@pytest.mark.parametrize("end,tick", [(2, "0.5 us"), (2e3, "0.5 ms"), (6e8, "200 s")])
def test_times_have_a_unit_that_suits_them(tmp_path, end, tick):
    assert tick in texts(tmp_path, picture(Work("gemm", 0, end)))


def test_names_are_drawn_where_they_fit(tmp_path):
    found = texts(tmp_path, phases(("mlp(B)", 0, 90), ("prepare dispatch(F)", 90, 100)))
    assert found.count("mlp(B)") == 1 and "prepare dispatch(F)" not in found
    assert sum(text.startswith("prep") and text.endswith("…") for text in found) == 1
    unnamed = picture(Work("void at::native::elementwise_kernel<4, f>(int)", 0, 90), Work("gemm", 90, 100))
    assert "elementwise_kernel" in texts(tmp_path, unnamed)
    assert texts(tmp_path, picture(), phases(("a", 1, 2)))[-1] == "GEMM"


def test_at_most_eight_devices_are_drawn(tmp_path):
    many = [phases(("mlp(F)", 0, 1)) for _ in range(MAX_PICTURES + 2)]
    found = texts(tmp_path, *many)
    assert "2 more devices not drawn" in found and found.count("title") == MAX_PICTURES
    assert not any("not drawn" in text for text in texts(tmp_path, *many[:MAX_PICTURES]))


def test_the_command_draws(tmp_path, capsys):
    events = [annotation("mlp(W)", 0, 10), launch(1, 5), kernel("gemm", 10, 30, correlation=1)]
    path = str(write(tmp_path / "trace.json", events))
    assert main(["profile", "analyze", path, "--out", str(tmp_path / "lanes.svg")]) == 0
    drawn = (tmp_path / "lanes.svg").read_text()
    assert ">mlp(W)</text>" in drawn and f">{LABELS['W']}</text>" in drawn
    (tmp_path / "folder.svg").mkdir()
    capsys.readouterr()
    for out, problem in (
        ("folder.svg", "it is a folder"), ("lanes.html", "use one of .png, .svg, .json, .json.gz"),
        ("no/lanes.png", "does not exist"),
    ):  # fmt: skip
        assert main(["profile", "analyze", path, "--out", str(tmp_path / out)]) == 2
        err = capsys.readouterr().err
        assert problem in err and err.count("\n") == 1
