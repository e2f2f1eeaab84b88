"""Damaged Chrome traces: only what is damaged is lost, and the user is told of it. Which files are read."""

import gzip
import json
import random
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.cli import main
from moe_dualpipe.data import strict_json
from moe_dualpipe.tools.profiler import TraceError, read_trace
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.reading import trace_paths
from tests.support.mutations import VALUES, check_message, mutations
from tests.support.traces import annotation, kernel, launch, operator, write

START = '{"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, '
DAMAGED = [
    # the fields of a kernel, and whether the event is used: then with ts 40 and dur 5
    (b'"name": "a\nb\x01", "ts": 40, "dur": 5}', True), (rb'"name": "C:\Users\x", "ts": 40, "dur": 5}', True),
    (b'"name": "a\tb\xff", "ts": 40, "dur": 5}', True), (b'"name": "\xffa", "ts": 40, "dur": 5}', True),
    (b'"name": "a", "ts": 40, "dur": 5, "args": {"s": "\xff", "grid": [1, 2]}}', True),
    (b'"name": "a", "ts": 40,0, "dur": 5,000}', True),
    (b'"name": "1,5 inf", "ts": 40, "dur": 5, "args": {"gb": -inf, "other": nan}}', True),
    (b'"name": "a", "ts": "soon", "dur": 5}', False), (b'"name": "a", "ts": 2, "dur": -5}', False),
    (b'"name": "a", "ts": 1e300, "dur": 5}', False),
]  # fmt: skip
UNREADABLE = [
    (b'"name": "a", "ts": 40, "du', False), (b'"name": "a', False),
    (b'"name": "a", "ts": 40, "dur": 5, "args": {"grid": [1,', False),
    (b'"name": "a", "ts": NaN, "dur": 5}', False), (b'"name": "a", "ts": 2, "dur": inf}', False),
]  # fmt: skip
HEADER = b'"distributedInfo": {"rank": 3}, "host_name": "h"'


def joined(events, header=b'{"traceEvents": [', footer=b"]}"):
    return header + b",\n".join(e if isinstance(e, bytes) else json.dumps(e).encode() for e in events) + footer


def kernels(count):
    return [kernel("gemm", 100 * i, 10 + i) for i in range(count)]


def spans(trace):
    return [(event.start, event.end) for event in trace.device_events]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([None, None, *DAMAGED, *UNREADABLE]), max_size=12),
    st.sampled_from([None, *DAMAGED]), st.integers(0, 3),
)  # fmt: skip
def test_only_what_is_damaged_is_lost(tmp_path_factory, first, last, form):
    """Damage at any place of an object with values before or behind the events, and of a list; compressed or not."""
    drawn, path = [*first, last], tmp_path_factory.mktemp("damage") / "trace.json"
    events = [kernels(20)[i] if one is None else START.encode() + one[0] for i, one in enumerate(drawn)]
    header, footer = [
        (b"[", b"]"), (b"{" + HEADER + b', "traceEvents": [', b"]}"), (b'{"traceEvents": [', b"], " + HEADER + b"}"),
        (b'{ "traceEvents" :\n[ ', b' ] , "traceName": "x"}\n'),
    ][form]  # fmt: skip
    text = joined(events, header, footer)
    path.write_bytes(gzip.compress(text) if form == 1 else text)
    trace = read_trace(path)
    found = [
        (100 * i, 100 * i + 10 + i) if one is None else (40, 45) for i, one in enumerate(drawn) if not one or one[1]
    ]
    assert (spans(trace), trace.num_events, trace.truncated) == (found, len(drawn), False)
    used = [one[1] for one in drawn if one]
    assert (trace.repaired, trace.skipped) == (used.count(True), used.count(False))
    assert (trace.rank, trace.host) == ((3, "h") if form in (1, 2) else (None, ""))


def test_a_file_that_is_cut_off_anywhere_is_read_up_to_there(tmp_path):
    events = kernels(4)
    text, path = joined(events), tmp_path / "trace.json"
    ends = [len(joined(events[: i + 1], footer=b"")) for i in range(4)]
    for size in range(0, len(text), 2):
        path.write_bytes(text[:size])
        complete = sum(end <= size for end in ends)
        if not complete:
            with pytest.raises(TraceError) as refused:
                read_trace(path)
            check_message(refused.value)
            continue
        trace = read_trace(path)
        assert (len(trace.device_events), trace.truncated) == (complete, size < len(text) - 1), size


@pytest.mark.parametrize("pack", [
    lambda text: gzip.compress(text[:150]) + gzip.compress(text[150:]),
    lambda text: gzip.compress(text) + b"\0" * 100,
    lambda text: gzip.compress(text[:1]) + gzip.compress(b"") + gzip.compress(text[1:]),
    lambda text: gzip.compress(text)[:-4],
])  # fmt: skip
def test_gzip_files_of_any_members_lose_nothing(tmp_path, pack):
    (tmp_path / "a.json").write_bytes(text := joined(kernels(9)))
    (tmp_path / "b.json").write_bytes(pack(text))
    assert read_trace(tmp_path / "b.json") == read_trace(tmp_path / "a.json")


