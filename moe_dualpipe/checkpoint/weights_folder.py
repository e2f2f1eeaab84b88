"""The weights in a folder: a checkpoint, an export of this project, or a published model in Hugging Face's format.

Each is a `WeightsFolder`, which reads one tensor at a time by its global name. So a rank reads only the
tensors that it holds.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import TOKENIZER_FILE, Tokenizer, UnknownTokenizer, find_tokenizer
from ..data.stores import exists
from ..data.strict_json import read_named
from ..expert_parallel.gather import gather_objects
from ..expert_parallel.parameters import older_names
from ..messages import printable, quoted
from ..models import ModelConfig, TransformerStage, build_model
from ..runtime.shared_errors import errors_on_all_ranks
from .huggingface import PublishedModel
from .load import model_differences
from .manifest import EXPORT_FILE, RUN_FILE, read_manifest, verify_export
from .model_options import check_sizes, model_config, with_named_layers
from .partial import PartialLoad, group_names
from .tensor_folder import INDEX_FILE, TensorFolder
from .weights import CONFIG_FILE, MODEL_TYPE, PREFIX, WEIGHTS_FILE, OwnLayer, global_weights

_EXPERT_HINT = (
    "custom experts can change --ep only if their tensors are stacked by expert, listed or shared (docs/experts.md)"
)


class SavedModel:
    """A `WeightsFolder`: a checkpoint, or a folder that `moe-dualpipe export` wrote, whichever `folder` is.

    prefix: of the tensors of a checkpoint to read. The names are without it.
    """

    def __init__(self, folder: Path, prefix: str = PREFIX):
        self._folder = folder
        self._manifest = read_manifest(folder) if (folder / RUN_FILE).is_file() else None
        self._prefix = prefix if self._manifest else ""
        self.where = folder if self._manifest else folder / WEIGHTS_FILE

    @cached_property
    def checksum(self) -> int:
        """Reads all files of an export once, to compare their checksums. Raises ValueError if it is broken."""
        if self._manifest:
            return self._manifest.checksum
        try:
            return verify_export(self._folder)
        except ValueError as error:
            reason = str(error).replace(f"{self._folder}/", "")
            raise ValueError(f"{self._folder} is broken: {reason}; export or copy it again") from None

    @cached_property
    def _tensors(self) -> TensorFolder:
        return TensorFolder(self._folder, self._manifest)

    @cached_property
    def _options(self) -> Mapping[str, Any]:
        if self._manifest:
            return self._manifest.model
        saved = read_named(self._folder / CONFIG_FILE)
        if not isinstance(saved, dict) or saved.pop("model_type", None) != MODEL_TYPE:
            raise ValueError(f"{self._folder / CONFIG_FILE} was not written by moe-dualpipe export")
        return saved

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        entries, prefix = self._tensors.entries.items(), self._prefix
        return {name.removeprefix(prefix): entry.shape for name, entry in entries if name.startswith(prefix)}

    @property
    def config(self) -> ModelConfig:
        """The model. Reads no weights. Raises ValueError if its options are invalid."""
        try:
            return model_config(self._options)
        except ValueError as error:
            raise ValueError(f"cannot build the model of {printable(self._folder)}: {printable(error)}") from None

    def config_with(self, named: Mapping[str, OwnLayer]) -> ModelConfig:
        """The model with its custom layers, which must be named: a folder never decides which class is imported.

        named: "experts", "router", "attention", "block". Raises ValueError if the model has other layers, or if it has
        more parameters than the folder.
        """
        config = self.config
        check_sizes(config, [*self.shapes.values()], printable(self._folder))
        return with_named_layers(config, named, str(self._folder))

    def differences(self, model: ModelConfig) -> list[str]:
        return model_differences(self._options, model)

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        for name in self._tensors.by_position(self._prefix + name for name in tensors):
            tensors[name.removeprefix(self._prefix)].copy_(self._tensors.read(name))
        self._tensors.close()


WeightsFolder = SavedModel | PublishedModel
"""A folder of tensors by name.

where: the path in messages. shapes: of the tensors, by name. checksum: differs for folders with different tensors.
`differences` returns the options in which a model differs from that of the folder, one message each. `read` reads into
tensors of the same shapes, and raises ValueError if they cannot be read.
"""


def open_weights(folder: Path) -> WeightsFolder:
    """Open a folder of weights, and check it as a whole. Raises ValueError if it is broken or has no weights."""
    if is_published(folder):
        return PublishedModel(folder)
    opened = SavedModel(folder)
    _ = opened.checksum
    return opened


def model_of(folder: Path) -> ModelConfig:
    """The model of a folder of weights. Reads no weights. Raises ValueError if it cannot be built."""
    return (PublishedModel if is_published(folder) else SavedModel)(folder).config


def is_published(folder: Path) -> bool:
    """Whether config.json in `folder` is that of a published model. Raises ValueError if it cannot be read."""
    path = folder / CONFIG_FILE
    if (folder / EXPORT_FILE).is_file() or not path.is_file():
        return False
    config = read_named(path)
    return isinstance(config, dict) and config.get("model_type") not in (None, MODEL_TYPE)


def start_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of the model in a folder or checkpoint. Unknown for a published model without tokenizer.json."""
    if is_published(folder) and not (folder / TOKENIZER_FILE).is_file():
        return UnknownTokenizer(vocab_size)
    return find_tokenizer(folder)


