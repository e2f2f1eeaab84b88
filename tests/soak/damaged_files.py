"""Checkpoints, exports, token files and text with random damage: each is refused in one line, or loads unchanged."""

import dataclasses
import functools
import io
import json
import os
import pickle
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_dualpipe.checkpoint import check_weights, find_checkpoint
from moe_dualpipe.checkpoint.huggingface import plan_checkpoint_export
from moe_dualpipe.checkpoint.manifest import FileChecksum, Manifest
from moe_dualpipe.data import load_data, prepare_data
from tests.support.killed_runs import newest
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, TEXT, settings
from tests.support.texts import corrupt

from .attack import Attack
from .failing_runs import tensors_of
from .random_runs import train_quietly

SECONDS = 10  # that an answer may take
PLAIN = dataclasses.replace(MODEL, num_shared_experts=0, num_dense_layers=0)


@functools.cache
def originals() -> Path:
    """A folder with a checkpoint, an export, and prepared token ids."""
    folder = Path(tempfile.mkdtemp())
    run_ranks(2, train_quietly, settings(folder / "run", model=PLAIN, steps=1, seq_len=16, eval_sequences=1))
    shutil.move(newest(folder / "run"), folder / "checkpoint")
    plan_checkpoint_export(folder / "checkpoint").write(folder / "export")
    (folder / "text").mkdir()
    for path in Path(TEXT).glob("*.py"):
        shutil.copy(path, folder / "text")
    prepare_data([str(folder / "text")], folder / "tokens", "bytes", 256, "text")
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


DAMAGES: dict[str, Callable[[random.Random, Path], Any]] = {
    "random bytes": lambda rng, path: path.write_bytes(rng.randbytes(path.stat().st_size)),
    "removal": lambda _, path: path.unlink(),
    "a folder": lambda _, path: replaced(path, path.mkdir),
    "a FIFO": lambda _, path: replaced(path, lambda: os.mkfifo(path)),
    "a link": lambda rng, path: replaced(
        path, lambda: path.symlink_to(rng.choice(["/dev/zero", "/etc/hostname", "/nonexistent", str(path)]))
    ),
}


def damage(rng: random.Random, folder: Path) -> str:
    """Damage one file of a folder: half of the time a part of it, else all. Returns what was done."""
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size))
    how = rng.choice([*DAMAGES, *["part"] * len(DAMAGES)])
    if how == "part":
        path.write_bytes(corrupt(path.read_bytes(), np.random.default_rng(rng.randrange(2**32))))
    else:
        DAMAGES[how](rng, path)
    return f"{how} in {path.name}"


def copy(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(originals() / name, folder / name))


def damaged_checkpoint(rng: random.Random, folder: Path) -> None:
    checkpoint = copy("checkpoint", folder)
    what = damage(rng, checkpoint)
    if refused(lambda: find_checkpoint(str(checkpoint))):
        return
    expected, loaded = tensors_of(originals() / "checkpoint"), tensors_of(checkpoint)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()), f"{what} loaded"


def damaged_tokens(rng: random.Random, folder: Path) -> None:
    tokens = copy("tokens", folder)
    what = damage(rng, tokens)
    found = []
    if not refused(lambda: found.append(load_data(str(tokens), 32))):
        batches = [data.batch(0, 0, 4, 32)[0] for data in (found[0], load_data(str(originals() / "tokens"), 32))]
        assert torch.equal(*batches), f"{what} loaded"


# ---- Files that an attacker wrote: the checksums are right ----


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.path),)


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def random_value(rng: random.Random) -> Any:
    return rng.choice([
        *(None, True, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 10**30, 2**62, "", "\x1b[31m\n", [], {}, [[]]),
        *("a" * 100_000, [0] * 100_000, [2**40] * 2, {"a": [1]}, "../run.json", "/etc/passwd", "nn.Module"),
    ])  # fmt: skip


