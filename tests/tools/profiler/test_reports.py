"""The report of one device: its account as a table that adds up, causes as sentences, and what they leave."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_dualpipe.tools.profiler import analyze, read_trace
from moe_dualpipe.tools.profiler.account import KINDS, LOST, Total
from moe_dualpipe.tools.profiler.reports.overlap import account_rows
from moe_dualpipe.tools.profiler.reports.verdicts import HEALTHY, verdicts_text
from tests.support.traces import annotation, kernel, launch, write


@pytest.fixture
def analysis(tmp_path):
    """Computation 0-30 and 75-100, a transfer 20-50, a copy 60-65, and the next launch from 68 to 70."""
    events = [
        annotation("mlp(F)", 66, 10), launch(1, 68, duration=2), launch(2, 52, duration=2), kernel("gemm", 0, 30),
        kernel("nccl", 20, 30, stream=9), kernel("Memcpy DtoH", 60, 5, correlation=2, cat="gpu_memcpy"),
        kernel("gemm", 75, 25, correlation=1),
    ]  # fmt: skip
    (found,) = analyze(read_trace(write(tmp_path / "t.json", events)))
    return found


def test_the_rows_of_the_account_add_up_to_the_window(analysis):
    heading, window, *rows = account_rows({"it": analysis}, details=True)
    assert heading == ["", "it, us", "of the window"] and window == ["window", "100", "100.0%"]
    kinds = {name: float(us) for name, us, _ in rows if name in KINDS}
    assert sum(kinds.values()) == 100
    assert kinds == {
        "computation": 55, "copies": 5, "exposed communication": 20, "idle: queued": 11, "idle: launching": 4,
        "idle: Python": 5,
    }  # fmt: skip
    details = [(name, float(us)) for name, us, _ in rows if name.startswith("- ") and "hidden" not in name]
    assert sum(us for _, us in details) == 45 and ("- nccl before mlp(F)", 20) in details
    assert rows[-2][1:] == ["30", "30.0%"] and rows[-1] == ["- hidden behind computation", "10", "10.0%"]


@given(st.lists(st.tuples(st.sampled_from(LOST), st.integers(1, 40)), max_size=6))
def test_nothing_found_is_never_printed_beside_lost_time(tmp_path_factory, lost):
    """More than 1% of the window without an explanation is printed with its three largest places."""
    (analysis,) = analyze(read_trace(write(tmp_path_factory.mktemp("t") / "t.json", [kernel("gemm", 0, 1000)])))
    left = tuple(sorted((Total(kind, f"place {us}", 1, float(us)) for kind, us in lost), key=lambda one: -one.us))
    text = verdicts_text(replace(analysis, unexplained=left))
    shown = replace(analysis, unexplained=left).as_object()["unexplained"]
    assert shown == [{"kind": one.kind, "detail": one.detail, "times": 1, "us": one.us} for one in left]
    if sum(one.us for one in left) < 10:
        assert text == HEALTHY
    else:
        assert text.startswith("Not explained: ") and all(f"{one.kind}, {one.detail} (" in text for one in left[:3])
