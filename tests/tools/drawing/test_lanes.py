"""Lanes as an image: names where they fit, and a legend of the colors drawn."""

import re
from itertools import pairwise

import numpy as np
import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.drawing.timeline_boxes import LABELS
from moe_dualpipe.tools.profiler.pictures.lanes import MAX_PICTURES, save_lanes
from moe_dualpipe.tools.profiler.pictures.palette import EXPOSED, HIDDEN, STYLES
from moe_dualpipe.tools.profiler.pictures.picture import Picture
from tests.support.lanes import Work, lanes_of
from tests.support.traces import annotation, kernel, launch, write


def picture(works, shift=0.0):
    """Return a picture of phases: (name, start, end) in milliseconds."""
    return Picture("title", lanes_of(*(Work("k", a * 1e3, b * 1e3, phase=n) for n, a, b in works)), shift * 1e3)


def texts(tmp_path, *pictures):
    """Draw the pictures as an image and return its texts."""
    save_lanes(pictures, tmp_path / "lanes.svg")
    return re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "lanes.svg").read_text())


def colors(tmp_path):
    return {style.label for style in STYLES if style.color in (tmp_path / "lanes.svg").read_text()}


def test_the_command_draws(tmp_path, capsys):
    path = write(
        tmp_path / "trace.json", [annotation("mlp(W)", 0, 10), launch(1, 5), kernel("gemm", 10, 30, correlation=1)]
    )
    for suffix in ("svg", "png"):
        assert main(["profile", "analyze", str(path), "--out", str(tmp_path / f"lanes.{suffix}")]) == 0
    drawn = (tmp_path / "lanes.svg").read_text()
    assert ">mlp(W)</text>" in drawn and f">{LABELS['W']}</text>" in drawn
    (folder := tmp_path / "folder.svg").mkdir()
    capsys.readouterr()
    for arguments, problem in (
        ([str(path), "--out", str(folder)], "it is a folder"),
        ([str(path), "--out", "lanes.pdf"], "cannot write 'lanes.pdf': use one of .png, .svg, .html"),
    ):
        assert main(["profile", "analyze", *arguments]) == 2
        assert problem in capsys.readouterr().err


def test_the_legend_has_the_colors_that_can_be_seen(tmp_path):
    """0.5 ms of 1,000 is too short to be seen."""
    found = texts(tmp_path, picture([("mlp(B)", 0, 900), ("attn(W)", 900, 999.5), ("mlp(F)", 999.5, 1000)]))
    assert found[-2:] == [LABELS["B"], LABELS["W"]]
    assert texts(tmp_path, picture([("mlp(I)", 0, 900), ("", 900, 1000)]))[-2:] == [LABELS["I"], "other"]


@pytest.mark.parametrize("end,tick", [(2, "0.5 us"), (2e3, "0.5 ms"), (6e8, "200 s")])
def test_times_have_a_unit_that_suits_them(tmp_path, end, tick):
    assert tick in texts(tmp_path, Picture("", lanes_of(Work("gemm", 0, end))))


def test_colors_of_other_traces_show_categories(tmp_path):
    works = [
        Work("gemm", 0, 50), Work("add", 50, 60, category="elementwise"), Work("odd", 60, 70, category="unheard of"),
        Work("ncclA", 40, 100, lane=1, category="communication"), Work("Memcpy", 80, 90, lane=2, category="copy"),
    ]  # fmt: skip
    found = texts(tmp_path, Picture("", lanes_of(*works)))
    assert found[-6:] == ["GEMM", "elementwise", "other", HIDDEN.label, "copies", EXPOSED.label]
    assert colors(tmp_path) == {*found[-6:]}
    assert [text for text in found if text in ("computation", "communication", "copies")][:3] == [
        "computation", "communication", "copies",
    ]  # fmt: skip
    found = texts(tmp_path, Picture("", lanes_of(*works[:3])))
    assert found[-3:] == ["GEMM", "elementwise", "other"] and "copies" not in found and "communication" not in found
    found = texts(tmp_path, Picture("", lanes_of(Work("gemm", 0, 9), Work("ncclA", 2, 7, lane=1))))
    assert EXPOSED.label not in found and EXPOSED.color not in (tmp_path / "lanes.svg").read_text()


def bars(works, color):
    """The bars of a color in an image of these works: (start, end, height of the bar in heights of its row)."""
    from matplotlib.colors import to_hex

    from moe_dualpipe.tools.profiler.pictures.lanes_image import _LANE_HEIGHTS, lanes_figure

    axes = lanes_figure([Picture("", lanes_of(*works))]).axes[0]
    colored = [group for group in axes.collections if [to_hex(ink) for ink in group.get_facecolor()] == [color]]
    found = [path for group in colored for path in group.get_paths()]
    extents = [path.get_extents() for path in found]
    return [(box.x0 * 1e3, box.x1 * 1e3, box.height / _LANE_HEIGHTS[0]) for box in extents]


