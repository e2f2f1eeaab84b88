"""Tables of an analysis."""

from dataclasses import replace

from moe_dualpipe.tools.profiler import analyze, read_trace
from moe_dualpipe.tools.profiler.gaps import Wait
from moe_dualpipe.tools.profiler.reports.overlap import analysis_text, overview_rows
from tests.support.traces import kernel, write


def test_shares_of_the_window_and_the_sum_of_the_shortest_waits(tmp_path):
    events = [kernel("gemm", 0, 30), kernel("nccl", 20, 30, stream=9), kernel("gemm", 75, 25)]
    (analysis,) = analyze(read_trace(write(tmp_path / "t.json", events)))
    assert overview_rows({"it": analysis}, in_window=True)[1:] == [
        ["window", "100", "100.0%"], ["busy", "75", "75.0%"], ["computation", "55", "55.0%"],
        ["communication", "30", "30.0%"], ["- hidden behind computation", "10", "10.0%"],
        ["- exposed", "20", "20.0%"], ["idle", "25", "25.0%"],
    ]  # fmt: skip
    waits = tuple(Wait(f"during {i}", "next", 2, 100 - i, 10 + i) for i in range(11))
    rows = [row.split("|") for row in analysis_text(replace(analysis, waits=waits)).splitlines()]
    others = next(row for row in rows if row[1:2] == [" 3 more                  "])
    assert [cell.strip() for cell in others[2:-1]] == ["", "6", "273", "57"]
