"""Preparing data in several processes: the same files whatever their number, also after a kill or an error."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from moe_dualpipe.data import BYTES, Prepared, open_shards, prepare, prepare_data
from moe_dualpipe.data.pool import run_in_processes
from moe_dualpipe.data.prepare import ShardWriter
from moe_dualpipe.data.tokenizer import BPETokenizer
from tests.support.runs import ROOT


def words(seed: int, number: int) -> str:
    random = np.random.default_rng(seed)
    return "".join(f"{'grün' if n % 7 == 0 else n}{' ' if n % 5 else chr(10)}" for n in random.integers(0, 999, number))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """45 files of text, one of them in pieces, and 90 rows in two .jsonl files, with copies among them."""
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


@pytest.mark.quick("2")
@pytest.mark.parametrize("workers", [2, 50])
def test_any_number_of_workers_writes_the_same_files(source, alone, tmp_path, workers):
    done = run(source, tmp_path / "out", workers=workers)
    assert files_in(tmp_path / "out") == alone
    assert (done.shards, done.finished_before) == (3, 0)


KILLED = """
import os, signal, sys
from pathlib import Path
from moe_dualpipe.data import pool, prepare, prepare_data
prepare.SHARD_BYTES = 500
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
    monkeypatch.setattr(prepare, "SHARD_BYTES", 500)
    done = run(source, tmp_path / "out")
    assert 9 <= done.finished_before < done.shards
    assert files_in(tmp_path / "out") == alone
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_results_have_the_order_of_the_items_and_a_killed_worker_is_one_error():
    assert list(run_in_processes(abs, [-3, 1, -2], 2)) == [3, 1, 2]
    message = r"^a worker process was killed; if memory is short, use fewer --workers$"
    with pytest.raises(ChildProcessError, match=message):
        list(run_in_processes(signal.raise_signal, [signal.SIGKILL] * 2, 2))


FULL = OSError(28, "No space left on device")
OTHER = {"nothing": 1, "text": 0, "tokenizer": 0, "field": 0}


@pytest.mark.parametrize("change", OTHER)
def test_a_shard_is_used_only_for_the_same_text_tokenizer_and_field(source, tmp_path, monkeypatch, change):
    content = (source / "z.jsonl").read_text().replace('{"text": "', '{"other": "o", "text": "')
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(content)
    options, write = {"tokenizer": "bytes", "vocab_size": 300, "field": "text"}, ShardWriter.write
    prepare = partial(prepare_data, [f"{tmp_path}/?.jsonl"])
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(ShardWriter, "write", lambda w, shard: raise_it(FULL) if "b.j" in str(shard) else write(w, shard))
        prepare(tmp_path / "out", **options)
    if change == "text":
        os.utime(tmp_path / "a.jsonl", ns=(0, 7))
    if change == "tokenizer":
        run(source / "a.jsonl", tmp_path / "bpe", "bpe")
        options["tokenizer"] = f"{tmp_path}/bpe/tokenizer.json"
    if change == "field":
        options["field"] = "other"
    assert prepare(tmp_path / "out", **options).finished_before == OTHER[change]
    prepare(tmp_path / "fresh", **options)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "fresh")


def raise_it(error: Exception) -> NoReturn:
    raise error


def with_other_table(path: Path, other: Path) -> None:
    """A whole ZIP file with the token ids of a shard and the documents of another one."""
    with zipfile.ZipFile(path) as file, zipfile.ZipFile(other) as others:
        tokens, documents = file.read(f"{path.stem}.tokens"), others.read(f"{other.stem}.documents")
        contents = {f"{path.stem}.tokens": tokens, f"{path.stem}.documents": documents}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in contents.items():
            file.writestr(name, content)


def swap(first: Path, second: Path) -> None:
    other = second.read_bytes()
    second.write_bytes(first.read_bytes())
    first.write_bytes(other)


def change_in_place(path: Path) -> None:
    """Another document of the same size, at the same time."""
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(rb"\n", rb"\t", 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def of_another_tokenizer(source: Path) -> None:
    """A shard has the content of the same shard of another run."""
    bpe, shards = open_shards([str(source)], source.parent / "other", BPETokenizer.train(["text"], 300))
    bpe.write(shards[0])
    shutil.copy(bpe.path(shards[0]), open_shards([str(source)], source.parent / "out", BYTES)[0].path(shards[0]))


@pytest.mark.parametrize("harm", [
    lambda shards, _: swap(*shards[:2]), lambda shards, _: shutil.copy(*shards[:2]),
    lambda shards, _: with_other_table(*shards[:2]),
    lambda _, source: change_in_place(source / "a.jsonl"), lambda _, source: of_another_tokenizer(source),
    lambda shards, _: shards[0].write_bytes(b""), lambda shards, _: shards[0].write_bytes(shards[0].read_bytes()[:-9]),
    lambda shards, _: shards[0].write_bytes(shards[0].read_bytes().replace("grün".encode(), b"grin!", 1)),
], ids=["swapped", "copied", "table", "source", "tokenizer", "empty", "cut", "damaged"])  # fmt: skip
def test_a_shard_that_is_not_that_of_its_source_is_never_joined(source, tmp_path, monkeypatch, harm):
    shutil.copytree(source, tmp_path / "source")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(prepare, "join", lambda *_: raise_it(FULL))
        run(tmp_path / "source", tmp_path / "out")
    shards = sorted((tmp_path / ".out.unfinished").rglob("*.zip"))
    harm(shards, tmp_path / "source")
    try:
        run(tmp_path / "source", tmp_path / "out")
    except ValueError as error:
        assert f"{shards[0]} is damaged: remove it, and repeat" in str(error)
        shards[0].unlink()
        run(tmp_path / "source", tmp_path / "out")
    run(tmp_path / "source", tmp_path / "fresh")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "fresh")


def test_other_programs_write_the_same_shards(source, alone, tmp_path):
    """As examples/prepare_on_cluster.py does. Two may write the same."""
    writer, found = open_shards([str(source)], tmp_path / "out", BYTES)
    for shard in found:
        writer.write(shard)
    assert run(source, tmp_path / "out").finished_before == 3
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
    assert run(source, tmp_path / "out", str(arguments[1])).finished_before == 3
    assert files_in(tmp_path / "out") == files_in(tmp_path / "one")