def test_a_pixel_shows_the_style_with_the_most_time():
    pytest.importorskip("matplotlib")
    pairs = [("gemm", "GEMM", 0, 7), ("add", "elementwise", 7, 10)]
    works = [Work(name, 10 * i + a, 10 * i + b, category=kind) for i in range(5000) for name, kind, a, b in pairs]
    (gemm,) = (style.color for style in STYLES if style.label == "GEMM")
    assert [bar[:2] for bar in bars(works, gemm)] == [pytest.approx((0, 50_000))]
    assert not bars(works, next(style.color for style in STYLES if style.label == "elementwise"))


def test_many_short_exposures_are_as_high_as_their_share():
    """A quarter of many transfers is exposed: a quarter of the row is red. A long exposed one is as high as the row."""
    pytest.importorskip("matplotlib")
    kernels = [Work("gemm", 10 * i, 10 * i + 7.5) for i in range(5000)]
    transfers = [Work("nccl", 10 * i, 10 * i + 10, lane=1) for i in range(5000)]
    found = bars([*kernels, *transfers, Work("nccl", 60_000, 70_000, lane=1)], EXPOSED.color)
    assert found == [pytest.approx((7.5, 50_000, 0.25)), pytest.approx((60_000, 70_000, 1))]


def test_exposed_communication_is_a_strip_below_phases(tmp_path):
    works = Work("gemm", 0, 50, phase="mlp(F)"), Work("ncclA", 0, 100, lane=1, phase="combine(B)")
    found = texts(tmp_path, Picture("", lanes_of(*works)))
    assert found[-3:] == [LABELS["F"], LABELS["B"], EXPOSED.label]


def test_colors_can_be_told_apart():
    """Text has a contrast of at least 4.5 to 1 on its color (WCAG 2.1), and no two colors of categories are close."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for style in STYLES:
        low, high = sorted([luminance(style.color), luminance(style.ink)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, style
    assert len({style.color for style in STYLES}) == len({style.label for style in STYLES}) == len(STYLES)


def test_names_are_drawn_where_they_fit(tmp_path):
    found = texts(tmp_path, picture([("mlp(B)", 0, 90), ("prepare dispatch(F)", 90, 100)]))
    assert found.count("mlp(B)") == 1 and "prepare dispatch(F)" not in found
    assert sum(text.startswith("prep") and text.endswith("…") for text in found) == 1


def test_kernels_without_a_phase_are_labeled_by_their_short_names(tmp_path):
    lanes = lanes_of(Work("void at::native::elementwise_kernel<4, f>(int)", 0, 90), Work("gemm", 90, 100))
    assert "elementwise_kernel" in texts(tmp_path, Picture("", lanes))


def test_images_of_traces_without_names_or_work(tmp_path):
    assert "GEMM" in texts(tmp_path, picture([("", 0, 10)]))
    assert texts(tmp_path, Picture("nothing", lanes_of()), picture([("a", 1, 2)]))[-1] == "GEMM"


def test_at_most_eight_devices_are_drawn(tmp_path):
    many = [picture([("mlp(F)", 0, 1)]) for _ in range(MAX_PICTURES + 2)]
    assert "2 more devices not drawn" in texts(tmp_path, *many)
    assert texts(tmp_path, *many).count("title") == MAX_PICTURES
    assert not any("not drawn" in text for text in texts(tmp_path, *many[:MAX_PICTURES]))


def test_labels_lie_inside_their_work():
    pytest.importorskip("matplotlib")
    from moe_dualpipe.tools.profiler.pictures.lanes_image import lanes_figure

    generator = np.random.default_rng(0)
    edges = np.concatenate([[0], np.cumsum(generator.integers(20, 60, 12))]) * 1.0
    works = [(f"MWMW{i}", a, b) for i, (a, b) in enumerate(pairwise(edges.tolist()))]
    figure = lanes_figure([picture(works)])
    figure.savefig("/dev/null", format="png", dpi=100)
    boxes = []
    for axes in figure.axes:
        for text in axes.texts:
            box = axes.transData.inverted().transform_bbox(text.get_window_extent())
            boxes.append((text.get_text(), any(a <= box.x0 and box.x1 <= b for _, a, b in works)))
    assert len(boxes) > 8 and all(inside for _, inside in boxes), boxes
