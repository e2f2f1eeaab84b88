"""Lanes as an image: names where they fit, a detail where they do not fit, and a legend of the colours drawn."""

import re

import numpy as np
import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.drawing.lanes import Picture, _windows, save_lanes
from moe_dualpipe.drawing.timeline_boxes import LABELS
from moe_dualpipe.profiler import read_trace
from moe_dualpipe.profiler.files import LaneBlock, lane_blocks
from tests.support.traces import annotation, kernel, launch, write


def picture(blocks, shift=0.0):
    """Return a picture of these blocks: (name, start, end) in milliseconds."""
    return Picture("title", [LaneBlock(0, n, np.array([[a, b]]) * 1e3) for n, a, b in blocks], shift * 1e3)


def texts(tmp_path, *pictures):
    """Draw the pictures as an image and return its texts."""
    save_lanes(pictures, tmp_path / "lanes.svg")
    return re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "lanes.svg").read_text())


def test_blocks_are_what_an_annotation_launched(tmp_path):
    trace = read_trace(write(tmp_path / "trace.json", [
        annotation("attn(F)", 0, 10), annotation("dispatch(B)", 10, 10), annotation("attn(F)", 20, 10),
        launch(1, 5), launch(2, 15), launch(3, 25), launch(4, 6),
        kernel("gemm", 100, 5, correlation=1), kernel("gemm", 107, 3, correlation=4),
        kernel("ncclX", 103, 9, correlation=2), kernel("gemm", 120, 4, correlation=3), kernel("gemm", 130, 1),
        kernel("gemm", 0, 1000, device=1),
    ]))  # fmt: skip
    assert [(b.lane, b.name, Picture.colour(b), b.intervals.tolist()) for b in lane_blocks(trace, "0")] == [
        (0, "attn(F)", "#f6b26b", [[0, 5], [7, 10]]), (0, "attn(F)", "#f6b26b", [[20, 24]]),
        (0, "", "#c8c8c8", [[30, 31]]), (1, "dispatch(B)", "#93c47d", [[3, 12]]),
    ]  # fmt: skip


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


def test_the_legend_has_the_colours_that_can_be_seen(tmp_path):
    """1 ms of 1,000 is too short to be seen."""
    found = texts(tmp_path, picture([("mlp(B)", 0, 900), ("attn(W)", 900, 999), ("mlp(F)", 999, 1000)]))
    assert found[-2:] == [LABELS["B"], LABELS["W"]]
    assert texts(tmp_path, picture([("mlp(I)", 0, 900), ("", 900, 1000)]))[-2:] == [LABELS["I"], "other"]


def test_names_are_drawn_where_they_fit(tmp_path):
    found = texts(tmp_path, picture([("mlp(B)", 0, 90), ("prepare dispatch(F)", 90, 100)]))
    assert found.count("mlp(B)") == 1 and "prepare dispatch(F)" not in found
    assert not any("part in the frame" in text for text in found)


def test_a_detail_shows_names_where_the_whole_is_too_long(tmp_path):
    """A lane is 112 letters wide and each name takes 8 of them, so that 14 of the 100 blocks of 10 ms fit."""
    long = picture([(f"mlp{i % 2}(F)", 10 * i, 10 * i + 10) for i in range(100)])
    whole, (start, end) = _windows([long])
    assert whole == (0, 1e6)
    assert end - start == pytest.approx(10e3 * 7.7 / (0.55 * 9 / 72 * 8))
    assert start + end == pytest.approx(1e6)
    found = texts(tmp_path, long)
    assert "the part in the frame, 140 ms" in found
    assert 12 <= sum(text.startswith("mlp") for text in found) <= 14


def test_the_detail_lies_in_the_middle_of_what_all_pictures_have():
    """The first picture covers 0 to 1,000 ms, the second 200 to 400 ms."""
    blocks = [("mlp(F)", 10 * i, 10 * i + 10) for i in range(100)]
    _, (start, end) = _windows([picture(blocks), picture(blocks[:20], shift=200)])
    assert start + end == pytest.approx(600e3)


def test_images_of_traces_without_names_or_work(tmp_path):
    assert "other" in texts(tmp_path, picture([("", 0, 10)]))
    assert texts(tmp_path, Picture("nothing", []), picture([("a", 1, 2)]))[-1] == "other"
