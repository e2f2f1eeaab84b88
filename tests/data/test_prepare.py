"""Preparing data in several processes: the same files whatever their number, also after a kill."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.data import Progress, duplicates, engines, journal, prepare, prepare_data, text_files
from moe_dualpipe.data import work_units as parts
from moe_dualpipe.data.documents import Documents
from moe_dualpipe.data.rows import TEXT
from moe_dualpipe.data.work_units import SourceFile, WholeFiles, WorkUnitReader, divide
from tests.support.runs import ROOT

PART = 2000  # bytes of text in a part


def words(seed: int, number: int) -> str:
    random = np.random.default_rng(seed)
    return "".join(f"{'grün' if n % 7 == 0 else n}{' ' if n % 5 else chr(10)}" for n in random.integers(0, 999, number))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """45 files of text, one of them in three blocks, and 90 rows in two .jsonl files, with copies among them."""
    root = tmp_path_factory.mktemp("source")
    for i in range(44):
        (root / f"{i:02}.txt").write_text(words(i % 40, 20 + 3 * (i % 40)))
    (root / "30-long.txt").write_text(words(99, 3000) * 180)
    for name, first in (("a.jsonl", 100), ("z.jsonl", 20)):
        rows = [json.dumps({"text": words(first + i % 40, 30 + i % 40)}) + "\n" * (1 + i % 3) for i in range(45)]
        (root / name).write_text("".join(rows))
    return root


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(source: Path, out: Path, tokenizer: str = "bytes", **options) -> Progress:
    progress = Progress()
    prepare_data([str(source)], out, tokenizer, 300, "text", part_bytes=PART, progress=progress, **options)
    return progress


@pytest.fixture(scope="module")
def alone(source, tmp_path_factory) -> dict[str, bytes]:
    """What one process writes."""
    out = tmp_path_factory.mktemp("alone") / "out"
    run(source, out)
    return files_in(out)


@pytest.fixture
def without_delay(monkeypatch):
    monkeypatch.setattr(prepare, "SMALL", 0)  # start processes for a short text, too
    monkeypatch.setattr(journal, "INTERVAL", 0)
    monkeypatch.setattr(journal.os, "fsync", lambda _: None)


def test_parts_do_not_change_what_is_written(source, alone, tmp_path):
    progress = Progress()
    prepare_data([str(source)], tmp_path / "out", "bytes", 300, "text", progress=progress)
    assert files_in(tmp_path / "out") == alone
    assert progress.parts < 10
    assert progress.tokens == sum(len(alone[f"{side}.bin"]) for side in ("train", "held_out"))


@pytest.mark.usefixtures("without_delay")
@pytest.mark.quick("bytes-2")
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_any_number_of_workers_writes_the_same_files(source, alone, tmp_path, tokenizer, workers):
    if tokenizer == "bpe":
        run(source, tmp_path / "one", "bpe")
    progress = run(source, tmp_path / "out", tokenizer, workers=workers)
    assert files_in(tmp_path / "out") == (alone if tokenizer == "bytes" else files_in(tmp_path / "one"))
    assert progress.parts > 20


@pytest.mark.parametrize("block_bytes", [1, 2, 7, 64, 1 << 20])
def test_the_parts_of_a_file_have_its_chunks(tmp_path, monkeypatch, block_bytes):
    for module in (parts, text_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    (tmp_path / "a").write_text("grün\n\n🜁🜁🜁 ohne Zeilenende \r\n" * 3 + "你" * 9 + "\n")
    (tmp_path / "b").write_text("x")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n {"text": "grün"}')
    documents = Documents.find(str(tmp_path))
    files = [SourceFile(*file) for file in documents.files.items()]
    expected = list(documents)
    for part_bytes in (1, 3, 20, 1 << 20):
        reader, found, rows = WorkUnitReader(TEXT), [], 0
        for part in divide(files, [], part_bytes):
            found += reader.chunks(part)
            rows += reader.rows
        assert found == expected
        assert rows == 5
    assert isinstance(next(divide(files, [], 1 << 20)), WholeFiles) or block_bytes < 200


KILLED = """
import os, signal, sys
from pathlib import Path
from moe_dualpipe.data import engines, journal, prepare, prepare_data
prepare.SMALL, journal.INTERVAL = 0, 0
append, start, left = prepare._append, engines._Process.__init__, iter(range(9))
def append_or_die(*arguments):
    append(*arguments)
    if next(left, None) is None:  # written, but not in the journal
        arguments[0].train.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0
