"""Folders and patterns become lists of traces."""

import json
from pathlib import Path

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler import TraceError
from moe_dualpipe.tools.profiler.reading.paths import trace_paths
from tests.support.traces import kernel, write


def test_traces_of_a_folder_are_sorted_by_rank(tmp_path):
    names = ["rank10.json", "rank2.json", "last.json", "rank_7.pt.trace.json"]
    for name in names:
        write(tmp_path / name, [kernel("gemm", 0, 1)])
    write(tmp_path / "rank99.json", [kernel("gemm", 0, 1)], distributedInfo={"backend": "nccl", "rank": 5})
    (tmp_path / "report.json").write_text(json.dumps({"schedule": [1, 2]}))
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "._rank2.json").write_bytes(b"\x00\x05\x16\x07")
    expected = ["rank2.json", "rank99.json", "rank_7.pt.trace.json", "rank10.json", "last.json"]
    assert [path.name for path in trace_paths([tmp_path])] == expected
    assert [path.name for path in trace_paths([tmp_path / "rank*.json"])] == [*expected[:-1]]
    first = tmp_path / "last.json"
    assert trace_paths([first, tmp_path])[0] == first and len(trace_paths([first, tmp_path])) == 5


def test_one_level_of_folders(tmp_path):
    for rank in (1, 0):
        (tmp_path / f"r{rank}").mkdir()
        write(tmp_path / f"r{rank}" / "trace.json", [kernel("gemm", 0, 1)], distributedInfo={"rank": rank})
    assert [path.parent.name for path in trace_paths([tmp_path])] == ["r0", "r1"]


def test_nothing_to_read(tmp_path, capsys):
    with pytest.raises(TraceError, match="no trace in this folder"):
        trace_paths([tmp_path])
    with pytest.raises(TraceError, match="no trace matches this pattern"):
        trace_paths([tmp_path / "*.json"])
    assert trace_paths([Path("missing.json")]) == [Path("missing.json")]
    assert main(["profile", "analyze", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.zip", "a.tar"])
def test_an_archive_must_be_unpacked(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    assert main(["profile", "analyze", str(tmp_path / name)]) == 2
    message = f"{tmp_path / name}: an archive: unpack it, and name the traces in it"
    assert capsys.readouterr().err == f"moe-dualpipe: error: {message}\n"