def change_json(rng: random.Random, value: Any) -> Any:
    """Replace a random part of a JSON value, or remove it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        rest = {k: v for k, v in value.items() if k != key}
        return rest if rng.random() < 0.1 else {**rest, key: change_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], change_json(rng, value[i]), *value[i + 1 :]]
    return random_value(rng)


def forged_checkpoint(rng: random.Random, folder: Path) -> None:
    checkpoint, bomb = copy("checkpoint", folder), folder / "exploded"
    manifest = json.loads((checkpoint / "run.json").read_text())
    kind = rng.choice(["run", "deep", "pickle", "short"])
    if kind == "deep":
        (checkpoint / "run.json").write_bytes(deep(rng.choice([900, 10_000, 1_000_000])))
    elif kind == "pickle":
        target = rng.choice(sorted(path for path in checkpoint.iterdir() if path.suffix != ".json"))
        if rng.random() < 0.5:
            target.write_bytes(pickle.dumps(Bomb(bomb)))
        else:
            torch.save({"model": Bomb(bomb)}, archive := io.BytesIO())
            target.write_bytes(archive.getvalue())
    elif kind == "short":
        data = sorted(checkpoint.glob("*.safetensors"))[0]
        os.truncate(data, rng.randrange(data.stat().st_size))
    if kind == "run":
        (checkpoint / "run.json").write_text(json.dumps(change_json(rng, manifest)))
    elif (checkpoint / "run.json").read_bytes()[:1] == b"{":
        files = {
            path.name: FileChecksum.of(path.read_bytes()) for path in checkpoint.iterdir() if path.name != "run.json"
        }
        (checkpoint / "run.json").write_bytes(Manifest(manifest["step"], manifest["model"], files).encode())

    def load() -> None:
        tensors_of(find_checkpoint(str(checkpoint)))

    refused(load)
    assert not bomb.exists(), "loading ran code"


def forged_config(rng: random.Random, folder: Path) -> None:
    export = copy("export", folder)
    path = export / "config.json"
    config = json.loads(path.read_text())
    path.write_bytes(deep(100_000) if rng.random() < 0.1 else json.dumps(change_json(rng, config)).encode())
    refused(lambda: check_weights(export, PLAIN))


def random_text(rng: random.Random, folder: Path) -> None:
    """Random bytes, lines and names are refused, or are text."""
    for i in range(rng.randrange(1, 4)):
        suffix = rng.choice([".txt", ".jsonl", ".bin", ".py", ""])
        data = rng.choice([
            rng.randbytes(rng.randrange(3000)), b"hello world\n" * 300, b'{"text": "hello"}\n' * 200, deep(100_000),
            b'{"text": ' + deep(5000) + b"}\n", b'{"text": "\\ud800"}\n', b"\xff\xfe" + "hello".encode("utf-16") * 50,
        ])  # fmt: skip
        (folder / f"{rng.choice(['notes', 'a=2', 'b*', chr(10), chr(27) + '[31m'])}{i}{suffix}").write_bytes(data)
    if rng.random() < 0.3:
        (folder / "loop").symlink_to(folder)
    if rng.random() < 0.3:
        os.mkfifo(folder / "pipe")
    sources = [str(folder), f"{folder}/**", *map(str, sorted(folder.iterdir()))]
    found = []
    if not refused(lambda: found.append(load_data([rng.choice(sources)], 16))):
        found[0].batch(0, 0, 2, 16)


ATTACKS = (
    Attack("damaged checkpoint", "refused in one line that names the file", 300, (damaged_checkpoint,)),
    Attack("damaged token ids", "refused in one line, or the same batches", 200, (damaged_tokens,)),
    Attack("forged checkpoint", "no code runs; loads, or refused in one line within 10 s", 300, (forged_checkpoint,)),
    Attack("forged config.json", "loads, or refused in one line within 10 s", 200, (forged_config,)),
    Attack("random text", "trains, or refused in one line within 10 s", 200, (random_text,)),
)  # fmt: skip
