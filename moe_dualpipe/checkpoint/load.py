"""Find the weights that a run starts from, check that they fit its model, and load them.

Weights are in a checkpoint, in a folder in Hugging Face's format, or given from Python. All of them have the same
names, which do not depend on the parallel layout, so each rank reads only the tensors that it holds, one at a time.

A checkpoint is a folder <run>/checkpoints/step-000320 with safetensors files, and run.json, which lists them
(manifest.py). It may come from a stranger, so every field is checked.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..data import stores
from ..data.strict_json import read_if_there
from ..expert_parallel.gather import gather_objects
from ..messages import printable, quoted, shell_word
from ..models import ModelConfig
from ..models.config import BUILT_IN, options_field
from ..models.lora import adapted_weight
from ..runtime.launch import Launch
from ..runtime.shared_errors import errors_on_all_ranks
from .destinations import CONFIG_FILE, STEP_FOLDER, hold, hold_each, release, step_of
from .huggingface.companions import companions_of, read_companions
from .huggingface.config import different_options, published_balance
from .huggingface.peft import TENSOR_FILE as ADAPTER_FILE
from .huggingface.peft import PeftAdapter
from .huggingface.published import PublishedModel
from .manifest import RUN_FILE, verify_checkpoint
from .weights import PREFIX, PartialLoad, SavedModel, group_names

SavedWeights = SavedModel | PublishedModel
_WHY_MISSING = "a frozen weight must stay frozen, and custom experts may need the same --ep (docs/custom_layers.md)"

# ---- Find ----


def find_checkpoint(path: str, warn: Callable[[str], None] | None = None, newest: int | None = None) -> Path:
    """Return the checkpoint at `path`, or the newest intact one of the run at `path`.

    The run may save meanwhile: in a local folder, the result is not removed until this process has loaded it, finds
    another one, or ends. newest: ignore those of later steps, which other ranks may not have seen.
    path: a folder, or a URL: then the result is a local folder that stands for it, with copies of the small files.
    Reads every file once to verify its checksum; on a store, only small files, and the sizes of the others, whose
    checksums are compared when they are loaded. Calls `warn` (default: one line on stderr of the first local rank) for
    each newer checkpoint that is broken. Raises ValueError, with the reasons, if there is no intact one, and
    StorageError if a store cannot be read.
    """
    given = stores.local_path(path)
    if stores.exists(given / RUN_FILE) or STEP_FOLDER.fullmatch(given.name):
        hold(given)
        if fault := _find_fault(given):
            raise ValueError(
                f"{given} is broken: {fault}; --resume with the folder of its run takes the newest intact one"
            )
        return given
    faults = []
    for candidate in hold_each(given):
        if newest is not None and step_of(candidate) > newest:
            continue
        if not (fault := _find_fault(candidate)):
            for skipped in faults:
                (warn or _warn)(f"skipped broken checkpoint {skipped}")
            return candidate
        faults.append(f"{candidate}: {fault}")
    if faults:
        raise ValueError(f"all checkpoints in {path} are broken: {'; '.join(faults)}")
    missing = stores.url_of(given) is None and not given.exists()
    adapter = f"it is an adapter: use train.py --weights MODEL --set lora.adapter={shell_word(path)}, or its run"
    why = adapter if stores.exists(given / ADAPTER_FILE) else "give the folder of a run or of a checkpoint"
    raise ValueError(f"no checkpoint in {path}: {'it does not exist' if missing else why}")


def _find_fault(checkpoint: Path) -> str:
    try:
        verify_checkpoint(checkpoint)
    except ValueError as error:
        return str(error).replace(f"{checkpoint}/", "")
    return ""


def _warn(text: str) -> None:
    if Launch.from_environment().local_rank == 0:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: warning: {printable(text, 1000)}\n")


def find_weights(path: str, newest: int | None = None) -> Path:
    """The folder of a published model at `path`, or the checkpoint found there. As `find_checkpoint`."""
    folder = stores.local_path(path)
    stores.open_folder(folder)
    if is_published(folder):
        return folder
    if (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{printable(folder)} is neither a run nor a published model: convert what an earlier version exported "
            "with examples/convert_checkpoint.py"
        )
    return find_checkpoint(path, newest=newest)


def is_published(folder: Path) -> bool:
    """Whether config.json in `folder` is that of a published model. Raises ValueError if it cannot be read."""
    config = read_if_there(folder / CONFIG_FILE)
    return isinstance(config, dict) and config.get("model_type") not in (None, "moe-dualpipe")


def start_companions(folder: Path) -> dict[str, str]:
    """The texts of the small files of the published model in `folder`, or from which its checkpoint comes."""
    return read_companions(folder) if is_published(folder) else companions_of(folder)


def open_weights(folder: Path) -> SavedWeights:
    """Open what `find_weights` has found. Raises ValueError if it is broken."""
    return (PublishedModel if is_published(folder) else SavedModel)(folder)


def start_model(resume: str | None, weights: str | None) -> ModelConfig | None:
    """The model of a run, a checkpoint or a published model, without its custom layers, which options must name.

    Returns None without such a path, and if it cannot be read: then planning the run raises the error. Raises
    StorageError if a store cannot be read.
    """
    if not (resume or weights):
        return None
    try:
        path = stores.local_path(resume or weights or "")
        path = next(hold_each(path), path)
        stores.open_folder(path)
        opened = open_weights(path)
        model = opened.config
        if isinstance(opened, PublishedModel):
            model = dataclasses.replace(model, sequence_loss=published_balance(opened.source))
    except stores.StorageError:
        raise
    except (ValueError, OSError):
        return None
    finally:
        release()
    for field in model.own_layers:
        model = dataclasses.replace(model, **{field: BUILT_IN[field][0], options_field(field): ""})
    return model


# ---- Check the model ----


def check_model(checkpoint: Path, model: ModelConfig) -> int:
    """Return the step of `checkpoint`. Raises ValueError if it is unreadable or holds a model other than `model`.

    An option that did not exist when the checkpoint was saved has its default value. Options that only affect
    initialization, the loss or the precision of a product may differ.
    """
    saved = SavedModel(checkpoint)
    _differences(saved, model)
    return saved.step


def check_weights(folder: Path, model: ModelConfig, partial: bool = False) -> list[str]:
    """Return the options in which the model of `folder` differs from `model`, one message each.

    Raises ValueError if the folder is broken, and without `partial` if it has another model. The MTP modules of a
    published model may be left out.
    """
    return _differences(open_weights(folder), model, partial, "; --weights-partial loads the weights that both have")


def _differences(opened: SavedWeights, model: ModelConfig, partial: bool = False, way_out: str = "") -> list[str]:
    """The options in which the model of `opened` differs. Raises ValueError for any without `partial`."""
    left_out = {"mtp_layers"} if isinstance(opened, PublishedModel) and not model.mtp_layers else set()
    found = [
        f"{name} was {quoted(was, 60)}, now {now!r}"
        for name, was, now in different_options(opened.config, model)
        if name not in left_out
    ]
    if found and not partial:
        raise ValueError(f"{printable(opened.where)} holds another model: {'; '.join(found)}{way_out}")
    return found


# ---- Load ----


@torch.no_grad()
def load_state(
    open_folder: Callable[[], SavedWeights | PeftAdapter],
    state: Mapping[str, Tensor],
    different: str,
    partial: bool = False,
) -> PartialLoad:
    """Load into the tensors of `state` in place. Collective if torch.distributed is initialized.

    different: the error if ranks open different folders. partial: load only what the folder has, at least one tensor.
    Returns the names, with `partial` those of all ranks.

    Raises ValueError or OSError on all ranks if on any rank a tensor is missing, has another shape, or cannot be read.
    """
    with errors_on_all_ranks():
        opened = open_folder()
        shapes = opened.shapes
        missing = {name for name in state if name not in shapes} if partial else set()
        found = {name: tensor for name, tensor in state.items() if name not in missing}
        _check_shapes(opened.where, found, shapes)
        checksum = opened.checksum
    if len({*gather_objects(checksum)}) > 1:
        raise ValueError(different)
    ranks = gather_objects(({*found}, missing)) if partial else [({*found}, missing)]
    loaded, missing = (set().union(*names) for names in zip(*ranks, strict=True))
    result = PartialLoad(sorted(loaded), sorted(missing), sorted(shapes.keys() - loaded))
    if partial and not loaded:
        has, wanted = group_names(result.ignored) or "no tensors", group_names(missing)
        raise ValueError(f"{opened.where} has no weight of the model: it has {has}; the model has {wanted}")
    with errors_on_all_ranks():
        opened.read(found)
    # The other ranks of this machine have read the copies, too.
    stores.drop(opened.where, [path.name for path in opened.where.glob("*.safetensors")])
    release()
    return result


def _check_shapes(
    where: object, state: Mapping[str, Tensor], saved: Mapping[str, Sequence[int]], why: str = _WHY_MISSING
) -> None:
    """Raise ValueError unless `saved`, the shapes in `where`, has every tensor of `state`."""
    if missing := sorted(set(state) - set(saved)):
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{where} has no {missing[0]}{more}: {why}")
    for name, tensor in state.items():
        if (shape := [*saved[name]]) != [*tensor.shape]:
            raise ValueError(f"{where}: {name} has shape {quoted(shape, 60)}, expected {[*tensor.shape]}")


def load_checkpoint(checkpoint: Path, state: Mapping[str, Tensor]) -> None:
    """Load into the tensors of `state` in place. Collective. Errors: as in `load_state`.

    Names are `kind.weight`, such as exp_avg.head.weight.
    """
    different = f"the ranks found different checkpoints at {checkpoint}: --resume needs a shared path"
    load_state(lambda: SavedModel(checkpoint, ""), state, different)


def load_saved(checkpoint: Path, state: Mapping[str, Tensor]) -> bool:
    """`load_checkpoint`, if the checkpoint has these tensors. Otherwise returns False and changes nothing."""
    with errors_on_all_ranks():
        saved = {*state} <= {*SavedModel(checkpoint, "").shapes}
    if saved:
        load_checkpoint(checkpoint, state)
    return saved


def load_weights(folder: Path, state: Mapping[str, Tensor], partial: bool = False) -> PartialLoad:
    """Load the weights in `state` in place, and read only these. Collective. Arguments and errors: as in `load_state`.

    folder: from `find_weights`. In `state`, the names of weights begin with "model.".
    """
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    different = f"the ranks found different weights at {folder}: --weights needs a shared path, or equal copies"
    return load_state(lambda: open_weights(folder), weights, different, partial)


def load_adapter(
    folder: Path, state: Mapping[str, Tensor], model: ModelConfig, companions: Mapping[str, str]
) -> PartialLoad:
    """Load an adapter in PEFT's format into the adapters in `state`. Those that it lacks keep their values. Collective.

    model, companions: of the weights that it adapts. Errors: as in `load_state`.
    """
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    own = {name: tensor for name, tensor in weights.items() if adapted_weight(name)}
    different = f"the ranks found different adapters at {folder}: lora.adapter needs a shared path, or equal copies"
    return load_state(lambda: PeftAdapter(folder, model, companions), own, different, partial=True)


@torch.no_grad()
def load_tensors(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the weights of `state`, this rank's part of the model, in place. Collective.

    weights: all weights of a model by global name, the same on all ranks.

    Raises ValueError on all ranks if on any rank a weight is missing or has another shape, and for a weight that no
    rank has; then no rank has copied anything.
    """
    own = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    with errors_on_all_ranks():
        for name, given in weights.items():
            if not isinstance(given, Tensor):
                raise ValueError(f"`weights`: {name} is not a tensor, but {type(given).__name__}")
        why = "it must have all weights of the model, as global_weights(model) has them"
        _check_shapes("`weights`", own, {name: given.shape for name, given in weights.items()}, why)
    if surplus := weights.keys() - set().union(*gather_objects({*own})):
        raise ValueError(f"`weights` has names that the model does not have: {group_names(surplus)}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])
