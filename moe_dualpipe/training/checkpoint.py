"""Checkpoints with torch.distributed.checkpoint, under names that do not depend on how the run was divided.

A tensor is saved under its global name, once, whichever ranks hold replicas. Experts are saved one by one
(`layers.1.mlp.experts.gate_up.5`), so their number per rank leaves no trace. A checkpoint is a folder

    <run>/checkpoints/step-000320/    the tensors, and run.json with the step and the model's configuration

that appears under this name only when it is complete.
"""

import dataclasses
import json
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from ..models import ModelConfig

_STEP = re.compile(r"step-(\d+)")


def global_tensors(name: str, tensor: Tensor, local_experts: range) -> Iterator[tuple[str, Tensor]]:
    """The global names, and views, under which a parameter-shaped tensor of this rank is saved."""
    if ".experts." not in name:
        yield name, tensor
    elif tensor.ndim and len(tensor) == len(local_experts):
        yield from ((f"{name}.{expert}", tensor[i]) for i, expert in enumerate(local_experts))
    else:  # an expert layer of the user's own that stacks nothing: only as a whole, for this division of experts
        yield f"{name}.{local_experts.start}-{local_experts.stop - 1}", tensor


def save(
    run: Path, step: int, state: Mapping[str, Tensor], model: ModelConfig, extra: Mapping[str, bytes] | None = None
) -> Path:
    """Save `state`, by global names, as the checkpoint after `step` updates. Collective.

    extra: more files for the checkpoint's folder, name -> contents; rank 0's are taken.
    """
    final = run / "checkpoints" / f"step-{step:06d}"
    unfinished = final.with_name(f".{final.name}.unfinished")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    dcp.save(dict(state), checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        (unfinished / "run.json").write_text(json.dumps({"step": step, "model": dataclasses.asdict(model)}, indent=2))
        for name, contents in (extra or {}).items():
            (unfinished / name).write_bytes(contents)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
    dist.barrier()
    return final


def find(path: str) -> Path:
    """The checkpoint at `path`, or the newest one of the run at `path`. Raises ValueError when there is none."""
    below = [*Path(path).glob("checkpoints/step-*"), *Path(path).glob("step-*")]
    for candidate in (Path(path), *sorted(below, key=_step_of, reverse=True)):
        if (candidate / "run.json").is_file() and (candidate / ".metadata").is_file():
            return candidate
    raise ValueError(f"nothing to resume from: no checkpoint in {path}; start without --resume")


def _step_of(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def check_model(checkpoint: Path, model: ModelConfig) -> int:
    """Return the step of `checkpoint`. Raises ValueError if it is incomplete, or of a model other than `model`."""
    try:
        saved = json.loads((checkpoint / "run.json").read_text())
        step, saved_model = int(saved["step"]), dict(saved["model"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"cannot read {checkpoint / 'run.json'}: {error}") from None
    ours = dataclasses.asdict(model)
    differences = [
        f"{key} is {saved_model.get(key)!r} there and {value!r} here"
        for key, value in ours.items()
        if saved_model.get(key) != value
    ]
    if differences:
        raise ValueError(f"{checkpoint} holds another model: {'; '.join(differences)}")
    stored = _metadata(checkpoint).storage_data or {}
    missing = {info.relative_path for info in stored.values() if not (checkpoint / info.relative_path).is_file()}
    if missing:
        raise ValueError(
            f"{checkpoint} is incomplete: {', '.join(sorted(missing))} is missing; resume from another one"
        )
    return step


def _metadata(checkpoint: Path) -> dcp.Metadata:
    try:
        return dcp.FileSystemReader(checkpoint).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"cannot read {checkpoint / '.metadata'}: {error}") from None


def load(checkpoint: Path, state: Mapping[str, Tensor]) -> None:
    """Load into `state` in place. Collective. Raises ValueError for a tensor that the checkpoint lacks."""
    saved = _metadata(checkpoint).state_dict_metadata
    if lacking := sorted(set(state) - set(saved)):
        raise ValueError(
            f"{checkpoint} lacks {lacking[0]}{f' and {len(lacking) - 1} more' if len(lacking) > 1 else ''}; "
            "experts of your own can change their number of ranks only if their parameters stack experts first"
        )
    dcp.load(dict(state), checkpoint_id=checkpoint)
