"""Find, verify and load checkpoints, under tensor names that do not depend on the parallel layout of the run.

Every tensor is saved once under its global name, however many ranks hold a replica of it. A checkpoint is a folder

    <run>/checkpoints/step-000320/    the tensors, run.json and tensors.json (manifest.py)

that gets this name only when it is complete (save.py). It may come from a stranger, so every field is checked.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import stores
from ..expert_parallel.gather import gather_objects
from ..messages import printable, quoted
from ..models import ModelConfig
from ..models.config import BUILT_IN
from ..models.layer_class import same_layer
from ..runtime.launch import Launch
from ..runtime.shared_errors import errors_on_all_ranks, raise_on_all_ranks
from .destinations import STEP_FOLDER, list_checkpoints
from .manifest import RUN_FILE, read_manifest, verify_checkpoint
from .tensor_folder import TensorFolder

# Options that do not change what the saved weights mean: those of initialization, loss and precision.
_MAY_DIFFER = {"init_std", "sequence_loss", "z_loss", "mtp_weight", "router_dtype"}

_EXPERT_HINT = (
    "custom experts can change --ep only if their tensors are stacked by expert, listed or shared (docs/experts.md)"
)


def find_checkpoint(path: str, warn: Callable[[str], None] | None = None) -> Path:
    """Return the checkpoint at `path`, or the newest intact one of the run at `path`.

    path: a folder, or a URL: then the result is a local folder that stands for it, with copies of the small files.
    Reads every file once to verify its checksum; on a store, only small files, and the sizes of the others, whose
    checksums are compared when they are loaded. Calls `warn` (default: one line on stderr of the first local rank) for
    each newer checkpoint that is broken. Raises ValueError, with the reasons, if there is no intact one, and
    StorageError if a store cannot be read.
    """
    given = stores.local_path(path)
    if stores.exists(given / RUN_FILE) or STEP_FOLDER.fullmatch(given.name):
        if fault := _find_fault(given):
            raise ValueError(f"{given} is broken: {fault}; {_suggest_other(given)}")
        return given
    faults = []
    for candidate in list_checkpoints(given / "checkpoints") or list_checkpoints(given):
        if not (fault := _find_fault(candidate)):
            for skipped in faults:
                (warn or _warn)(f"skipped broken checkpoint {skipped}")
            return candidate
        faults.append(f"{candidate}: {fault}")
    if faults:
        raise ValueError(f"all checkpoints in {path} are broken: {'; '.join(faults)}")
    raise ValueError(f"no checkpoint in {path}: give the folder of a run or of a checkpoint")


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
        sys.stderr.write(f"{Path(sys.argv[0]).name}: warning: {printable(text, 1000)}\n")


def check_model(checkpoint: Path, model: ModelConfig) -> int:
    """Return the step of `checkpoint`. Raises ValueError if it is unreadable or holds a model other than `model`.

    An option that did not exist when the checkpoint was saved has its default value. Options that only affect
    initialization, the loss or the precision of a product may differ.
    """
    saved = read_manifest(checkpoint)
    if found := model_differences(saved.model, model):
        raise ValueError(f"{checkpoint} holds another model: {'; '.join(found)}")
    return saved.step


def model_differences(saved: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """The options in which a saved model differs from `model`, one message each."""
    options = {field.name: (field.default, getattr(model, field.name)) for field in dataclasses.fields(model)}
    saved = {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}  # as JSON has it
    options |= dict.fromkeys(sorted(set(saved) - set(options)), ("unknown", "unknown"))
    return [
        f"{printable(key, 60)} was {quoted(saved.get(key, default), 60)}, now {now!r}"
        for key, (default, now) in options.items()
        if key not in _MAY_DIFFER
        and saved.get(key, default) != now
        and not (key in BUILT_IN and isinstance(saved.get(key), str) and same_layer(saved[key], now))
    ]


@torch.no_grad()
def load_checkpoint(checkpoint: Path, state: Mapping[str, Tensor], older: Mapping[str, str] | None = None) -> None:
    """Load into the tensors of `state` in place. Collective if torch.distributed is initialized.

    older: maps current weight names to those in older checkpoints (parameters.py).

    Raises ValueError on all ranks if on any rank a tensor is missing, has another shape, or cannot be read, or if the
    ranks found different checkpoints.
    """
    fault, checksum = "", 0
    try:
        checksum, saved = read_manifest(checkpoint).checksum, TensorFolder.of_checkpoint(checkpoint)
        state = with_older_names(state, saved.entries, older or {})
        check_shapes(checkpoint, state, {name: entry.shape for name, entry in saved.entries.items()})
    except ValueError as error:
        fault = str(error)
    check_on_all_ranks(
        fault, checksum, f"the ranks found different checkpoints at {checkpoint}: --resume needs a shared path"
    )
    with errors_on_all_ranks():
        for name in saved.by_position(state):
            state[name].copy_(saved.read(name))
    saved.close()


def check_on_all_ranks(fault: str, checksum: int, different: str) -> None:
    """Raise ValueError on all ranks if any rank has a fault, or if the checksums differ. Collective.

    fault: a message, or "". different: the message for checksums that differ.
    """
    raise_on_all_ranks(fault)
    if len({*gather_objects(checksum)}) > 1:
        raise ValueError(different)


def with_older_names(
    state: Mapping[str, Tensor], saved: Collection[str], older: Mapping[str, str]
) -> dict[str, Tensor]:
    """Rename the tensors of `state` that `saved` has only under their older names. Names are `kind.weight`."""

    def saved_name(name: str) -> str:
        kind, _, weight = name.partition(".")
        old = f"{kind}.{older.get(weight, weight)}"
        return old if name not in saved and old in saved else name

    return {saved_name(name): tensor for name, tensor in state.items()}


def check_shapes(where: Path, state: Mapping[str, Tensor], saved: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless `saved`, the shapes in `where`, has every tensor of `state`."""
    if missing := sorted(set(state) - set(saved)):
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{where} has no {missing[0]}{more}: {_why_missing(missing[0], saved)}")
    for name, tensor in state.items():
        if (shape := [*saved[name]]) != [*tensor.shape]:
            raise ValueError(f"{where}: {name} has shape {quoted(shape, 60)}, expected {[*tensor.shape]}")


def _why_missing(name: str, saved: Collection[str]) -> str:
    kind, _, weight = name.partition(".")
    if kind != "model" and f"model.{weight}" in saved:
        return "the weight was frozen; freeze it again, or start a new run from exported weights (--weights)"
    tensor = re.escape(re.sub(r"\.\d+(-\d+)?$", "", name))
    if any(re.fullmatch(tensor + r"(\.\d+)?\.\d+-\d+", other) for other in saved):
        return _EXPERT_HINT
    problem = "the model that was saved had no such tensor"
    return f"{problem}; earlier versions saved no buffers of custom layers: persistent=False leaves a buffer out"
