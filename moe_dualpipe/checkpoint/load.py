"""Find and verify checkpoints, whose tensors have names that do not depend on the parallel layout of the run.

Every tensor is saved once under its global name, however many ranks hold a replica of it. A checkpoint is a folder

    <run>/checkpoints/step-000320/    safetensors files, and run.json, which lists them (manifest.py)

that gets this name only when it is complete (save.py). It may come from a stranger, so every field is checked.
"""

import sys
from collections.abc import Callable, Collection
from pathlib import Path

from ..data import stores
from ..messages import printable, quoted
from ..models import ModelConfig
from ..runtime.launch import Launch
from .destinations import STEP_FOLDER, list_checkpoints
from .huggingface.config import different_options
from .manifest import RUN_FILE, verify_checkpoint
from .weights import SavedModel


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
            raise ValueError(
                f"{given} is broken: {fault}; --resume with the folder of its run takes the newest intact one"
            )
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


def _warn(text: str) -> None:
    if Launch.from_environment().local_rank == 0:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: warning: {printable(text, 1000)}\n")


def check_model(checkpoint: Path, model: ModelConfig) -> int:
    """Return the step of `checkpoint`. Raises ValueError if it is unreadable or holds a model other than `model`.

    An option that did not exist when the checkpoint was saved has its default value. Options that only affect
    initialization, the loss or the precision of a product may differ.
    """
    saved = SavedModel(checkpoint)
    if found := differences(saved.config, model):
        raise ValueError(f"{checkpoint} holds another model: {'; '.join(found)}")
    return saved.step


def differences(saved: ModelConfig, model: ModelConfig, but: Collection[str] = ()) -> list[str]:
    """The options, except those in `but`, in which a saved model differs from `model`, one message each."""
    return [
        f"{name} was {quoted(was, 60)}, now {now!r}"
        for name, was, now in different_options(saved, model)
        if name not in but
    ]
