"""Files for ui.perfetto.dev: all work of all devices on one clock, in rows that the viewer shows as they are."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler.intervals import intervals_of, union, union_length
from moe_dualpipe.tools.profiler.pictures.lanes import save_lanes
from tests.support.pictures import picture
from tests.support.traces import kernel, write

works = st.tuples(
    st.sampled_from(["a", "ncclA", "Memcpy HtoD"]), st.integers(0, 40), st.integers(0, 9),
    st.sampled_from(["", "mlp(F)"]), st.sampled_from("123"),
).map(lambda one: (one[0], one[1] / 3, (one[1] + one[2]) / 3, *one[3:]))  # fmt: skip


def saved(path, *pictures):
    """The file's processes: name and rows, each a title and slices in ns (start, end, name, args), in their order."""
    save_lanes(pictures, path)
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    events = json.loads(text, parse_constant=pytest.fail)["traceEvents"]
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    rows: dict[tuple[int, int], list[tuple[int, int, str, dict]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            start = round(e["ts"] * 1e3)
            rows[e["pid"], e["tid"]].append((start, start + round(e["dur"] * 1e3), e["name"], e["args"]))
    found = []
    for process in sorted({e["pid"] for e in events}):
        own = sorted((k for k in rows if k[0] == process), key=lambda k: names[*k, "thread_sort_index"]["sort_index"])
        titled = [(names[*key, "thread_name"]["name"], rows[key]) for key in own]
        found.append((names[process, 0, "process_name"]["name"], titled))
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(works, max_size=12), st.integers(0, 50)), min_size=1, max_size=3))
def test_all_work_is_in_rows_without_overlap_and_times_add_up(tmp_path_factory, devices):
    pictures = [picture(*own, shift=by / 7, title=f"rank {i}") for i, (own, by) in enumerate(devices)]
    found = saved(tmp_path_factory.mktemp("view") / "view.json", *pictures)
    assert [name for name, _ in found] == [picture.title for picture in pictures]
    for shown, (own, by), (_, rows) in zip(pictures, devices, found, strict=True):
        for _, slices in rows:
            assert all(end <= start for (_, end, *_), (start, *_) in pairwise(slices))

        def ns(time, by=by / 7):
            return round((time + by) * 1e3)

        streams = sorted((title, *one[:3]) for title, slices in rows if title.startswith("stream ") for one in slices)
        assert streams == sorted((f"stream {stream}", ns(a), ns(b), name) for name, a, b, _, stream in own)
        times = dict.fromkeys(("hidden", "exposed"), 0.0)
        for start, end, name, _ in (one for title, slices in rows if title == "communication" for one in slices):
            times[name] += (end - start) / 1e3
        tolerance = 2e-3 * len(own) + 1e-3
        sending = union_length(union(intervals_of(one.event for one in shown.of_kind("comm"))))
        assert sum(times.values()) == pytest.approx(sending, abs=tolerance)
        exposed = sum(entry.us for entry in shown.account if entry.kind == "exposed communication")
        assert times["exposed"] == pytest.approx(exposed, abs=tolerance)


def test_an_account_causes_and_phases_are_rows(tmp_path):
    """Causes count from the start of the first event, as a trace does not begin at 0."""
    shown = picture(("a", 5, 9, "mlp(F)"), ("b", 10, 14, "mlp(F)"), ("c", 14, 17, "attn(B)"), shift=95.0)
    cause: Any = SimpleNamespace(kind="imbalance", title="Late.", evidence=("a",), remedy="balance", start_us=3,
                                 end_us=5, cost_us=7, gain_us=2)  # fmt: skip
    ((_, rows),) = saved(tmp_path / "view.json.gz", replace(shown, verdicts=[cause]))
    spans = [(one.start_us, one.end_us) for one in shown.account]
    assert rows[0][0] == "account" and [one[:2] for one in rows[0][1]] == [
        (round((a + 95) * 1e3), round((b + 95) * 1e3)) for a, b in spans
    ]
    assert rows[0][1][0][2:] == ("computation", {"detail": shown.account[0].detail})
    facts = {"kind": "imbalance", "evidence": ["a"], "what to change": "balance", "time, us": 7, "gain, us": 2}
    assert rows[1] == ("causes", [(103_000, 105_000, "Late.", facts)])
    assert rows[2] == (
        "computation, phases", [(100_000, 109_000, "mlp(F)", {}), (109_000, 112_000, "attn(B)", {})]
    )  # fmt: skip


def test_the_file_is_never_one_of_the_traces(tmp_path, capsys):
    path = write(tmp_path / "rank0.json", [kernel("gemm", 0, 1)])
    before = path.read_bytes()
    assert main(["profile", "analyze", str(tmp_path), "--out", f"{tmp_path}/../{tmp_path.name}/rank0.json"]) == 2
    err = capsys.readouterr().err
    assert "is one of the traces: choose another name" in err and err.count("\n") == 1 and path.read_bytes() == before