def test_a_damaged_gzip_file_is_read_up_to_the_damage(tmp_path, capsys):
    rng, path = random.Random(1), tmp_path / "a.json.gz"
    whole = gzip.compress(joined(kernel(f"gemm{rng.random()}", 10 * i, 5) for i in range(1_000)))
    checksum, half = bytearray(whole), whole[: len(whole) // 2]
    checksum[-8] ^= 1
    for packed, fewest, said in (
        (checksum, 1_000, "its gzip data is damaged"), (half, 450, "the file is cut off: only the first"),
        (half + rng.randbytes(9_999), 200, "its gzip data is damaged"),
    ):  # fmt: skip
        path.write_bytes(packed)
        events = read_trace(path).device_events
        assert [event.start for event in events[:fewest]] == [10.0 * i for i in range(fewest)]
        assert main(["profile", "analyze", str(path)]) == 0
        assert said in capsys.readouterr().err


# ---- What is no trace ----


@pytest.mark.parametrize("content,problem", [
    (b"", "empty, or cut off"), (b"hello", "it begins with b'hello'"), (b'{"a": [1, 2]}', "has no list of events"),
    (b'{"traceEvents": [', "cut off before the first event"), (b'{"traceEvents": []}', "nothing was recorded"),
    (b'{"traceEvents": 3}', "has no list of events"), (b"[1, 2]", "nothing was recorded"),
    (b'[{"name": ' + b"[" * 200_000, "nested too deeply"), (b"\x89PNG\r\n\x1a\n\xff", "it begins with b'"),
    (b"\x1f\x8bnonsense", "its gzip data is damaged"), (gzip.compress(b"[{}]", mtime=0)[:10], "empty, or cut off"),
    (None, "No such file"),
])  # fmt: skip
def test_files_that_are_no_traces_are_refused(tmp_path, capsys, content, problem):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    check_message(refused.value)
    assert str(refused.value).startswith(f"{path}: ") and problem in str(refused.value)
    assert main(["profile", "analyze", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", [
    "cudaLaunchKernel", "hipMemcpyWithStream", "cudaMemsetAsync", "urEnqueueUSMFill", "zeCommandListAppendLaunchKernel",
])  # fmt: skip
def test_launches_without_kernels_are_not_a_cpu(tmp_path, name):
    work = [operator("aten::mm", 0, 10), launch(1, 3, name=name), launch(2, 5, name=name), annotation("F0", 0, 9)]
    with pytest.raises(TraceError, match="no device work was recorded, only 2 launches of it"):
        analyze_files([write(tmp_path / "a.json", work)])


# ---- Every wrong value at every place of a trace: an error of one line, or a report and valid JSON ----


EVENTS = [
    annotation("mlp(F)", 0, 20), launch(1, 5), kernel("gemm", 10, 30, correlation=1), operator("aten::mm", 6, 3),
    kernel("ncclDevKernel", 20, 40, stream=8, correlation=2), launch(2, 8),
]  # fmt: skip
TRACE = {
    "distributedInfo": {"rank": 1}, "deviceProperties": [{"numSms": 132}], "baseTimeNanoseconds": 5_000,
    "host_name": "a", "traceEvents": EVENTS,
}  # fmt: skip


def test_every_wrong_value_in_a_trace_is_refused_or_analyzed(tmp_path):
    path, analyzed = tmp_path / "trace.json", 0
    for _, text in islice(mutations(TRACE, VALUES), 0, None, 13):
        path.write_text(text)
        try:
            found = analyze_files([path])
        except TraceError as error:
            check_message(error)
            assert str(error).startswith(f"{path}: ")
            continue
        analyzed += 1
        report = found.as_text(phases=True)
        assert all(line.isprintable() and len(line) < 1000 for line in report.splitlines())
        strict_json.parse(strict_json.write(objects := found.as_objects()))
        json.dumps(objects, allow_nan=False)  # without replacing anything
    assert analyzed > 40


# ---- Folders and patterns become lists of traces ----


def test_traces_of_a_folder_are_sorted_by_the_numbers_in_their_names(tmp_path):
    """No reports, hidden files or files for Perfetto. Of a folder, one folder after the other, as of two runs."""
    for name in ("rank10.json", "rank2.json", "last.json"):
        write(tmp_path / name, [kernel("gemm", 0, 1)])
    (tmp_path / "rank4.sqlite").touch()
    (tmp_path / "report.json").write_text(json.dumps({"schedule": [1, 2]}))
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "._rank2.json").write_bytes(b"\x00\x05\x16\x07")
    assert main(["profile", "analyze", str(tmp_path / "rank2.json"), "--out", str(tmp_path / "view.json")]) == 0
    expected = ["last.json", "rank2.json", "rank4.sqlite", "rank10.json"]
    assert [path.name for path in trace_paths([tmp_path])] == expected
    assert [path.name for path in trace_paths([tmp_path / "rank*.json"])] == ["rank2.json", "rank10.json"]
    first = tmp_path / "rank10.json"
    assert trace_paths([first, tmp_path])[0] == first and len(trace_paths([first, tmp_path])) == 4
    for run in ("r10", "r9"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        write(tmp_path / "runs" / run / "trace.json", [kernel("gemm", 0, 1)])
    assert [path.parent.name for path in trace_paths([tmp_path / "runs"])] == ["r9", "r10"]


@pytest.mark.parametrize("name,problem", [
    ("", "no trace in this folder"), ("*.json", "no trace matches this pattern"), ("a.tar.gz", "an archive: unpack it"),
    ("a.nsys-rep", "export it with `nsys export --type sqlite`"), ("view.json.gz", "name the recordings that it shows"),
])  # fmt: skip
def test_what_is_not_read_is_refused(tmp_path, name, problem):
    trace = write(tmp_path / "trace.bin", [kernel("gemm", 0, 1)])
    if name == "view.json.gz":
        assert main(["profile", "analyze", str(trace), "--out", str(tmp_path / name)]) == 0
    elif name.startswith("a."):
        (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(TraceError, match=problem) as refused:
        [read_trace(path) for path in trace_paths([tmp_path / name])]
    check_message(refused.value)
    assert str(refused.value).startswith(f"{tmp_path / name}: ")
    assert trace_paths([Path("missing.json")]) == [Path("missing.json")]
