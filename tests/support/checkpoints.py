"""Small checkpoints on disk: written by hand or by `save_checkpoint`, and read back; and disks that are full."""

import dataclasses
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from moe_dualpipe.checkpoint import (
    TensorFolder,
    find_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    tensor_file,
)  # fmt: skip
from moe_dualpipe.checkpoint.manifest import FileChecksum, Manifest
from moe_dualpipe.models import ModelConfig


def write_manifest(folder, step=3, model=None):
    """Write a checkpoint without tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokens.txt").write_bytes(b"{}")
    files = {"tokens.txt": FileChecksum.of(b"{}")}
    (folder / "run.json").write_bytes(Manifest(step, model or {}, files).encode())


def write_tensors_of(folder, tensors, model, **options):
    """Write a checkpoint of these tensors. options: of the model, in place of its own."""
    folder.mkdir()
    tensor_file.write_tensors(folder / "rank-0-0.safetensors", tensors)
    files = {path.name: FileChecksum.of_file(path) for path in folder.iterdir()}
    (folder / "run.json").write_bytes(Manifest(3, dataclasses.asdict(model) | options, files).encode())


def tensors_of(place):
    """All tensors of a checkpoint, or of the newest one of a run, by name. place: its folder or URL."""
    checkpoint = find_checkpoint(str(place))
    saved = TensorFolder(checkpoint, read_manifest(checkpoint)).entries
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in saved.items()}
    load_checkpoint(checkpoint, tensors)
    return tensors


def state_of(rank, step):
    """A tensor that both ranks hold and two of this rank alone, in awkward shapes. All values depend on the step."""
    return {
        "both": torch.full((3, 1, 5), float(step)),
        f"rank{rank}": torch.full((1, 7 + rank), step + rank / 2),
        f"scalar{rank}": torch.tensor(step, dtype=torch.int64),
    }


def loaded_step(folder):
    """Load the state of both ranks in this process, check that all of it is from one step, and return that step."""
    loaded = {name: torch.full_like(t, -1) for rank in (0, 1) for name, t in state_of(rank, 0).items()}
    load_checkpoint(folder, loaded)
    step = int(loaded["both"][0, 0, 0])
    for rank in (0, 1):
        for name, expected in state_of(rank, step).items():
            assert torch.equal(loaded[name], expected), name
    return step


def checkpoint_names(run):
    return sorted(path.name for path in (Path(run) / "checkpoints").iterdir())


def save_steps(rank, run, steps, keep=0):
    for step in steps:
        save_checkpoint(run, step, state_of(rank, step), ModelConfig(), {"tokens.txt": b"a b c"}, keep)
    return checkpoint_names(run)


def newest(run):
    return run / "checkpoints" / "step-000009"


class FullDisk:
    """Makes writes of tensors fail once `room` bytes have been written."""

    def __init__(self, monkeypatch):
        self.room = 0
        save_file = tensor_file.save_file

        def limited(tensors, path, *metadata):
            self.room -= sum(tensor.nbytes for tensor in tensors.values())
            if self.room < 0:
                raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
            save_file(tensors, path, *metadata)

        monkeypatch.setattr(tensor_file, "save_file", limited)


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """A file system of this size at `folder`."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