def start_and_tell(worker):
    start(worker)
    print(worker.process.pid, flush=True)
prepare._append, engines._Process.__init__ = append_or_die, start_and_tell
prepare_data([sys.argv[1]], Path(sys.argv[2]), "bytes", 300, "text", workers=2, part_bytes=int(sys.argv[3]))
"""


def test_after_a_kill_the_same_call_continues_and_no_worker_is_left(source, alone, tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    arguments = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), str(PART)]
    killed = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL
    pids = [int(line) for line in killed.stdout.split()]
    for _ in range(1000):
        if not any(is_running(pid) for pid in pids):
            break
        time.sleep(0.02)
    assert len(pids) == 2 and not any(is_running(pid) for pid in pids)
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    progress = run(source, tmp_path / "out")
    assert progress.parts_before == 9
    assert files_in(tmp_path / "out") == alone
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("without_delay")
def test_a_killed_worker_is_one_error_and_the_same_call_continues(source, alone, tmp_path, monkeypatch):
    started, append = [], prepare._append
    start = engines._Process.__init__
    monkeypatch.setattr(engines._Process, "__init__", lambda worker: started.append(worker) or start(worker))

    def append_and_kill(*arguments):
        for worker in started:
            worker.process.kill()
        return append(*arguments)

    monkeypatch.setattr(prepare, "_append", append_and_kill)
    message = "^a worker process was killed by SIGKILL; if memory is short, use fewer --workers$"
    with pytest.raises(ChildProcessError, match=message):
        run(source, tmp_path / "out", workers=2)
    assert len(started) == 2 and all(worker.process.poll() is not None for worker in started)
    monkeypatch.setattr(prepare, "_append", append)
    progress = run(source, tmp_path / "out")
    assert 0 < progress.parts_before < progress.parts
    assert files_in(tmp_path / "out") == alone


@pytest.mark.usefixtures("without_delay")
def test_an_invalid_row_is_named_and_only_what_follows_is_encoded_again(tmp_path, capsys, monkeypatch):
    rows = [json.dumps({"text": words(i, 30)}) for i in range(80)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(rows))
    (tmp_path / "b.jsonl").write_text("\n".join([*rows[:61], "{", *rows[61:]]))
    source, out = tmp_path / "?.jsonl", tmp_path / "out"
    monkeypatch.setattr(prepare.prepare_data, "__kwdefaults__", prepare_data.__kwdefaults__ | {"part_bytes": PART})
    command = ["data", "prepare", str(source), "--out", str(out), "--tokenizer", "bytes", "--workers", "1"]
    for _ in range(2):  # the second call continues, and comes to the same error
        assert main(command) == 2
        progress, error = capsys.readouterr().err.splitlines()
        assert re.fullmatch(r"\d+ of \d+ parts finished; the same command continues there", progress)
        assert error == (
            f"moe-dualpipe: error: {tmp_path}/b.jsonl:62: not JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)"
        )
    (tmp_path / "b.jsonl").write_text(rows[0])
    assert main(command) == 0
    assert re.match(r"continued after \d+ of \d+ parts\n", capsys.readouterr().out)
    run(source, tmp_path / "fresh")
    assert files_in(out) == files_in(tmp_path / "fresh")


@pytest.mark.usefixtures("without_delay")
def test_another_job_starts_anew(source, tmp_path, monkeypatch):
    source /= "*.jsonl"
    append, calls = prepare._append, []

    def fail(*arguments):
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        calls.append(arguments)
        return append(*arguments)

    def fail_then(out, **changes):
        calls.clear()
        monkeypatch.setattr(prepare, "_append", fail)
        with pytest.raises(OSError, match="No space left"):
            run(source, tmp_path / out)
        monkeypatch.setattr(prepare, "_append", append)
        return run(changes.pop("source", source), tmp_path / out, **changes).parts_before

    assert fail_then("same") == 5
    run(source.with_name("a.jsonl"), tmp_path / "bpe", "bpe")
    assert fail_then("other-tokenizer", tokenizer=str(tmp_path / "bpe" / "tokenizer.json")) == 0
    assert fail_then("other-source", source=source.with_name("z.jsonl")) == 0
    assert fail_then("other-rule", drop_duplicates=True) == 0
    run(source, tmp_path / "rule", drop_duplicates=True)
    assert files_in(tmp_path / "rule") == files_in(tmp_path / "other-rule")


@pytest.mark.quick("1")
@pytest.mark.parametrize("workers", [1, 3])
def test_of_equal_documents_only_the_first_is_written(source, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(prepare, "SMALL", 0)
    monkeypatch.setattr(duplicates, "BUCKET", 7)
    monkeypatch.setattr(duplicates, "READ_BYTES", 160)
    (tmp_path / "again.txt").write_text((source / "30-long.txt").read_text())
    texts: dict[str, None] = {}
    for chunk in chunks_of(source):
        texts.setdefault(chunk)
    (tmp_path / "first").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "first" / f"{i:03}").write_text(text)
    progress = Progress()
    sources = [str(source), str(tmp_path / "again.txt"), str(source / "?.jsonl")]
    options = {"part_bytes": PART, "workers": workers, "progress": progress}
    prepare_data(sources, tmp_path / "out", "bytes", 300, "text", drop_duplicates=True, **options)
    assert progress.duplicates == 4 + 5 + 5 + 1  # files, rows of a.jsonl and of z.jsonl, the copy of the long file
    run(tmp_path / "first", tmp_path / "expected")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "expected")


def chunks_of(source: Path) -> list[str]:
    """The documents, each as one string."""
    texts, parts_of_one = [], []
    for chunk in Documents.find(str(source)):
        parts_of_one.append(chunk.text)
        if chunk.ends_document:
            texts.append("".join(parts_of_one))
            parts_of_one = []
    return texts


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.usefixtures("without_delay")
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_ray_writes_the_same_files(source, tmp_path, monkeypatch, tokenizer):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    options = {"tokenizer": tokenizer, "drop_duplicates": True}
    run(source, tmp_path / "one", **options)
    run(source, tmp_path / "out", engine="ray", workers=2, **options)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "one")
    (source.with_name("bad.jsonl")).write_text('{"text": "some words"}\n' * 999 + "{\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:1000: not JSON: "):
        run(source.with_name("bad.jsonl"), tmp_path / "bad", engine="ray", workers=2)


def test_ray_that_is_not_installed_is_one_line(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"^--engine ray needs the ray library: pip install 'moe-dualpipe\[ray\]'$"):
        run(source, tmp_path / "out", engine="ray")
    assert not list(tmp_path.iterdir())


def test_files_on_another_machine_have_other_inodes(source, tmp_path):
    parts_here = list(divide([SourceFile(*f) for f in Documents.find(str(source)).files.items()], [], PART))
    shutil.copytree(source, tmp_path / "there")
    moved = [move(part, tmp_path / "there") for part in parts_here]
    texts = [
        [list(WorkUnitReader(TEXT, there).chunks(part)) for part in every]
        for there, every in ((0, moved), (1, parts_here))
    ]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="was written to"):
        list(WorkUnitReader(TEXT).chunks(moved[0]))


def move(part, folder: Path):
    """The part, with its files in another folder."""

    def moved(file):
        return dataclasses.replace(file, path=folder / file.path.name)

    if isinstance(part, WholeFiles):
        return WholeFiles(tuple(map(moved, part.files)))
    return dataclasses.replace(part, file=moved(part.file))


def test_numbers_of_workers_out_of_range(source, tmp_path):
    with pytest.raises(ValueError, match="--workers must be at least 1: got 0"):
        run(source, tmp_path / "out", workers=0)
