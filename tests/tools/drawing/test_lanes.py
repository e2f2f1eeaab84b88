"""Lanes as an image: pixels and names at their places, and a legend of the colors drawn."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.cli import main
from moe_dualpipe.tools.drawing.timeline_boxes import LABELS
from moe_dualpipe.tools.profiler.pictures.lanes import MAX_PICTURES, save_lanes
from moe_dualpipe.tools.profiler.pictures.lanes_image import COLORS, COPIES, EXPOSED, HIDDEN, PIXELS, lanes_figure
from moe_dualpipe.tools.profiler.pictures.picture import runs
from tests.support.pictures import picture
from tests.support.traces import annotation, kernel, launch, write

pytest.importorskip("matplotlib")

STYLES = {"gemm": "GEMM", "vectorized_elementwise_kernel": "elementwise", "odd": "other", "ncclA": HIDDEN,
          "Memcpy HtoD": COPIES}  # fmt: skip
TRANSFER, COPY = "ncclA", "Memcpy HtoD"


def pixels(shown):
    """The label of the color of each pixel of each row, "" for none, and its opacity."""
    from matplotlib.colors import to_hex

    labels = {color: label for label, color in COLORS.items()}
    rows = [image.get_array()[0] for image in lanes_figure([shown]).axes[0].images]
    return [[(labels[to_hex(pixel[:3])], pixel[3]) if pixel[3] else ("", 0) for pixel in row] for row in rows]


def texts(tmp_path, *pictures):
    """Draw the pictures as an image and return its texts."""
    save_lanes(pictures, tmp_path / "lanes.svg")
    return re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "lanes.svg").read_text())


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*STYLES]), st.integers(0, 1000), st.integers(1, 190)), max_size=9),
    st.integers(0, 5),
)  # fmt: skip
def test_each_pixel_has_the_color_of_its_work(drawn, shift):
    """A pixel is 1 us. Of several styles, the first of the legend is shown. Exposed transfers have a strip."""
    works = [("gemm", PIXELS - shift - 5, PIXELS - shift), *((n, a, min(a + length, 1190)) for n, a, length in drawn)]
    found = pixels(picture(*works, shift=float(shift)))
    at = [{STYLES[name] for name, a, b in works if a + shift <= p < b + shift} for p in range(PIXELS)]
    order, lanes = [*COLORS], [{"GEMM", "elementwise", "other"}, {HIDDEN}, {COPIES}]
    expected = [[min(own & styles, key=order.index, default="") for styles in at] for own in lanes]
    strip = [EXPOSED if styles == {HIDDEN} else "" for styles in at]
    rows = [expected[0], *(expected[1:2] if any(expected[1]) else []), *([strip] if any(strip) else []),
            *(expected[2:] if any(expected[2]) else [])]  # fmt: skip
    assert [[label for label, _ in row] for row in found] == rows


def test_short_work_is_drawn_by_its_share():
    """Of kernels shorter than a pixel, the most time counts. A quarter of each transfer is exposed."""
    works = [work for at in range(0, 50_000, 10) for work in (
        ("gemm", at, at + 5), ("vectorized_elementwise_kernel", at + 5, at + 7.5), (TRANSFER, at, at + 10, "", "9")
    )]  # fmt: skip
    computing, sending, strip = pixels(picture(*works))
    assert {label for label, _ in computing} == {"GEMM"} and {label for label, _ in sending} == {HIDDEN}
    assert np.mean([opacity for _, opacity in strip]) == pytest.approx(0.25)


def test_runs_end_at_another_phase_a_gap_and_another_stream():
    shown = picture(("a", 0, 9, "x"), ("b", 2, 4, "x"), ("b", 9, 10), ("b", 11, 12), ("c", 12, 13), ("a", 20, 21, "x"),
                    ("a", 22, 23, "x", "9"))  # fmt: skip
    expected = [(0, 9, "x"), (9, 12, "b"), (12, 13, "c"), (20, 21, "x"), (22, 23, "x")]
    assert sorted(runs(shown.work, 3.0)) == expected and len([*runs(shown.work, 0.5)]) == 6
    twice = picture(("a", 0, 4, "mlp(F)"), ("n", 1, 2, "attn(B)", "9"), ("b", 4, 9, "mlp(F)"))  # entered twice
    assert sorted(runs(twice.work, 3.0)) == [(0, 4, "mlp(F)"), (1, 2, "attn(B)"), (4, 9, "mlp(F)")]


LETTERS = ("gemm", 0, 50, "mlp(F)"), ("ncclA", 0, 100, "combine(B)", "9")


@pytest.mark.parametrize("works,legend,lanes", [
    ([("k", 0, 900, "mlp(B)"), ("k", 900, 999, "attn(W)")], [LABELS["B"], LABELS["W"]], 1),
    ([("k", 0, 900, "mlp(I)"), ("k", 900, 999)], [LABELS["I"], "other"], 1),
    ([(TRANSFER, 0, 9), (COPY, 0, 9), ("gemm", 0, 9)], ["GEMM", HIDDEN, COPIES], 3),
    (LETTERS, [LABELS["F"], LABELS["B"], EXPOSED], 2),
])  # fmt: skip
def test_the_legend_has_the_colors_that_are_seen_and_lanes_without_work_are_left_out(tmp_path, works, legend, lanes):
    found = texts(tmp_path, picture(*works))
    assert found[-len(legend) :] == legend
    every = ["computation", "communication", "copies"]
    assert [text for text in found[: -len(legend)] if text in every] == every[:lanes]


def test_at_most_eight_devices_are_drawn(tmp_path):
    found = texts(tmp_path, *[picture(("k", 0, 1))] * (MAX_PICTURES + 2))
    assert "2 more devices not drawn" in found and found.count("title") == MAX_PICTURES


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
