"""The web page of lanes: its data, and that names stay text."""

import json
import re

import numpy as np

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler.pictures.lanes import save_lanes
from moe_dualpipe.tools.profiler.pictures.page import page_script
from moe_dualpipe.tools.profiler.pictures.page_data import pieces_of
from moe_dualpipe.tools.profiler.pictures.picture import Picture
from tests.support.lanes import Work, lanes_of
from tests.support.traces import annotation, kernel, launch, write

ODD = """</script><!-- "it's" {data} {script} $data ${script} \\ ä 通信 & <b>"""


def page_of(tmp_path, *pictures):
    """The text of the page, and its JSON as a browser reads it: up to the first closing script tag."""
    save_lanes(pictures, tmp_path / "lanes.html")
    text = (tmp_path / "lanes.html").read_text("utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', text, re.DOTALL)
    return text, json.loads(data)


def test_the_page_holds_the_work_as_columns(tmp_path):
    lanes = lanes_of(Work(ODD, 0, 5.25, phase=f"{ODD}(F)", stream=ODD), Work("ncclA", 2, 8, lane=1))
    text, data = page_of(tmp_path, Picture(f"rank 0: {ODD}", lanes, 3), Picture("rank 1", lanes_of(Work("k", 0, 100))))
    first = data["devices"][0]
    assert data["end"] == 100
    assert (first["start"], first["length"], first["lane"]) == ([3, 5], [5.25, 6], [0, 1])
    assert [data["names"][i] for i in first["name"]] == [ODD.replace("\\", "\\"), "ncclA"]
    assert [data["styles"][i][0] for i in first["style"]] == ["forward", "other"]
    assert first["exposed"] == [[8.25, 11]]
    assert first["memory"] is None and first["verdicts"] == [] and first["detail"] is None
    assert text.count("</script") == 2 and text.count("<b>") == 0
    assert "<title>rank 0: &lt;/script&gt;&lt;!-- &quot;it&#x27;s&quot; {data} {script} $data ${script}" in text
    assert page_script() in text


def test_memory_is_shifted_and_starts_with_the_last_point_before(tmp_path):
    lanes = lanes_of(Work("k", 0, 100), memory=((-9, 1, 2), (-5, 3, 4), (50, 5, 6), (200, 7, 8)))
    _, data = page_of(tmp_path, Picture("", lanes, 10))
    assert data["devices"][0]["memory"] == {"time": [10, 60], "allocated": [3, 5], "reserved": [4, 6]}


def test_short_work_is_joined_if_there_is_too_much(monkeypatch):
    """Nothing is lost: the number of events, their time, and the longest ones."""
    monkeypatch.setattr("moe_dualpipe.tools.profiler.pictures.page_data.MAX_PIECES", 100)
    starts = np.cumsum(np.random.default_rng(0).integers(3, 9, 2000)).tolist()
    lanes = lanes_of(*(Work(f"k{i}", a, a + 1 + i % 2) for i, a in enumerate(starts)), Work("n", 0, 500.0, lane=1))
    (pieces,), shortest = pieces_of([lanes], lanes.end_us)
    assert 90 < len(pieces.count) <= 100 and shortest > 0
    assert pieces.count.sum() == 2001
    np.testing.assert_allclose(pieces.busy.sum(), (lanes.end - lanes.start).sum())
    assert pieces.lanes.start.min() == 0 and pieces.lanes.end.max() == lanes.end_us
    assert pieces_of([lanes_of(Work("a", 0, 1))], 1.0)[1] == 0


def test_the_command_writes_a_page(tmp_path):
    events = [annotation("attn(F)", 0, 9), launch(1, 5), kernel("gemm", 10, 30, correlation=1)]
    path = write(tmp_path / "trace.json", events)
    assert main(["profile", "analyze", str(path), str(path), "--out", str(tmp_path / "lanes.HTML")]) == 0
    assert '"attn(F)"' in (tmp_path / "lanes.HTML").read_text("utf-8")
