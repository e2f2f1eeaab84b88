"""The web page of lanes in a browser: what it shows, and what the mouse and the keyboard do."""

import re

import pytest

from moe_dualpipe.tools.profiler.doctor.verdict import Verdict
from moe_dualpipe.tools.profiler.pictures.lanes import save_lanes
from moe_dualpipe.tools.profiler.pictures.palette import CATEGORY_STYLES, COPY, EXPOSED, HIDDEN
from moe_dualpipe.tools.profiler.pictures.picture import Picture
from tests.support.browser import ENTER, ESCAPE, LEFT, RIGHT, SHIFT, SPACE, TAB
from tests.support.lanes import Work, lanes_of
from tests.support.lanes_page import AXIS, axis, drawn, label_errors, rects, row_of, shown, x_of

END = 2000.0
GEMM, ELEMENTWISE = (style.color for style in CATEGORY_STYLES if style.label in ("GEMM", "elementwise"))
BUTTONS = ["query", "regex", "previous", "next", "all", "help-button"]


def verdict(title, start, end, gain=None):
    return Verdict("host-sync", title, ("Evidence.", "More."), "Remedy.", "attn", start, end, 50.0, gain, gain and 0.1)


VERDICTS = verdict("First cause", 500, 600, 25.0), verdict("Second cause", 1500, 1510)


def works():
    """Every 10 us a kernel of 8 us; every 100 us an all-reduce that is exposed for 2 us; two copies."""
    kernels = [
        Work(
            f"void space::gemm_kernel_{i % 5}<float>(int)" if i % 3 else "add", 10 * i, 10 * i + 8,
            phase=f"layer {i // 20}", category="GEMM" if i % 3 else "elementwise",
        )
        for i in range(199)
    ]  # fmt: skip
    kernels.append(Work("add", 1990, END, category="elementwise"))
    transfers = [Work("ncclDevKernel_AllReduce", 100 * i, 100 * i + 10, lane=1, stream="20") for i in range(20)]
    transfers.append(Work("ncclDevKernel_Broadcast", 1908, 1909, lane=1, row=1, stream="21"))
    return *kernels, *transfers, Work("Memcpy HtoD", 400, 450, lane=2), Work("Memcpy DtoH", 900, 999, lane=2)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    memory = ((0, 1e9, 3e9), (500, 2e9, 3e9), (1000, 1.5e9, 4e9))
    pictures = (
        Picture("rank 0: first", lanes_of(*works(), memory=memory), verdicts=VERDICTS),
        Picture("rank 1: second", lanes_of(Work("late", 0, 500)), shift_us=1000),
    )
    path = tmp_path_factory.mktemp("page") / "lanes.html"
    save_lanes(pictures, path)
    return path


@pytest.fixture
def page(page, file):
    page.open(file)
    return page


def focused(page):
    return page.script(
        "const at = document.activeElement; return at.id || at.className || at.dataset.style || at.tagName"
    )


def test_all_parts_are_drawn(page):
    assert shown(page) == (0, END)
    labels = page.script("return [...document.querySelectorAll('#legend button')].map((button) => button.textContent)")
    assert labels == ["GEMM", "elementwise", HIDDEN.label, COPY.label, EXPOSED.label]
    for style in (*(s for s in CATEGORY_STYLES if s.label in labels), HIDDEN, COPY, EXPOSED):
        assert rects(page, style.color), style.label
        assert rects(page, style.color, "overview"), style.label
    texts = [text["text"] for text in drawn(page)["texts"]]
    assert [text for text in texts if text.startswith("rank")] == ["rank 0: first", "rank 1: second"]
    assert texts.count("computation") == texts.count("communication") == texts.count("copies") == 2
    ticks = [text["text"] for text in drawn(page, "ruler")["texts"]]
    assert ticks == ["0.0 ms", "0.5 ms", "1.0 ms", "1.5 ms"]


