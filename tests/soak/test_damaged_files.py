"""Checkpoints, token files and text with random damage: each is refused in one line, or loads unchanged."""

import csv
import dataclasses
import functools
import gzip
import io
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_dualpipe.checkpoint import find_checkpoint
from moe_dualpipe.data import load_data, prepare_data
from moe_dualpipe.data.documents import Documents
from tests.support.checkpoints import tensors_of
from tests.support.killed_runs import newest
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, TEXT, settings, train
from tests.support.texts import corrupt

FORMATS = (".jsonl", ".ndjson", ".jsonlines", ".json", ".csv", ".tsv")
SECONDS = 10  # that an answer may take
PLAIN = dataclasses.replace(MODEL, num_shared_experts=0, num_dense_layers=0)


@functools.cache
def originals() -> Path:
    """A folder with a checkpoint and prepared token ids."""
    folder = Path(tempfile.mkdtemp())
    run_ranks(2, train, settings(folder / "run", model=PLAIN, steps=1, seq_len=16, eval_sequences=1))
    shutil.move(newest(folder / "run"), folder / "checkpoint")
    prepare_data([f"{TEXT}/*.py"], folder / "tokens", "bytes", 256, "text")
    return folder


def refused(load: Callable[[], Any]) -> str:
    """The message of the ValueError of `load`, checked to be a line; "" if it loads."""
    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(SECONDS)
    try:
        load()
    except ValueError as error:
        message = str(error)
        assert message.isprintable() and len(message) < 2000, f"not one readable line: {message[:3000]!r}"
        assert "weights_only" not in message, message
        return message
    finally:
        signal.alarm(0)
    return ""


def too_slow(*_: Any) -> None:
    raise AssertionError(f"no answer within {SECONDS} s")


def replaced(path: Path, make: Callable[[], Any]) -> None:
    path.unlink()
    make()


DAMAGES: tuple[Callable[[random.Random, Path], Any], ...] = (
    lambda rng, path: path.write_bytes(rng.randbytes(path.stat().st_size)),
    lambda _, path: path.unlink(),
    lambda _, path: replaced(path, path.mkdir),
    lambda _, path: replaced(path, lambda: os.mkfifo(path)),
    lambda rng, path: replaced(
        path, lambda: path.symlink_to(rng.choice(["/dev/zero", "/etc/hostname", "/nonexistent", str(path)]))
    ),
)


def damaged(rng: random.Random, name: str, folder: Path) -> Path:
    """A copy of one of the `originals` with damage to a file: half of the time to a part of it, else to all."""
    copy = Path(shutil.copytree(originals() / name, folder / name))
    path = rng.choice(sorted(path for path in copy.iterdir() if path.is_file() and path.stat().st_size))
    if rng.random() < 0.5:
        path.write_bytes(corrupt(path.read_bytes(), np.random.default_rng(rng.randrange(2**32))))
    else:
        rng.choice(DAMAGES)(rng, path)
    return copy


@pytest.mark.parametrize("rng", range(300), indirect=True)
def test_a_damaged_checkpoint_is_refused_in_one_line_or_loads_unchanged(rng: random.Random, tmp_path: Path) -> None:
    checkpoint = damaged(rng, "checkpoint", tmp_path)
    if not refused(lambda: find_checkpoint(str(checkpoint))):
        expected, loaded = tensors_of(originals() / "checkpoint"), tensors_of(checkpoint)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("rng", range(200), indirect=True)
def test_damaged_token_ids_are_refused_in_one_line_or_give_the_same_batches(rng: random.Random, tmp_path: Path) -> None:
    tokens, found = damaged(rng, "tokens", tmp_path), []
    if not refused(lambda: found.append(load_data(str(tokens), 32))):
        batches = [data.batch(0, 0, 4, 32)[0] for data in (found[0], load_data(str(originals() / "tokens"), 32))]
        assert torch.equal(*batches)


@pytest.mark.parametrize("rng", range(200), indirect=True)
def test_random_text_is_refused_in_one_line_or_gives_batches(rng: random.Random, tmp_path: Path) -> None:
    for i in range(rng.randrange(1, 4)):
        suffix = rng.choice([".txt", ".bin", ".py", "", ".parquet", *FORMATS])
        data = rng.choice([
            rng.randbytes(rng.randrange(3000)), b"hello world\n" * 300, b'{"text": "hello"}\n' * 200, b"[" * 100_000,
            b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",
            b'{"text": "\\ud800"}\n', b'text,n\n"hello",1\n' * 90, "text\n\u00fcber".encode("latin1") * 90,
            b"\xff\xfe" + "hello".encode("utf-16") * 50,
        ])  # fmt: skip
        (tmp_path / f"{rng.choice(['notes', 'a=2', 'b*', chr(10), chr(27) + '[31m'])}{i}{suffix}").write_bytes(data)
    if rng.random() < 0.3:
        (tmp_path / "loop").symlink_to(tmp_path)
    if rng.random() < 0.3:
        os.mkfifo(tmp_path / "pipe")
    sources = [str(tmp_path), f"{tmp_path}/**", *map(str, sorted(tmp_path.iterdir()))]
    found = []
    if not refused(lambda: found.append(load_data([rng.choice(sources)], 16))):
        found[0].batch(0, 0, 2, 16)


@pytest.mark.parametrize("rng", range(200), indirect=True)
def test_a_random_table_gives_its_texts_in_every_format(rng: random.Random, tmp_path: Path) -> None:
    texts = ["".join(rng.choices('äb",\\\n\t中 \r\u2028', k=rng.randint(1, 30))) for _ in range(rng.randint(1, 20))]
    rows, kind = (
        [{"n": rng.choice([None, 1.5, [2], float("nan")]), "text": text} for text in texts],
        rng.choice(FORMATS),
    )
    table = io.StringIO(newline="")
    if kind[1] in "ct":
        writer = csv.DictWriter(table, ["n", "text"], delimiter="," if kind[1] == "c" else "\t")
        writer.writeheader()
        writer.writerows(rows)
    elif kind == ".json" and rng.random() < 0.7:
        json.dump(rows, table, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5)
    else:
        table.writelines(json.dumps(row, ensure_ascii=rng.random() < 0.5) + "\n" * rng.randint(1, 2) for row in rows)
    content = table.getvalue().encode(rng.choice(["utf-8", "utf-8-sig"]))
    packed = rng.random() < 0.3
    path = tmp_path / f"table{rng.choice([kind, kind.upper()])}{'.gz' * packed}"
    path.write_bytes(gzip.compress(content) if packed else content)
    assert [*Documents.find(str(path))] == texts
