"""Folders and patterns become lists of traces."""

import json
from pathlib import Path

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler import TraceError, read_trace
from moe_dualpipe.tools.profiler.reading.paths import trace_paths
from tests.support.mutations import check_message
from tests.support.traces import kernel, write


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
