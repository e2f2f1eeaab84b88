"""Other web pages of lanes in a browser: little work, sizes that follow the window, colors of the theme."""

import pytest

from moe_dualpipe.tools.profiler.doctor.verdict import Verdict
from moe_dualpipe.tools.profiler.pictures.lanes import save_lanes
from moe_dualpipe.tools.profiler.pictures.palette import CATEGORY_STYLES, EXPOSED, HIDDEN
from moe_dualpipe.tools.profiler.pictures.picture import Picture
from tests.support.browser import ENTER
from tests.support.lanes import Work, lanes_of
from tests.support.lanes_page import axis, drawn, rects

ROW = 44  # the height of a row, in pixels
(GEMM,) = (style.color for style in CATEGORY_STYLES if style.label == "GEMM")


def test_canvases_have_the_size_of_their_elements(page, tmp_path):
    """Also if a scroll bar disappears while they are drawn, and after the window has changed."""
    canvases = "['overview', 'ruler', 'lanes'].map((id) => document.getElementById(id))"
    sizes = f"return {canvases}.map((canvas) => [canvas.width, canvas.clientWidth])"
    save_lanes([Picture("short", lanes_of(Work("gemm", 0, 9)))], tmp_path / "short.html")
    page.open(tmp_path / "short.html")
    assert all(inside == outside for inside, outside in page.script(sizes))
    try:
        page.resize(900, 700)
        assert all(inside == outside for inside, outside in page.script(sizes))
        assert rects(page, GEMM)[0]["width"] == pytest.approx(axis(page), abs=1)
    finally:
        page.resize(1280, 800)


def test_the_causes_leave_the_width_to_the_lanes_in_a_narrow_window(page, tmp_path):
    cause = Verdict("host-sync", "Cause.", (), "Remedy.", "", 0, 5, 5.0)
    save_lanes([Picture("one", lanes_of(Work("gemm", 0, 9)), verdicts=[cause])], tmp_path / "one.html")
    page.open(tmp_path / "one.html")
    places = "return ['lanes', 'verdicts'].map((id) => document.getElementById(id).getBoundingClientRect().toJSON())"
    lanes, causes = page.script(places)
    assert causes["left"] >= lanes["right"] and causes["top"] < lanes["bottom"]
    try:
        page.resize(700, 700)
        lanes, causes = page.script(places)
        assert lanes["width"] > 600 and causes["top"] >= lanes["bottom"]
        assert rects(page, GEMM)[0]["width"] == pytest.approx(axis(page), abs=1)
    finally:
        page.resize(1280, 800)


def test_lanes_without_work_are_left_out(page, tmp_path):
    save_lanes([Picture("one", lanes_of(Work("gemm", 0, 9))), Picture("two", lanes_of())], tmp_path / "some.html")
    page.open(tmp_path / "some.html")
    assert [text["text"] for text in drawn(page)["texts"]] == ["one", "computation", "gemm", "two", "computation"]
    exposed = lanes_of(Work("gemm", 0, 9), Work("ncclA", 10, 20, lane=1))
    save_lanes([Picture("exposed", exposed)], tmp_path / "exposed.html")
    page.open(tmp_path / "exposed.html")
    assert page.text("#legend") == "GEMM" + EXPOSED.label
    assert not rects(page, HIDDEN.color, "overview") and rects(page, EXPOSED.color, "overview")


def test_many_short_exposures_do_not_cover_what_is_hidden(page, tmp_path):
    """Of 2,000 short transfers, and of long ones that cover each other, 2 of 10 us are exposed: a fifth is red."""
    kernels = [Work("gemm", 10 * i, 10 * i + 8) for i in range(2000)]
    long = [*[Work("ncclA", 0, 15_000, lane=1)] * 2, Work("ncclA", 15_000, 20_000, lane=1)]
    short = [Work("ncclA", 10 * i, 10 * i + 10, lane=1) for i in range(2000)]

    def area(transfers, style):
        save_lanes([Picture("many", lanes_of(*kernels, *transfers))], tmp_path / "many.html")
        page.open(tmp_path / "many.html")
        return sum(rect["width"] * rect["height"] * rect["alpha"] for rect in rects(page, style.color))

    red, blue = area(short, EXPOSED), area(short, HIDDEN)
    assert red / (red + blue) == pytest.approx(0.2, abs=0.01)
    assert area(long, EXPOSED) / ROW / axis(page) == pytest.approx(0.2, abs=0.01)  # above the blue


def test_a_short_exposed_transfer_has_no_other_color(page, tmp_path):
    work = Work("gemm", 0, 5000), Work("ncclA", 6000, 6001, lane=1), Work("gemm", 9000, 10_000)
    save_lanes([Picture("one", lanes_of(*work))], tmp_path / "one.html")
    page.open(tmp_path / "one.html")
    assert [rect["height"] for rect in rects(page, EXPOSED.color)] == [ROW]
    assert not [rect for rect in rects(page, HIDDEN.color) if rect["height"]]


def test_unknown_reserved_memory_is_not_drawn(page, tmp_path):
    for reserved, lines in ((0, 0), (9, 1)):
        lanes = lanes_of(Work("gemm", 0, 9), memory=((0, 5, reserved), (4, 7, reserved)))
        save_lanes([Picture("one", lanes)], tmp_path / "memory.html")
        page.open(tmp_path / "memory.html")
        assert drawn(page)["lines"] == lines


def test_a_page_without_work_opens(page, tmp_path):
    save_lanes([Picture("nothing", lanes_of())], tmp_path / "empty.html")
    page.open(tmp_path / "empty.html")
    page.keys("+", "0", "/", "x", ENTER)
    assert "nothing" in {text["text"] for text in drawn(page)["texts"]}


def test_the_colors_follow_the_theme(page, tmp_path):
    def has_ink(color):
        """Whether titles get this color: the event arrives some frames later."""
        return any(color in [text["color"] for text in drawn(page)["texts"]] for _ in range(60))

    save_lanes([Picture("title", lanes_of())], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    assert has_ink("#1b1b1b")
    try:
        page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert has_ink("#ececec")
    finally:
        page.devtools("Emulation.setEmulatedMedia", features=[])
