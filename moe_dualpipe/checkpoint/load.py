"""Checkpoints with torch.distributed.checkpoint, under names that do not depend on how the run was divided.

A tensor is saved under its global name (names.py), once, whichever ranks hold replicas. A checkpoint is a folder

    <run>/checkpoints/step-000320/    the tensors, run.json and tensors.json (manifest.py)

that appears under this name only when it is complete (saver.py), and is read as a file that anyone may have written.
"""

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..models import ModelConfig
from ..runtime.launch import Launch
from .manifest import RUN_FILE, read_manifest, read_tensor_metadata, verify_checkpoint
from .save import STEP_FOLDER

_COEFFICIENTS = {"init_std", "sequence_loss", "z_loss", "mtp_weight"}  # of ModelConfig, without a say in the forward
_UNKNOWN = "unknown"


def find_checkpoint(path: str, warn: Callable[[str], None] | None = None) -> Path:
    """The checkpoint at `path`, or the newest good one of the run at `path`.

    Reads every file of it once, to compare checksums. Passes `warn` (default: stderr of the first local rank) a line
    about each broken one that is newer. Raises ValueError, with the reasons, when there is no good one.
    """
    given = Path(path)
    if (given / RUN_FILE).exists() or STEP_FOLDER.fullmatch(given.name):
        if reason := _fault(given):
            raise ValueError(f"{given} is broken: {reason}; {_advice(given)}")
        return given
    candidates = list_checkpoints(given / "checkpoints") or list_checkpoints(given)
    faults = []
    for candidate in candidates:
        if not (reason := _fault(candidate)):
            for fault in faults:
                (warn or _warn)(f"passed over {fault}")
            return candidate
        faults.append(f"{candidate}: {reason}")
    if faults:
        raise ValueError(f"no good checkpoint in {path}: {'; '.join(faults)}")
    raise ValueError(f"no checkpoint in {path}: name the folder of a run, or a checkpoint in it")


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, good or not, those of later steps first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _fault(checkpoint: Path) -> str:
    try:
        verify_checkpoint(checkpoint)
    except ValueError as error:
        return str(error).replace(f"{checkpoint}/", "")
    return ""


def _advice(broken: Path) -> str:
    for other in list_checkpoints(broken.parent):
        if other != broken and not _fault(other):
            return f"the newest good one beside it is {other}"
    return "there is no good one beside it"


def _warn(text: str) -> None:
    if Launch.from_environment().local_rank == 0:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: warning: {text}\n")


def check_model(checkpoint: Path, model: ModelConfig) -> int:
    """Return the step of `checkpoint`. Raises ValueError if it is unreadable, or of a model other than `model`.

    A choice that did not exist when it was saved counts as what is now the default. Choices that only say how to train,
    or how to start, may differ.
    """
    saved = read_manifest(checkpoint)
    if found := model_differences(saved.model, model):
        raise ValueError(f"{checkpoint} holds another model: {'; '.join(found)}")
    return saved.step


def model_differences(there: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """In what a saved model is another than `model`, in words."""
    here, defaults = dataclasses.asdict(model), {field.name: field.default for field in dataclasses.fields(model)}
    return [
        f"{key} is {there.get(key, defaults.get(key, _UNKNOWN))!r} there and {here.get(key, _UNKNOWN)!r} here"
        for key in [*here, *sorted(set(there) - set(here))]
        if key not in _COEFFICIENTS and there.get(key, defaults.get(key, _UNKNOWN)) != here.get(key, _UNKNOWN)
    ]


def load_checkpoint(checkpoint: Path, state: Mapping[str, Tensor]) -> None:
    """Load into `state` in place. Collective, where there are other ranks.

    Raises ValueError, on all ranks alike, for a tensor that the checkpoint lacks or has in another shape, for ranks
    that would load different checkpoints, and for a file that holds anything but tensors.
    """
    metadata, fault, checksum = None, "", 0
    try:
        checksum, metadata = read_manifest(checkpoint).checksum, read_tensor_metadata(checkpoint)
        _check_fit(checkpoint, state, metadata)
    except ValueError as error:
        fault = str(error)
    verdicts: list[tuple[str, int]] = [(fault, checksum)]
    if dist.is_initialized():
        verdicts *= dist.get_world_size()
        dist.all_gather_object(verdicts, (fault, checksum))
    if faults := [fault for fault, _ in verdicts if fault]:
        raise ValueError(faults[0])
    if len(set(verdicts)) > 1:
        raise ValueError(f"the ranks see different checkpoints as {checkpoint}: give --resume one that all can read")
    assert metadata is not None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a process on its own is no mistake
            dcp.load(dict(state), storage_reader=_Reader(checkpoint, metadata))
    except dcp.CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise ValueError(f"cannot load {checkpoint}: rank {rank}: {str(reason).strip().splitlines()[0]}") from None


def _check_fit(checkpoint: Path, state: Mapping[str, Tensor], metadata: dcp.Metadata) -> None:
    saved = metadata.state_dict_metadata
    if lacking := sorted(set(state) - set(saved)):
        raise ValueError(
            f"{checkpoint} lacks {lacking[0]}{f' and {len(lacking) - 1} more' if len(lacking) > 1 else ''}; "
            "experts of your own can change their number of ranks only if their parameters stack experts first"
        )
    for name, tensor in state.items():
        described = saved[name]
        assert isinstance(described, TensorStorageMetadata)
        if described.size != tensor.shape:
            raise ValueError(f"{checkpoint} has {name} as {list(described.size)}, not as {list(tensor.shape)}")


class _Reader(dcp.FileSystemReader):
    """Reads tensors where `metadata` says they are, with torch.load(weights_only=True), and never opens `.metadata`."""

    def __init__(self, checkpoint: Path, metadata: dcp.Metadata):
        super().__init__(checkpoint)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self._metadata