def test_work_is_where_its_time_is(page):
    (late,) = [rect for rect in rects(page, GEMM) if rect["width"] > 100]
    assert late["x"] == pytest.approx(x_of(page, 1000), abs=1)
    assert late["x"] + late["width"] == pytest.approx(x_of(page, 1500), abs=1)
    starts = [rect["x"] for rect in rects(page, COPY.color)]
    assert starts == pytest.approx([x_of(page, 400), x_of(page, 900)], abs=1)
    page.keys("+++")
    for rect in rects(page, EXPOSED.color):
        start, end = shown(page)
        time = start + (rect["x"] - AXIS) / axis(page) * (end - start)
        assert (time % 10) == pytest.approx(8, abs=0.6) or time == pytest.approx(start, abs=1)


def test_keys_zoom_and_move(page):
    page.keys("+")
    assert shown(page) == pytest.approx((END / 2 - END / 3, END / 2 + END / 3), abs=1)
    page.keys("+", LEFT)
    length = END / 1.5**2
    start = END / 2 - length / 2 - 0.2 * length
    assert shown(page) == pytest.approx((start, start + length), abs=1)
    page.keys(RIGHT, held=SHIFT)
    assert shown(page) == pytest.approx((END - length, END), abs=1)
    page.keys("-")
    assert shown(page)[1] - shown(page)[0] == pytest.approx(length * 1.5, abs=1)
    page.keys("0")
    assert shown(page) == (0, END)
    page.keys("-", LEFT)
    assert shown(page) == (0, END)
    page.keys("+" * 60)
    assert shown(page)[1] - shown(page)[0] == pytest.approx(0.05, abs=0.001)


def test_the_wheel_zooms_at_the_mouse(page):
    x = x_of(page, 500)
    page.wheel("#lanes", x, 60, -400)
    start, end = shown(page)
    assert end - start == pytest.approx(END / 2.71828, rel=0.01)
    assert x_of(page, 500) == pytest.approx(x, abs=1)
    page.wheel("#lanes", x, 60, 80, held=SHIFT)
    assert shown(page)[0] == pytest.approx(start + 0.1 * (end - start), abs=2)
    page.wheel("#lanes", x, 60, 4000)
    assert shown(page) == (0, END)


def test_lanes_can_be_dragged(page):
    page.keys("+")
    start, end = shown(page)
    page.drag("#lanes", (600, 60), (500, 60))
    moved = 100 / axis(page) * (end - start)
    assert shown(page) == pytest.approx((start + moved, end + moved), abs=1)
    assert page.script("return document.querySelector('#details').hidden")
    page.click("#lanes", 600, 60, times=2)
    assert shown(page) == (0, END)


def test_the_overview_chooses_what_is_shown(page):
    at = lambda time: (AXIS + time / END * axis(page), 25)  # noqa: E731
    page.drag("#overview", at(500), at(1000))
    assert shown(page) == pytest.approx((500, 1000), abs=3)
    page.drag("#overview", at(750), at(850))  # the frame
    assert shown(page) == pytest.approx((600, 1100), abs=3)
    page.drag("#overview", at(1100), at(1300))  # its right edge
    assert shown(page) == pytest.approx((600, 1300), abs=5)
    page.click("#overview", *at(1600))  # beside it
    assert shown(page) == pytest.approx((1250, 1950), abs=5)
    (frame,) = drawn(page, "overview")["frames"]
    assert frame["x"] == pytest.approx(at(1250)[0], abs=3)
    marks = [rect for rect in rects(page, EXPOSED.color, "overview") if rect["y"] == 0]
    assert [mark["x"] for mark in marks] == pytest.approx([at(500)[0] - 1, at(1500)[0] - 1], abs=1)


