"""Find, verify and load checkpoints, under tensor names that do not depend on the parallel layout of the run.

Every tensor is saved once under its global name, however many ranks hold a replica of it. A checkpoint is a folder

    <run>/checkpoints/step-000320/    the tensors, run.json and tensors.json (manifest.py)

that gets this name only when it is complete (save.py). Loading trusts nothing in it: the author may be anyone.
"""

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..models import ModelConfig
from ..runtime.launch import Launch
from .manifest import RUN_FILE, read_manifest, read_tensor_metadata, verify_checkpoint
from .save import STEP_FOLDER

_TRAINING_OPTIONS = {"init_std", "sequence_loss", "z_loss", "mtp_weight"}  # no effect on the forward pass

Value = TypeVar("Value")


def find_checkpoint(path: str, warn: Callable[[str], None] | None = None) -> Path:
    """Return the checkpoint at `path`, or the newest intact one of the run at `path`.

    Reads every file once to verify its checksum. Calls `warn` (default: one line on stderr of the first local rank) for
    each newer checkpoint that is broken. Raises ValueError, with the reasons, if there is no intact one.
    """
    given = Path(path)
    if (given / RUN_FILE).exists() or STEP_FOLDER.fullmatch(given.name):
        if fault := _find_fault(given):
            raise ValueError(f"{given} is broken: {fault}; {_suggest_other(given)}")
        return given
    faults = []
    for candidate in list_checkpoints(given / "checkpoints") or list_checkpoints(given):
        if fault := _find_fault(candidate):
            faults.append(f"{candidate}: {fault}")
            continue
        for fault in faults:
            (warn or _warn)(f"skipped broken checkpoint {fault}")
        return candidate
    if faults:
        raise ValueError(f"all checkpoints in {path} are broken: {'; '.join(faults)}")
    raise ValueError(f"no checkpoint in {path}: give the folder of a run or of a checkpoint")


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, broken ones included."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _find_fault(checkpoint: Path) -> str:
    try:
        verify_checkpoint(checkpoint)
    except ValueError as error:
        return str(error).replace(f"{checkpoint}/", "")
    return ""


def _suggest_other(broken: Path) -> str:
    for other in list_checkpoints(broken.parent):
        if other != broken and not _find_fault(other):
            return f"the newest intact checkpoint of this run is {other}"
    return "this run has no intact checkpoint"


def _warn(text: str) -> None:
    if Launch.from_environment().local_rank == 0:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: warning: {text}\n")


def check_model(checkpoint: Path, model: ModelConfig) -> int:
    """Return the step of `checkpoint`. Raises ValueError if it is unreadable or holds a model other than `model`.

    An option that did not exist when the checkpoint was saved counts as its default. Options that only affect
    initialization or the loss may differ.
    """
    saved = read_manifest(checkpoint)
    if found := model_differences(saved.model, model):
        raise ValueError(f"{checkpoint} holds another model: {'; '.join(found)}")
    return saved.step


def model_differences(saved: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """The options in which a saved model differs from `model`, one message each."""
    here, defaults = dataclasses.asdict(model), {field.name: field.default for field in dataclasses.fields(model)}
    pairs = {
        key: (saved.get(key, defaults.get(key, "unknown")), here.get(key, "unknown"))
        for key in [*here, *sorted(set(saved) - set(here))]
        if key not in _TRAINING_OPTIONS
    }
    return [f"{key} was {then!r}, now {now!r}" for key, (then, now) in pairs.items() if then != now]


def load_checkpoint(checkpoint: Path, state: Mapping[str, Tensor]) -> None:
    """Load into the tensors of `state` in place. Collective if torch.distributed is initialized.

    Raises ValueError on all ranks if on any rank a tensor is missing, has another shape or is in a file that holds more
    than tensors, or if the ranks found different checkpoints.
    """
    metadata, fault, checksum = None, "", 0
    try:
        checksum, metadata = read_manifest(checkpoint).checksum, read_tensor_metadata(checkpoint)
        _check_fit(checkpoint, state, metadata)
    except ValueError as error:
        fault = str(error)
    verdicts = gather_objects((fault, checksum))
    if faults := [fault for fault, _ in verdicts if fault]:
        raise ValueError(faults[0])
    if len(set(verdicts)) > 1:
        raise ValueError(f"the ranks found different checkpoints at {checkpoint}: --resume needs a shared path")
    assert metadata is not None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # loading in one process is fine
            dcp.load(dict(state), storage_reader=_Reader(checkpoint, metadata))
    except dcp.CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise ValueError(f"cannot load {checkpoint}: rank {rank}: {str(reason).strip().splitlines()[0]}") from None


def gather_objects(mine: Value) -> list[Value]:
    """`mine` of every rank; of this process alone if torch.distributed is not initialized."""
    gathered = [mine]
    if dist.is_initialized():
        gathered *= dist.get_world_size()
        dist.all_gather_object(gathered, mine)
    return gathered


def _check_fit(checkpoint: Path, state: Mapping[str, Tensor], metadata: dcp.Metadata) -> None:
    saved = metadata.state_dict_metadata
    if missing := sorted(set(state) - set(saved)):
        raise ValueError(
            f"{checkpoint} has no {missing[0]}{f', and {len(missing) - 1} more' if len(missing) > 1 else ''}; custom "
            "experts can change their number of ranks only if the first dimension of their parameters is the expert"
        )
    for name, tensor in state.items():
        described = saved[name]
        assert isinstance(described, TensorStorageMetadata)
        if described.size != tensor.shape:
            raise ValueError(f"{checkpoint}: {name} has shape {list(described.size)}, expected {list(tensor.shape)}")


class _Reader(dcp.FileSystemReader):
    """Reads tensors as `metadata` describes, with torch.load(weights_only=True), and never opens `.metadata`."""

    def __init__(self, checkpoint: Path, metadata: dcp.Metadata):
        super().__init__(checkpoint)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self._metadata
