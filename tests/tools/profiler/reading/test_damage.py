"""Traces with exactly one kind of damage each: only what is damaged is lost, and the user is told of it."""

import gzip
import json
import random

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler import TraceError, analyze, read_trace
from moe_dualpipe.tools.profiler.files import analyze_files
from tests.support.traces import annotation, kernel, launch, operator, write

DAMAGED = [
    # the damaged event, whether it is used, what is told
    (b'{"ph": "X", "cat": "kernel", "name": "a\nb", "ts": 40, "dur": 5, "pid": 0, "tid": 7}', True,
     "control characters"),
    (rb'{"ph": "X", "cat": "kernel", "name": "C:\Users\x", "ts": 40, "dur": 5, "pid": 0, "tid": 7}', True,
     "invalid escapes"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": 40, "dur": 5,0, "pid": 0, "tid": 7}', True, "decimal commas"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": 40,0, "dur": 5,000, "pid": 0, "tid": 7}', True,
     "decimal commas"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": 40, "dur": 5, "pid": 0, "tid": 7, "args": {"gb": inf}}', True,
     "inf or nan"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": 40, "dur": 5, "pid": 0, "tid": 7, "args": {"gb": -nan}}', True,
     "inf or nan"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": 40, "dur": 5, "pid": 0, "tid": 7, "args": {"s": "\xff"}}', True,
     "invalid UTF-8"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": 40, "dur": inf, "pid": 0, "tid": 7}', False, "inf or nan"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": -inf, "dur": 5, "pid": 0, "tid": 7}', False, "inf or nan"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": "soon", "dur": 5, "pid": 0, "tid": 7}', False, "no valid time"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": 2, "dur": -5, "pid": 0, "tid": 7}', False, "no valid time"),
    (b'{"ph": "X", "cat": "kernel", "name": "a\xff", "ts": 40, "dur": 5, "pid": 0, "tid": 7}', False, "invalid UTF-8"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": 40, "du', False, "incomplete or not JSON"),
    (b'{"ph": "X", "cat": "kernel", "name": "a', False, "incomplete or not JSON"),
    (b'{"ph": "X", "cat": "kernel", "name": "a", "ts": 40, "dur": 5, "pid": 0, "args": {"grid": [1,', False,
     "incomplete or not JSON"),
]  # fmt: skip
GOOD = [kernel("gemm", 0, 10), kernel("ncclDevKernel_AllReduce", 5, 20, stream=9), kernel("gemm", 60, 10)]


def joined(events, header=b'{"schemaVersion": 1, "traceEvents": [', footer=b"]}"):
    return header + b",\n".join(e if isinstance(e, bytes) else json.dumps(e).encode() for e in events) + footer


def analyses(path):
    return analyze(read_trace(path))


@pytest.mark.parametrize("text,is_used,what", DAMAGED)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_damaged_event(tmp_path, capsys, text, is_used, what, at):
    path = tmp_path / "damaged.json"
    path.write_bytes(joined([*GOOD[:at], text, *GOOD[at:]]))
    trace = read_trace(path)
    used = [kernel("", 40, 5)] if is_used else []
    expected = read_trace(write(tmp_path / "good.json", [*GOOD[:at], *used, *GOOD[at:]]))
    assert [(e.start, e.end) for e in trace.device_events] == [(e.start, e.end) for e in expected.device_events]
    assert (dict(trace.repaired), dict(trace.skipped)) == (({what: 1}, {}) if is_used else ({}, {what: 1}))
    assert (trace.num_events, trace.truncated) == (4, False)
    assert main(["profile", "analyze", str(path)]) == 0
    done = "repaired" if is_used else "skipped"
    assert capsys.readouterr().err == f"{path}: 1 damaged event {done} (1 {what})\n"


@pytest.mark.parametrize("text,is_used,what", DAMAGED)
def test_a_damaged_last_event(tmp_path, text, is_used, what):
    path = tmp_path / "damaged.json"
    path.write_bytes(joined([*GOOD, text]))
    trace = read_trace(path)
    assert len(trace.device_events) == 3 + is_used
    if text.endswith(b"[1,"):  # its own list seems to end, and the file to be cut off
        assert trace.truncated and not trace.skipped
    else:
        assert (dict(trace.repaired), dict(trace.skipped)) == (({what: 1}, {}) if is_used else ({}, {what: 1}))
        assert (trace.truncated, trace.num_events) == (False, 4)
    path.write_bytes(joined([*GOOD, text], footer=b'], "traceName": "x", "distributedInfo": {"rank": 3}}'))
    assert text.endswith(b"[1,") or (read_trace(path).rank, read_trace(path).truncated) == (3, False)