def test_the_legend_hides_colors(page):
    gemm = "#legend button:nth-child(1)"
    pressed = "return [...document.querySelectorAll('#legend button')].map((one) => one.getAttribute('aria-pressed'))"
    page.click(gemm)
    assert not rects(page, GEMM) and not rects(page, GEMM, "overview") and rects(page, ELEMENTWISE)
    assert page.script(pressed) == ["false", "true", "true", "true", "true"]
    page.click(gemm)
    assert rects(page, GEMM) and page.script(pressed) == ["true"] * 5
    page.click(hidden := "#legend button:nth-child(3)")
    assert not rects(page, HIDDEN.color) and rects(page, EXPOSED.color) and rects(page, EXPOSED.color, "overview")
    page.click(hidden)
    page.click("#legend button:nth-child(5)")
    assert rects(page, HIDDEN.color) and not rects(page, EXPOSED.color)
    page.click("#legend button:nth-child(4)", times=2)
    assert page.script(pressed) == ["false", "false", "false", "true", "false"]
    assert rects(page, COPY.color) and not any(rects(page, c) for c in (GEMM, ELEMENTWISE, HIDDEN.color, EXPOSED.color))


def test_search_finds_and_marks(page):
    page.keys("/", "GEMM_kernel_1")
    assert page.text("#hits") == "27 hits"
    assert len([rect for rect in rects(page, GEMM) if rect["alpha"] == 1]) == 27
    marks = {rect["x"] for rect in rects(page, "#000000", "overview") if rect["y"] == 0}
    assert len(marks) == 27 and max(marks) > 0.9 * axis(page)
    page.keys(ENTER)
    assert page.text("#hits") == "1 of 27"
    start, end = shown(page)
    assert start <= 10 and end >= 18
    (frame,) = drawn(page)["frames"]
    assert frame["x"] == pytest.approx(x_of(page, 10), abs=1) and frame["width"] == pytest.approx(
        8 / (end - start) * axis(page), abs=1
    )
    assert "gemm_kernel_1<float>(int)" in page.text("#details .name")
    page.click("#next")
    assert page.text("#hits") == "2 of 27"
    page.click("#previous")
    page.keys("N")
    assert page.text("#hits") == "27 of 27"
    page.keys("nn")
    assert page.text("#hits") == "2 of 27"
    page.click("#legend button:nth-child(1)")
    assert page.text("#hits") == "no hit"
    page.keys(ESCAPE, "/", "broadcast", ENTER)
    assert "exposed 1 us" in page.text("#details")
    page.keys(ESCAPE)
    assert page.text("#hits") == "" and not drawn(page)["frames"]
    assert all(rect["alpha"] == 1 for rect in rects(page, ELEMENTWISE))


def test_search_finds_phases_and_expressions(page):
    page.keys("0", "/", "layer 1")
    assert page.text("#hits") == "1 hit"
    page.keys(ENTER)
    band = next(text["y"] for text in drawn(page)["texts"] if text["text"] == "layer 1")
    page.hover("#lanes", x_of(page, 199), band)
    assert page.script("return document.querySelector('#tip').hidden")
    page.keys(ESCAPE, "/", "memcpy dtoh")
    assert page.text("#hits") == "1 hit"
    page.keys(ESCAPE)
    page.click("#regex")
    page.click("#query")
    page.keys("^(add|late)$")
    assert page.text("#hits") == "69 hits"
    page.keys("(")
    assert page.text("#hits") == "not a regular expression"
    page.keys(ESCAPE, "/", "nothing like it")
    assert page.text("#hits") == "no hit"


def test_labels_fit_at_every_zoom(page):
    seen = set()
    for _ in range(14):
        wrong, found = label_errors(page)
        assert wrong == []
        seen |= found
        page.keys("+", LEFT)
    assert {"add", "layer 4", "late"} <= seen and any(re.fullmatch(r"gemm_kernel_\d", text) for text in seen)
    assert any(text.endswith("…") for text in seen)


