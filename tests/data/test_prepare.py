"""Preparing data in several processes: the same files whatever their number, also after a kill or an error."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.data import BYTES, Preparation, Prepared, prepare, prepare_data, shards, text_files
from moe_dualpipe.data.documents import Documents
from moe_dualpipe.data.pool import run_in_processes
from moe_dualpipe.data.shards import ShardWriter, divide
from moe_dualpipe.data.tokenizer import BPETokenizer
from tests.support.runs import ROOT


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


def run(source: Path, out: Path, tokenizer: str = "bytes", **options) -> Prepared:
    return prepare_data([str(source)], out, tokenizer, 300, "text", **options)


@pytest.fixture(scope="module")
def alone(source, tmp_path_factory) -> dict[str, bytes]:
    """What one process writes."""
    out = tmp_path_factory.mktemp("alone") / "out"
    run(source, out)
    return files_in(out)


@pytest.mark.quick("bytes-2")
@pytest.mark.parametrize("workers", [2, 50])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_any_number_of_workers_writes_the_same_files(source, alone, tmp_path, tokenizer, workers):
    if tokenizer == "bpe":
        run(source, tmp_path / "one", "bpe")
    done = run(source, tmp_path / "out", tokenizer, workers=workers)
    assert files_in(tmp_path / "out") == (alone if tokenizer == "bytes" else files_in(tmp_path / "one"))
    assert (done.shards, done.finished_before) == (3, 0)
    assert done.tokens == sum(sidecar.tokens for sidecar in done.sidecars)


@pytest.mark.parametrize("shard_bytes", [1, 500, 1 << 30])
def test_shards_have_all_documents_in_order(source, monkeypatch, shard_bytes):
    monkeypatch.setattr(shards, "SHARD_BYTES", shard_bytes)
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 64)
    found = Documents.find(str(source))
    parts = [*divide([found])]
    assert [file for shard in parts for file in shard.files] == [*found.files.items()]
    assert [text for shard in parts for text in shard.documents(found.field)] == [*found]
    assert all(shard.size <= shard_bytes or len(shard.files) == 1 for shard in parts)
    if shard_bytes == 500:  # with another file of text, a shard would be too large
        both = [one.size + other.files[0][1].size for one, other in pairwise(parts) if ".txt" in str((one, other))]
        assert len(parts) > 10 and sum(size > 500 for size in both) >= len(both) - 4
    assert {len(shard.files) for shard in parts if ".jsonl" in str(shard.files)} == {1}


KILLED = """
import os, signal, sys
from pathlib import Path
from moe_dualpipe.data import prepare_data, shards, pool
shards.SHARD_BYTES = 500
def kill_after(results):
    for number, result in enumerate(results):
        if number == 9:
            print(*Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        yield result
run = pool.ProcessPoolExecutor.map
pool.ProcessPoolExecutor.map = lambda *arguments: kill_after(run(*arguments))
prepare_data([sys.argv[1]], Path(sys.argv[2]), "bytes", 300, "text", workers=2)
"""


def test_after_a_kill_the_same_call_continues_and_no_worker_is_left(source, alone, tmp_path, monkeypatch):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    arguments = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out")]
    killed = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in killed.stdout.split()]
    for _ in range(1000):
        if not any(is_running(pid) for pid in pids):
            break
        time.sleep(0.02)
    assert len(pids) >= 2 and not any(is_running(pid) for pid in pids)
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    done = run(source, tmp_path / "out")
    assert 9 <= done.finished_before < done.shards
    assert done.tokens < sum(sidecar.tokens for sidecar in done.sidecars)
    assert files_in(tmp_path / "out") == alone
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_is_one_error():
    message = r"^a worker process was killed; if memory is short, use fewer --workers$"
    with pytest.raises(ChildProcessError, match=message):
        list(run_in_processes(signal.raise_signal, [signal.SIGKILL] * 2, 2))


def test_results_have_the_order_of_the_items():
    assert list(run_in_processes(abs, [-3, 1, -2], 2)) == [3, 1, 2]


def test_an_invalid_row_is_named_and_only_its_file_is_encoded_again(tmp_path, capsys):
    rows = [json.dumps({"text": words(i, 30)}) for i in range(80)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(rows))
    (tmp_path / "b.jsonl").write_text("\n".join([*rows[:61], "{", *rows[61:]]))
    source, out = tmp_path / "?.jsonl", tmp_path / "out"
    for workers in ("1", "2"):  # the second call comes to the same error
        command = ["data", "prepare", str(source), "--out", str(out), "--tokenizer", "bytes", "--workers", workers]
        assert main(command) == 2
        finished, error = capsys.readouterr().err.splitlines()
        assert finished == f"finished shards are in {tmp_path}/.out.unfinished: the same command uses them"
        assert error == (
            f"moe-dualpipe: error: {tmp_path}/b.jsonl:62: not JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)"
        )
    (tmp_path / "b.jsonl").write_text(rows[0])
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("1 of 2 shards were finished before\n")
    run(source, tmp_path / "fresh")
    assert files_in(out) == files_in(tmp_path / "fresh")


OTHER = {
    "nothing": ({}, 1), "the text": ({}, 0), "the tokenizer": ({}, 0), "the field": ({"field": "other"}, 0),
    "what is left out": ({"drop_duplicates": True}, 1),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHER)
def test_a_shard_is_used_only_for_the_same_text_tokenizer_and_field(source, tmp_path, monkeypatch, change):
    monkeypatch.setattr(shards, "sync", lambda _: None)
    content = (source / "z.jsonl").read_text().replace('{"text": "', '{"other": "o", "text": "')
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(content)
    arguments = {"tokenizer": "bytes", "vocab_size": 300, "field": "text"}
    prepare = partial(prepare_data, [f"{tmp_path}/?.jsonl"])
    with monkeypatch.context() as patch:
        write, fail = ShardWriter.write, OSError(28, "No space left on device")
        patch.setattr(ShardWriter, "write", lambda w, shard: raise_it(fail) if "b.j" in str(shard) else write(w, shard))
        with pytest.raises(OSError, match="No space left"):
            prepare(tmp_path / "out", **arguments)
    if change == "the text":
        os.utime(tmp_path / "a.jsonl", ns=(0, 7))
    if change == "the tokenizer":
        run(source / "a.jsonl", tmp_path / "bpe", "bpe")
    arguments |= OTHER[change][0] | ({"tokenizer": f"{tmp_path}/bpe/tokenizer.json"} if "token" in change else {})
    assert prepare(tmp_path / "out", **arguments).finished_before == OTHER[change][1]
    prepare(tmp_path / "fresh", **arguments)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "fresh")


def raise_it(error: Exception) -> NoReturn:
    raise error


def test_a_tokenizer_is_trained_once_for_the_same_text_and_options(tmp_path, monkeypatch):
    """It is kept beside the shards, also if the disk is full before the first of them."""
    trained, train = [], BPETokenizer.train
    monkeypatch.setattr(BPETokenizer, "train", lambda texts, size: trained.append(size) or train(texts, size))
    for change in ({}, {}, {"vocab_size": 290}, {"field": "other"}):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(ShardWriter, "write", lambda *_: raise_it(OSError(28, "No space left on device")))
            rows = [json.dumps({"text": words(1, 40), "other": words(2, 40)})] * 30
            (tmp_path / "rows.jsonl").write_text("\n".join(rows))
            os.utime(tmp_path / "rows.jsonl", ns=(0, 7))
            options = {"tokenizer": "bpe", "vocab_size": 300, "field": "text"} | change
            prepare_data([f"{tmp_path}/rows.jsonl"], tmp_path / "out", **options)
    assert trained == [300, 290, 300]


def test_a_damaged_shard_is_found(source, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "join", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        run(source, tmp_path / "out")
    monkeypatch.undo()
    path = next((tmp_path / ".out.unfinished").rglob("tokens.bin"))
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.parent} is damaged: remove it, and repeat"):
        run(source, tmp_path / "out")


@pytest.mark.parametrize("method", [None, 77])
def test_a_damaged_table_of_a_shard_is_found(source, tmp_path, monkeypatch, method):
    """An empty file, and one whose zip names an unknown compression."""
    monkeypatch.setattr(prepare, "join", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        run(source, tmp_path / "out")
    monkeypatch.undo()
    path = next((tmp_path / ".out.unfinished").rglob("documents.npz"))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 10] = method or 0
    path.write_bytes(content if method else b"")
    with pytest.raises(ValueError, match=f"{path.parent} is damaged: remove it, and repeat"):
        run(source, tmp_path / "out")


@pytest.mark.quick("1")
@pytest.mark.parametrize("workers", [1, 3])
def test_of_equal_documents_only_the_first_is_written(source, tmp_path, workers):
    (tmp_path / "again.txt").write_text((source / "30-long.txt").read_text())
    texts: dict[str, None] = {}
    for text in Documents.find(str(source)):
        texts.setdefault(text)
    (tmp_path / "first").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "first" / f"{i:03}").write_text(text)
    sources = [str(source), str(tmp_path / "again.txt"), str(source / "?.jsonl")]
    done = prepare_data(sources, tmp_path / "out", "bytes", 300, "text", drop_duplicates=True, workers=workers)
    assert done.duplicates == 4 + 5 + 5 + 1  # files, rows of a.jsonl and of z.jsonl, the copy of the long file
    run(tmp_path / "first", tmp_path / "expected")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "expected")


def test_copies_that_are_left_out_do_not_change_what_is_held_out_of_a_small_source(tmp_path):
    texts = [words(i, 20 + 9 * i) for i in range(4)]
    for name, rows in (("once", texts), ("copies", [*texts, *texts[:1] * 30, *texts[2:3] * 9])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        run(tmp_path / f"{name}.jsonl", tmp_path / name, drop_duplicates=True)
    assert files_in(tmp_path / "copies") == files_in(tmp_path / "once")


def test_other_programs_write_the_same_shards(source, alone, tmp_path):
    """As examples/prepare_on_cluster.py does, on machines whose files have other devices and inodes."""
    for rank in range(2):
        job = Preparation.open([str(source)], tmp_path / "out")
        writer = job.writer(BYTES)
        for shard in job.shards[rank::2]:
            writer.write(shard)
            assert writer.write(shard) == 0
    done = run(source, tmp_path / "out")
    assert (done.finished_before, done.tokens) == (3, 0)
    assert files_in(tmp_path / "out") == alone


@pytest.mark.long
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_two_workers_of_datatrove_write_the_same_shards(source, tmp_path, tokenizer):
    pytest.importorskip("datatrove.executor", exc_type=ImportError, reason="datatrove is not installed")
    run(source, tmp_path / "one", tokenizer)
    arguments = [tmp_path / "out", tmp_path / "one" / "tokenizer.json", source]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    script = [sys.executable, ROOT / "examples" / "prepare_on_cluster.py"]
    subprocess.run([*script, *arguments], env=environment, check=True, capture_output=True)
    done = run(source, tmp_path / "out", str(arguments[1]))
    assert (done.finished_before, done.tokens) == (3, 0)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "one")