@pytest.mark.parametrize("end", [b"", b"]", b"]}", b', "x": [1], "y": 2', b'"}'])
def test_a_file_that_is_cut_off_inside_its_last_event(tmp_path, end):
    path = tmp_path / "cut.json"
    path.write_bytes(joined(GOOD, footer=b', {"ph": "X", "cat": "kernel", "args": {"grid": [1, 1, 1') + end)
    trace = read_trace(path)
    assert trace.truncated and len(trace.device_events) == 3 and not trace.skipped


def test_damage_at_random_leaves_out_exactly_the_damaged_events(tmp_path, monkeypatch):
    rng = random.Random(5)
    skipped = [text for text, is_used, _ in DAMAGED if not is_used]
    for case in range(12):
        events = []
        for i in range(40):
            events += [launch(i, 10 * i), kernel(rng.choice(["gemm", "ncclDevKernel_SendRecv"]), 10 * i + 3,
                                                 rng.randint(1, 30), rng.choice([7, 9]), i)]  # fmt: skip
        damaged = set(rng.sample(range(len(events) - 1), rng.randint(1, 20)))
        whole = [event for i, event in enumerate(events) if i not in damaged]
        monkeypatch.setattr("moe_dualpipe.tools.profiler.reading.pieces.CHUNK", rng.choice([1 << 20, 50, 333]))
        path = tmp_path / f"{case}.json"
        path.write_bytes(joined([rng.choice(skipped) if i in damaged else e for i, e in enumerate(events)]))
        trace = read_trace(path)
        assert trace.skipped.total() == len(damaged)
        assert analyze(trace) == analyses(write(tmp_path / "whole.json", whole))


def test_values_as_texts(tmp_path):
    events = [launch(3, 1), kernel("gemm", 5, 10, correlation=3)]
    texts = [event | {"ts": str(event["ts"]) + ".0", "dur": str(event["dur"])} for event in events]
    texts[0]["args"] = {"correlation": "3"}
    texts[1]["args"] = {**kernel("", 0, 0)["args"], "correlation": "3"}
    assert read_trace(write(tmp_path / "a.json", texts)) == read_trace(write(tmp_path / "b.json", events))


@pytest.mark.parametrize("change", [
    lambda text: b"\xef\xbb\xbf" + text,
    lambda text: text.decode().encode("utf-16"),
    lambda text: gzip.compress(text[:150]) + gzip.compress(text[150:]),
    lambda text: gzip.compress(text) + b"\0" * 100,
    lambda text: gzip.compress(text[:150]) + b"\0" * 100 + gzip.compress(text[150:]),
    lambda text: gzip.compress(text[:1]) + gzip.compress(b"") + gzip.compress(text[1:]),
])  # fmt: skip
def test_encodings_and_members_lose_nothing(tmp_path, change):
    text = joined(GOOD)
    (tmp_path / "a.json").write_bytes(text)
    (tmp_path / "b.json").write_bytes(change(text))
    assert read_trace(tmp_path / "b.json") == read_trace(tmp_path / "a.json")