def saved_model(folder: Path, named: Mapping[str, OwnLayer]) -> tuple[SavedModel, ModelConfig]:
    """A checkpoint or an export, and its model with its custom layers. named, and errors: as in `load_model`."""
    opened = SavedModel(folder)
    return opened, opened.config_with(named)


def load_model(
    folder: Path, experts: OwnLayer = None, router: OwnLayer = None, attention: OwnLayer = None, block: OwnLayer = None
) -> TransformerStage:
    """Build the whole model of a checkpoint, or of an exported folder, in fp32.

    experts, router, attention, block: custom layers of this model. A folder never decides which class is imported, so
    they must be named. Raises ValueError if the folder is broken or has other layers.
    """
    named = {"experts": experts, "router": router, "attention": attention, "block": block}
    opened, config = saved_model(folder, named)
    model = build_model(config)
    load_state(lambda: opened, global_weights(model), older_names([model]), "")
    return model


def check_weights(folder: Path, model: ModelConfig, partial: bool = False) -> list[str]:
    """Return the options in which the model of `folder` differs from `model`, one message each.

    Raises ValueError unless `folder` is intact, and without `partial` if it has another model.
    """
    if not folder.is_dir():
        raise ValueError(f"--weights {printable(folder)} is not a folder")
    opened = open_weights(folder)
    if not (folder / CONFIG_FILE).is_file() or not any(map(exists, (folder / WEIGHTS_FILE, folder / INDEX_FILE))):
        raise ValueError(
            f"--weights {printable(folder)} must hold {CONFIG_FILE} and {WEIGHTS_FILE}: give a folder from "
            "moe-dualpipe export, or of a published model"
        )
    differences = opened.differences(model)
    if differences and not partial:
        way_out = "--weights-partial loads the weights that both have"
        raise ValueError(f"{printable(folder)} holds another model: {'; '.join(differences)}; {way_out}")
    return differences


@torch.no_grad()
def load_state(
    open_folder: Callable[[], WeightsFolder], state: Mapping[str, Tensor], older: Mapping[str, str], different: str,
    partial: bool = False,
) -> PartialLoad:  # fmt: skip
    """Load into the tensors of `state` in place. Collective if torch.distributed is initialized.

    older: maps names to those in older folders (parameters.py). different: the error if ranks open different folders.
    partial: load only what the folder has, at least one tensor. Returns the names, with `partial` those of all ranks.

    Raises ValueError or OSError on all ranks if on any rank a tensor is missing, has another shape, or cannot be read.
    """
    with errors_on_all_ranks():
        opened = open_folder()
        shapes = opened.shapes
        renamed = {name: old for name, old in older.items() if name not in shapes and old in shapes}
        named = {renamed.get(name, name): tensor for name, tensor in state.items()}
        missing = {name for name in named if name not in shapes} if partial else set()
        named = {name: tensor for name, tensor in named.items() if name not in missing}
        _check_shapes(opened.where, named, shapes)
        checksum = opened.checksum
    if len({*gather_objects(checksum)}) > 1:
        raise ValueError(different)
    ranks = gather_objects(({*named}, missing)) if partial else [({*named}, missing)]
    loaded, missing = (set().union(*names) for names in zip(*ranks, strict=True))
    found = PartialLoad(sorted(loaded), sorted(missing), sorted(shapes.keys() - loaded))
    if partial and not loaded:
        has, wanted = group_names(found.ignored) or "no tensors", group_names(missing)
        raise ValueError(f"{opened.where} has no weight of the model: it has {has}; the model has {wanted}")
    with errors_on_all_ranks():
        opened.read(named)
    return found


def _check_shapes(where: Path, state: Mapping[str, Tensor], saved: Mapping[str, Sequence[int]]) -> None:
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


def load_checkpoint(checkpoint: Path, state: Mapping[str, Tensor], older: Mapping[str, str] | None = None) -> None:
    """Load into the tensors of `state` in place. Collective. older, and errors: as in `load_state`.

    Names are `kind.weight`, such as exp_avg.head.weight; those in `older` are without the kind.
    """
    kinds = {name.partition(".")[0] for name in state}
    renamed = {f"{kind}.{name}": f"{kind}.{old}" for kind in kinds for name, old in (older or {}).items()}
    different = f"the ranks found different checkpoints at {checkpoint}: --resume needs a shared path"
    load_state(lambda: SavedModel(checkpoint, ""), state, renamed, different)


def load_weights(
    folder: Path, state: Mapping[str, Tensor], older: Mapping[str, str] | None = None, partial: bool = False
) -> PartialLoad:
    """Load the weights in `state` in place, and read only these. Collective. Arguments and errors: as in `load_state`.

    In `state`, the names of weights begin with "model."; in `older`, they do not.
    """
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    different = f"the ranks found different weights at {folder}: --weights needs a shared path, or equal copies"
    return load_state(lambda: open_weights(folder), weights, older or {}, different, partial)
