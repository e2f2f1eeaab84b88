"""Convert what an earlier version wrote: a checkpoint with .distcp files, or exported weights with checksums.json.

    python examples/convert_checkpoint.py runs/old runs/new
    python examples/convert_checkpoint.py exported runs/new

The newest intact checkpoint of runs/old becomes a checkpoint of runs/new: `train.py --resume runs/new` continues from
it. From exported weights, `train.py --weights runs/new` starts. tensors.json says where each tensor is in a .distcp
file. Loading it runs no code.
"""

import io
import json
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from moe_dualpipe.checkpoint import list_checkpoints, read_manifest, save_checkpoint
from moe_dualpipe.checkpoint.manifest import RUN_FILE, FileChecksum
from moe_dualpipe.checkpoint.weights import model_config
from moe_dualpipe.models import ModelConfig

Old = tuple[int, ModelConfig, dict[str, Tensor], dict[str, bytes]]
"""The step, the model, the tensors and the other files."""


def read_export(folder: Path) -> Old:
    config = json.loads((folder / "config.json").read_bytes())
    if config.pop("model_type", "") != "moe-dualpipe":
        raise ValueError("no earlier version wrote it")
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    others = {path.name: path.read_bytes() for path in folder.glob("tokenizer.json")}
    return 0, model_config(config), tensors, others


def read_old(checkpoint: Path) -> Old:
    """Read an old checkpoint. Raises ValueError if it is damaged."""
    manifest = read_manifest(checkpoint)
    if ".metadata" not in manifest.files:
        raise ValueError("no earlier version wrote it")
    for name, expected in manifest.files.items():
        if FileChecksum.of_file(checkpoint / name) != expected:
            raise ValueError(f"{name} does not match its checksum")
    tensors = {}
    for name, place in json.loads((checkpoint / "tensors.json").read_bytes()).items():
        with (checkpoint / place["file"]).open("rb") as file:
            file.seek(place["offset"])
            tensors[name] = torch.load(io.BytesIO(file.read(place["length"])), weights_only=True)
    others = {name for name in manifest.files if not name.endswith(".distcp")} - {".metadata", "tensors.json"}
    files = {name: (checkpoint / name).read_bytes() for name in sorted(others)}
    return manifest.step, model_config(manifest.model), tensors, files


def convert(old: Path, new: Path) -> Path:
    """Write the newest intact checkpoint or the weights of `old` into the run `new`. Raises ValueError if neither
    exists."""
    reasons = []
    exported = (old / "config.json").exists()
    for checkpoint in [old] if exported or (old / RUN_FILE).exists() else list_checkpoints(old / "checkpoints"):
        try:
            step, model, tensors, others = (read_export if exported else read_old)(checkpoint)
        except (ValueError, OSError, RuntimeError, LookupError) as error:
            reasons.append(f"{checkpoint}: {error}")
            continue
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            found = save_checkpoint(new, step, tensors, model, others)
        finally:
            dist.destroy_process_group()
        for path in old.glob("*.*"):
            if path.suffix in (".toml", ".jsonl"):  # the options and the metrics of the run
                removed = rb"(?m)^data_cache(_gb)? = .*\n"  # keys that have no meaning now
                (new / path.name).write_bytes(re.sub(removed, b"", path.read_bytes()))
        return found
    raise ValueError("; ".join(reasons) or f"no checkpoint in {old}")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/convert_checkpoint.py OLD_RUN NEW_RUN")
    try:
        found = convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, OSError) as error:
        sys.exit(f"convert_checkpoint.py: error: {error}")
    print(f"{sys.argv[1]} -> {found}")


if __name__ == "__main__":
    main()