def test_a_damaged_gzip_file_is_read_up_to_the_damage(tmp_path, capsys):
    rng = random.Random(1)
    events = [kernel(f"gemm{rng.random()}", 10 * i, 5) for i in range(2000)]
    packed = bytearray(gzip.compress(joined(events)))
    packed[-8] ^= 1  # of the checksum
    path = tmp_path / "a.json.gz"
    path.write_bytes(packed)
    assert len(read_trace(path).device_events) == 2000
    assert main(["profile", "analyze", str(path)]) == 0
    assert capsys.readouterr().err == f"{path}: its gzip data is damaged\n"
    path.write_bytes(packed[: len(packed) // 2])
    trace = read_trace(path)
    assert trace.truncated and 800 < len(trace.device_events) < 1200
    assert [e.start for e in trace.device_events] == [10.0 * i for i in range(len(trace.device_events))]


def test_metadata_behind_the_events(tmp_path):
    more = b'"distributedInfo": {"rank": 3, "world_size": 8, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}, ' \
           b'"deviceProperties": [{"numSms": 132}], "baseTimeNanoseconds": 5000, "host_name": "h"'  # fmt: skip
    texts = [
        joined(GOOD, b"{" + more + b', "traceEvents": ['),
        joined(GOOD, b'{"traceEvents": [', b"], " + more + b"}"),
    ]
    found = []
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.json").write_bytes(text)
        found.append(read_trace(tmp_path / f"{i}.json"))
    assert found[0] == found[1]
    assert (found[1].rank, found[1].world_size, found[1].groups) == (3, 8, {"0": (0, 1)})
    assert (found[1].num_sms, found[1].base_us, found[1].host) == (132, 5.0, "h")


@pytest.mark.parametrize("odd", [kernel("gemm", 4.4e12, 5), kernel("gemm", -4.4e12, 5), kernel("gemm", 50, 4.4e12)])
def test_one_event_far_away_in_time(tmp_path, capsys, odd):
    events = [kernel("gemm", 10 * i, 5) for i in range(20)]
    path = write(tmp_path / "a.json", [*events[:7], odd, *events[7:]])
    assert analyses(path) == analyses(write(tmp_path / "b.json", events))
    assert main(["profile", "analyze", str(path)]) == 0
    assert capsys.readouterr().err == f"{path}: 1 damaged event skipped (1 far from all others in time)\n"


def test_work_of_a_second_long_phase_is_no_outlier(tmp_path):
    events = [kernel("gemm", 10 * i + (i >= 15) * 4.4e12, 5) for i in range(20)]
    trace = read_trace(write(tmp_path / "a.json", events))
    assert len(trace.device_events) == 20 and not trace.skipped


@pytest.mark.parametrize("name", [
    "cudaLaunchKernel", "hipMemcpyWithStream", "cudaMemsetAsync", "urEnqueueUSMFill", "zeCommandListAppendLaunchKernel",
    "runFunction - job_prep_and_submit_for_execution",
])  # fmt: skip
def test_launches_without_kernels_are_not_a_cpu(tmp_path, capsys, name):
    work = [operator("aten::mm", 0, 10), launch(1, 3, name=name), launch(2, 5, name=name), annotation("F0", 0, 9)]
    path = write(tmp_path / "a.json", work)
    with pytest.raises(TraceError, match="no device work was recorded, only 2 launches of it"):
        analyze_files([path])
    assert main(["profile", "analyze", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_unneeded_events_are_not_damage(tmp_path):
    python = operator("train.py(3): step", 0, 9) | {"cat": "python_function"}
    arrow = {"ph": "s", "id": 3, "pid": 1, "tid": 2, "ts": 3, "cat": "ac2g", "name": "ac2g"}
    unneeded = [{"ph": "X", "cat": "python_function", **python}, arrow, arrow, {"name": "n", "ph": "M", "args": {}}]
    trace = read_trace(write(tmp_path / "a.json", [*unneeded, GOOD[0], *unneeded, *GOOD[1:], *unneeded]))
    assert (trace.num_events, len(trace.device_events)) == (15, 3)
    assert not (trace.repaired or trace.skipped or trace.truncated)


@pytest.mark.parametrize("category", ["xpu_runtime", "xpu_driver", "hip_runtime", "cuda_driver", "mtia_runtime"])
def test_launches_of_all_runtimes(tmp_path, category):
    events = [kernel("gemm", 5, 10, correlation=3), launch(3, 1) | {"cat": category}]
    assert read_trace(write(tmp_path / "a.json", events)).launches[3].start == 1


def test_work_of_mtia(tmp_path):
    run = kernel("", 5, 10, correlation=3, cat="mtia_ccp_events") | {"name": "job_run"}
    copy = run | {"name": "dma_request", "args": {"size": 64}}
    others = [run | {"name": "event_record"}, run | {"name": "event_wait"}]
    trace = read_trace(write(tmp_path / "a.json", [run, *others, copy]))
    assert [(e.name, e.category, e.bytes) for e in trace.device_events] == [
        ("job_run", "kernel", 0), ("dma_request", "gpu_memcpy", 64),
    ]  # fmt: skip
    assert len(trace.stream_waits) == 1


def test_the_numbers_of_damaged_events_are_in_the_json(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_bytes(joined([*GOOD, DAMAGED[0][0], DAMAGED[7][0], DAMAGED[7][0], GOOD[0]]))
    assert main(["profile", "analyze", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["damage"]
    assert found == {"skipped": {"inf or nan": 2}, "repaired": {"control characters": 1}, "notes": []}
