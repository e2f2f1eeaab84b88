"""Files for ui.perfetto.dev: all work of all devices on one clock, in rows that the viewer shows as they are."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler.intervals import union_length
from moe_dualpipe.tools.profiler.pictures.lanes import save_lanes
from moe_dualpipe.tools.profiler.pictures.picture import Picture, Slice
from tests.support.lanes import Work, lanes_of
from tests.support.traces import annotation, kernel, launch, write

times = st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda one: (one[0] / 3, (one[0] + one[1]) / 3))
works = st.builds(
    lambda name, time, lane, stream, phase: Work(name, time[0], time[1], lane, phase, stream=stream),
    st.sampled_from("abc"), times, st.integers(0, 2), st.sampled_from("123"), st.sampled_from(["", "mlp(F)"]),
)  # fmt: skip


def saved(path, *pictures):
    """The file's processes: name, rows (title and slices in ns: start, end, name, args) and memory, in their order."""
    save_lanes(pictures, path)
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    events = json.loads(text, parse_constant=pytest.fail)["traceEvents"]
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    rows, memory = defaultdict(list), defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            start = round(e["ts"] * 1e3)
            rows[e["pid"], e["tid"]].append((start, start + round(e["dur"] * 1e3), e["name"], e["args"]))
        elif e["ph"] == "C":
            memory[e["pid"]].append((e["ts"], *e["args"].values()))
    assert len({tid for _, tid in rows}) == len(rows)
    found = []
    for process in sorted({e["pid"] for e in events}):
        own = sorted(
            (key for key in rows if key[0] == process), key=lambda k: names[*k, "thread_sort_index"]["sort_index"]
        )
        titled = [(names[*key, "thread_name"]["name"], rows[key]) for key in own]
        found.append((names[process, 0, "process_name"]["name"], titled, memory[process]))
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(works, max_size=12), st.integers(0, 50)), min_size=1, max_size=3))
def test_all_work_is_in_rows_without_overlap_and_times_add_up(tmp_path_factory, devices):
    pictures = [Picture(f"rank {i}", lanes_of(*own), shift / 7) for i, (own, shift) in enumerate(devices)]
    found = saved(tmp_path_factory.mktemp("view") / "view.json", *pictures)
    assert [name for name, _, _ in found] == [picture.title for picture in pictures]
    for picture, (own, _), (_, rows, _) in zip(pictures, devices, found, strict=True):
        for _, slices in rows:
            assert all(end <= start for (_, end, *_), (start, *_) in pairwise(slices))

        def ns(time, shift=picture.shift_us):
            return round((time + shift) * 1e3)

        shown = sorted((title, *one[:3]) for title, slices in rows if title.startswith("stream ") for one in slices)
        assert shown == sorted((f"stream {w.stream}", ns(w.start), ns(w.end), w.name) for w in own)
        lanes, tolerance = picture.lanes, 2e-3 * len(own) + 1e-3
        slices = [one for name, slices in rows if name == "communication" for one in slices]
        assert {name for *_, name, _ in slices} <= {"hidden", "exposed"}
        whole = sum(end - start for start, end, *_ in slices) / 1e3
        assert whole == pytest.approx(union_length(lanes.busy(lanes.lane == 1)), abs=tolerance)
        exposed = sum(end - start for start, end, name, _ in slices if name == "exposed") / 1e3
        assert exposed == pytest.approx(union_length(lanes.exposed), abs=tolerance)


def test_an_account_causes_memory_and_phases_are_rows(tmp_path):
    lanes = lanes_of(
        Work("a", 0, 4, phase="mlp(F)"), Work("b", 5, 9, phase="mlp(F)"), Work("c", 9, 12, phase="attn(B)"),
        memory=((1.0, 5.0, 8.0), (2.0, 6.0, 8.0)),
    )  # fmt: skip
    account = [Slice(0, 7, "waiting for a rank", {"detail": "dispatch(F)"}), Slice(7, 12, "computation")]
    cause: Any = SimpleNamespace(
        kind="imbalance",
        title="Late.",
        evidence=("a", "b"),
        remedy="balance",
        start_us=3,
        end_us=5,
        cost_us=7,
        gain_us=2,
    )
    picture = Picture("one", lanes, 100.0, [cause], account)
    ((_, rows, memory),) = saved(tmp_path / "view.json.gz", picture)
    assert rows[0] == ("account", [(100_000, 107_000, "waiting for a rank", {"detail": "dispatch(F)"}),
                                   (107_000, 112_000, "computation", {})])  # fmt: skip
    facts = {"kind": "imbalance", "evidence": ["a", "b"], "what to change": "balance", "time, us": 7, "gain, us": 2}
    assert rows[1] == ("causes", [(103_000, 105_000, "Late.", facts)])
    assert rows[2] == (
        "computation, phases", [(100_000, 109_000, "mlp(F)", {}), (109_000, 112_000, "attn(B)", {})]
    )  # fmt: skip
    assert memory == [(101.0, 5, 8), (102.0, 6, 8)]


def test_the_command_writes_what_the_trace_says_of_each_rank(tmp_path):
    """Rank 0 starts 30 us later, on the clock of the host."""
    for rank in range(2):
        transfer = kernel("ncclDevKernel_SendRecv", 20, 900, 9, 2)
        transfer["args"] |= {"Collective name": "all_to_allv", "Group size": 2, "In msg nelems": 640, "dtype": "Float"}
        copy = kernel("Memcpy DtoH", 2, 3, 7, cat="gpu_memcpy")
        copy["args"]["bytes"] = 64
        events = [annotation("mlp(W)", 0, 1), launch(1, 0), launch(2, 4), copy, transfer]
        work = [kernel("gemm", 10 * i, 9, correlation=1) for i in (1, 93, 94)]
        write(tmp_path / f"rank{rank}.json", [*events, *work], host_name="h", baseTimeNanoseconds=30_000 * (1 - rank),
              distributedInfo={"rank": rank, "world_size": 2})  # fmt: skip
    out = tmp_path / "view.json"
    assert main(["profile", "analyze", str(tmp_path), "--out", str(out)]) == 0
    events = json.loads(out.read_bytes())["traceEvents"]
    assert [e["args"]["name"][:7] for e in events if e["name"] == "process_name"] == ["rank 0:", "rank 1:"]
    transfers = [e for e in events if e["name"] == "ncclDevKernel_SendRecv"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in transfers] == [(1, 48.0, 900.0), (2, 18.0, 900.0)]
    facts = {
        "category": "communication",
        "phase": "all_to_allv",
        "name": "all_to_allv",
        "size": 2,
        "in_elems": 640,
        "dtype": "Float",
    }
    assert transfers[0]["args"] == facts
    (copied, _) = (e["args"] for e in events if e["name"] == "Memcpy DtoH")
    assert (copied["category"], copied["bytes"]) == ("copy", 64)
    assert [e["args"]["phase"] for e in events if e["name"] == "gemm"] == ["mlp(W)"] * 6


def test_the_file_is_never_one_of_the_traces(tmp_path, capsys):
    path = write(tmp_path / "rank0.json", [kernel("gemm", 0, 1)])
    before = path.read_bytes()
    assert main(["profile", "analyze", str(tmp_path), "--out", f"{tmp_path}/../{tmp_path.name}/rank0.json"]) == 2
    err = capsys.readouterr().err
    assert "is one of the traces: choose another name" in err and err.count("\n") == 1 and path.read_bytes() == before
