"""The page holds what the picture shows, and its script draws it: run by Node in front of a canvas that counts."""

import json
import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import annotation, kernel, launch, write

from moe_dualpipe.cli import main
from moe_dualpipe.profiler.intervals import union
from moe_dualpipe.profiler.lanes import Block, Picture, save
from moe_dualpipe.profiler.page import RESOLUTION, SCRIPT

ODD = """</script><!-- "it's" {data} {script} $data ${script} \\ ä 通信 & <b>"""


def block(name, *intervals, lane=0, colour="#f6b26b"):
    return Block(lane, name, colour, np.array(intervals, dtype=float))


def page_of(tmp_path, *pictures):
    """The text of the page, and the data in it as a browser finds them: up to the first end of a script."""
    save(pictures, tmp_path / "lanes.html")
    text = (tmp_path / "lanes.html").read_text("utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', text, re.DOTALL)
    return text, json.loads(data)


# ---- What it holds ----


def test_the_data_are_the_blocks(tmp_path):
    first = Picture(f"rank 0: {ODD}", [block(ODD, (0, 5.25), (6, 10)), block("", (2, 8), lane=1, colour="#c8c8c8")], 3)
    second = Picture("rank 1", [block("mlp(B)", (0, 100))])
    text, data = page_of(tmp_path, first, second)
    assert data == {"end": 100, "rows": [
        {"title": f"rank 0: {ODD}", "blocks": [
            [0, ODD, "#f6b26b", [[3, 8.25], [9, 13]]], [1, "", "#c8c8c8", [[5, 11]]],
        ]},
        {"title": "rank 1", "blocks": [[0, "mlp(B)", "#f6b26b", [[0, 100]]]]},
    ]}  # fmt: skip
    assert text.count("</script") == 2
    assert text.count("<b>") == 0
    assert "<title>rank 0: &lt;/script&gt;&lt;!-- &quot;it&#x27;s&quot; {data} {script} $data ${script}" in text
    assert text.endswith(f"<script>\n{SCRIPT.read_text('utf-8')}\n</script>\n")


def test_gaps_too_short_to_be_seen_are_closed(tmp_path):
    """Of 200 ms, 10 us are 1 / RESOLUTION."""
    end = 10.0 * RESOLUTION
    spans = [(0, 10), (19, 20), (31, 40), (50, 60), (end - 5, end)]
    _, data = page_of(tmp_path, Picture("", [block("a", *spans), block("b", (70, 71), (72, 80))]))
    assert data["rows"][0]["blocks"][0][3] == [[0, 20], [31, 60], [end - 5, end]]
    assert data["rows"][0]["blocks"][1][3] == [[70, 80]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), min_size=1), st.integers(0, 9))
def test_closing_adds_only_short_gaps(tmp_path_factory, drawn, gap):
    spans = union(np.array([(start, start + length) for start, length in drawn], dtype=float))
    other = Picture("", [block("", (0, gap * RESOLUTION + 70))]) if gap else Picture("", [])
    pictures = Picture("", [Block(0, "", "", spans)]), other
    allowed = max(picture.end_us for picture in pictures) / RESOLUTION
    found = page_of(tmp_path_factory.getbasetemp(), *pictures)[1]["rows"][0]["blocks"][0][3]
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