def test_the_memory_is_drawn(page):
    assert {"memory", "4 GB"} <= {text["text"] for text in drawn(page)["texts"]}
    y = next(text["y"] for text in drawn(page)["texts"] if text["text"] == "memory") + 20
    for time, text in ((250, "1 GB allocated, 3 GB"), (750, "2 GB allocated, 3 GB"), (1500, "1.5 GB allocated, 4 GB")):
        page.hover("#lanes", x_of(page, time), y)
        assert page.text("#tip") == f"memory: {text} reserved"
    page.drag("#overview", (x_of(page, 600), 25), (x_of(page, 700), 25))
    assert drawn(page)["lines"] == 1  # the reserved memory: no point lies in this window


def test_the_mouse_shows_what_a_piece_is(page):
    page.hover("#lanes", x_of(page, 425), row_of(page, COPY.color))
    assert page.text("#tip").startswith("Memcpy HtoD") and "duration: 50 us" in page.text("#tip")
    page.hover("#lanes", x_of(page, 700), row_of(page, COPY.color))
    assert page.script("return document.querySelector('#tip').hidden")
    page.click("#lanes", x_of(page, 950), row_of(page, COPY.color))
    assert page.text("#details .name") == "Memcpy DtoH"
    assert {"start 900.000 us", "duration 99 us", "device rank 0"} <= set(
        page.script("return [...document.querySelectorAll('#details div')].map((one) => one.textContent)")
    )
    assert len(drawn(page)["frames"]) == 1
    page.click("#lanes", x_of(page, 305), row_of(page, HIDDEN.color))
    assert page.text("#details .name") == "ncclDevKernel_AllReduce"
    assert {"duration 10 us", "exposed 2 us", "stream 20"} <= set(
        page.script("return [...document.querySelectorAll('#details div')].map((one) => one.textContent)")
    )
    band = next(text["y"] for text in drawn(page)["texts"] if text["text"] == "layer 4")
    page.hover("#lanes", x_of(page, 920), band)
    assert page.text("#tip") == "layer 4category: phasestart: 800.000 usduration: 198 usdevice: rank 0"


@pytest.mark.parametrize("key", [None, ENTER, SPACE])
def test_a_cause_leads_to_its_place(page, key):
    boxes = page.script("return [...document.querySelectorAll('.verdict')].map((one) => one.innerText)")
    assert "First cause (host-sync)\ncosts 50 us; predicted gain 25 us (10.0%)" in boxes[0]
    assert "Second cause (host-sync)\ncosts 50 us; the gain cannot be predicted" in boxes[1]
    assert all(text in boxes[0] for text in ("Evidence.", "More.", "Remedy.", "attn"))
    if key is None:
        page.click("#verdicts .verdict:nth-of-type(1)")
    else:
        page.script("document.querySelector('.verdict').focus()")
        page.keys(key)
    assert shown(page) == pytest.approx((450, 650), abs=1)
    (frame,) = drawn(page)["frames"]
    assert frame["dashed"] and frame["x"] == pytest.approx(x_of(page, 500), abs=1)
    current = "return [...document.querySelectorAll('.verdict')].map((one) => one.getAttribute('aria-current'))"
    assert page.script(current) == ["true", "false"]
    page.keys(ESCAPE)
    assert page.script(current) == ["false", "false"] and not drawn(page)["frames"]


def test_the_keyboard_reaches_everything(page):
    order = []
    for _ in range(14):
        page.keys(TAB)
        order.append(focused(page))
    legend = page.script(
        "return [...document.querySelectorAll('#legend button')].map((button) => button.dataset.style)"
    )
    assert order == [*BUTTONS, *legend, "lanes", "verdict", "verdict"]
    page.script("document.querySelector('#legend button').focus()")
    page.keys(SPACE)
    assert not rects(page, GEMM)
    page.keys("?")
    assert page.script("return document.querySelector('#help').open")
    page.keys("+", ESCAPE)
    assert not page.script("return document.querySelector('#help').open") and shown(page) == (0, END)
