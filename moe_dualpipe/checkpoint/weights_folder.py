"""Start from the weights in a folder: an export of this project, or a published model in Hugging Face's format.

Both are a `WeightsFolder`, which reads one tensor at a time by its global name. So a rank reads only the tensors that
it holds.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..data import TOKENIZER_FILE, Tokenizer, UnknownTokenizer, find_tokenizer
from ..data.stores import StorageError, exists
from ..data.strict_json import read_named
from ..expert_parallel.gather import gather_objects
from ..expert_parallel.parameters import older_names
from ..messages import printable
from ..models import ModelConfig, TransformerStage, build_model
from .huggingface import PublishedModel
from .load import check_on_all_ranks, check_shapes, model_differences, with_older_names
from .manifest import EXPORT_FILE, verify_export
from .model_options import check_sizes, model_config, with_named_layers
from .partial import PartialLoad, group_names
from .tensor_folder import INDEX_FILE, TensorFolder
from .weights import CONFIG_FILE, MODEL_TYPE, PREFIX, WEIGHTS_FILE, OwnLayer, global_weights


class WeightsFolder(Protocol):
    """The weights of a model in a folder, by global name.

    where: the path in messages. checksum: differs for folders with different tensors.
    """

    @property
    def where(self) -> Path: ...

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]: ...

    @property
    def checksum(self) -> int: ...

    def differences(self, model: ModelConfig) -> list[str]:
        """The options in which the model of the folder differs from `model`, one message each."""
        ...

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Read one weight into a tensor of the same shape."""
        ...

    def check_copies(self, names: Collection[str]) -> None:
        """Raise ValueError if the folder has copies of these weights that differ from them."""
        ...


class ExportedModel:
    """A folder that `moe-dualpipe export` wrote. Creating it reads all files once, to verify their checksums.

    Raises ValueError if it is broken.
    """

    def __init__(self, folder: Path):
        self._folder, self.where = folder, folder / WEIGHTS_FILE
        try:
            self.checksum = verify_export(folder, WEIGHTS_FILE, CONFIG_FILE)
        except ValueError as error:
            raise ValueError(
                f"{folder} is broken: {str(error).replace(f'{folder}/', '')}; export or copy it again"
            ) from None

    @cached_property
    def _tensors(self) -> TensorFolder:
        return TensorFolder(self._folder)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._tensors.entries.items()}

    def differences(self, model: ModelConfig) -> list[str]:
        return model_differences(_saved_config(self._folder), model)

    def read_into(self, name: str, tensor: Tensor) -> None:
        tensor.copy_(self._tensors.read(name))

    def check_copies(self, names: Collection[str]) -> None:
        """Nothing to do: an export has one copy of each weight."""


def open_weights(folder: Path) -> WeightsFolder:
    """Open a folder of weights, and check it as a whole. Raises ValueError if it is broken or has no weights."""
    return PublishedModel(folder) if is_published(folder) else ExportedModel(folder)


def model_of(folder: Path) -> ModelConfig:
    """The model of a folder of weights. Reads no weights. Raises ValueError if it cannot be built."""
    if is_published(folder):
        return PublishedModel(folder).config
    try:
        return model_config(_saved_config(folder))
    except ValueError as error:
        raise ValueError(f"cannot build the model of {printable(folder)}: {error}") from None


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


def load_exported(
    folder: Path, experts: OwnLayer = None, router: OwnLayer = None, attention: OwnLayer = None, block: OwnLayer = None
) -> TransformerStage:
    """Build the whole model of an exported folder in fp32.

    experts, router, attention, block: as for `load_model`. Raises ValueError if the folder is broken or has other
    layers.
    """
    model = build_model(
        exported_model(folder, {"experts": experts, "router": router, "attention": attention, "block": block})
    )
    state = {PREFIX + name: tensor for name, tensor in global_weights(model).items()}
    load_weights(folder, state, older_names([model]))
    return model


def exported_model(folder: Path, named: Mapping[str, OwnLayer]) -> ModelConfig:
    """The model of an exported folder, with its custom layers. named, and errors: as in `load_exported`."""
    exported, config = ExportedModel(folder), model_of(folder)
    try:
        check_sizes(config, [*exported.shapes.values()])
    except ValueError as error:
        raise ValueError(f"cannot build the model of {printable(folder)}: {printable(error)}") from None
    return with_named_layers(config, named, str(folder))


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


def load_weights(folder: Path, state: Mapping[str, Tensor], older: Mapping[str, str] | None = None) -> None:
    """Load the weights in `state` in place, and read only these. Collective.

    older: as in `load_checkpoint`.

    Raises ValueError on all ranks if on any rank the folder is broken, or a weight is missing or has another shape, and
    if the ranks found different weights.
    """
    _load_on_all_ranks(folder, state, older or {}, partial=False)


def load_weights_in_part(
    folder: Path, state: Mapping[str, Tensor], older: Mapping[str, str] | None = None
) -> PartialLoad:
    """Load those weights of `state` that the folder has, in place. Returns the names of all ranks together. Collective.

    older: as in `load_checkpoint`.

    Raises ValueError on all ranks if on any rank the folder is broken or a weight has another shape, if the folder has
    no weight of the model, and if the ranks found different weights.
    """
    names = _load_on_all_ranks(folder, state, older or {}, partial=True)
    parts = gather_objects((names.loaded, names.missing))
    loaded, missing = ({name for part in parts for name in part[i]} for i in range(2))
    ignored = {*names.loaded, *names.ignored} - loaded
    if not loaded:
        has, wanted = group_names(ignored) or "no tensors", group_names(missing)
        raise ValueError(
            f"{open_weights(folder).where} has no weight of the model: it has {has}; the model has {wanted}"
        )
    return PartialLoad(sorted(loaded), sorted(missing), sorted(ignored))


def _load_on_all_ranks(
    folder: Path, state: Mapping[str, Tensor], older: Mapping[str, str], partial: bool
) -> PartialLoad:
    """Load the weights of this rank, and raise the error of any rank on all ranks. Returns the names of this rank."""
    fault, checksum, names = "", 0, PartialLoad((), (), ())
    try:
        opened = open_weights(folder)
        checksum = opened.checksum
        names = _load(opened, {n: t for n, t in state.items() if n.startswith(PREFIX)}, older, partial)
    except (ValueError, StorageError) as error:
        fault = str(error)
    different = f"the ranks found different weights at {folder}: --weights needs a shared path, or equal copies"
    check_on_all_ranks(fault, checksum, different)  # a weight may be missing on one rank only
    return names


@torch.no_grad()
def _load(opened: WeightsFolder, state: Mapping[str, Tensor], older: Mapping[str, str], partial: bool) -> PartialLoad:
    shapes = opened.shapes
    state = with_older_names(state, {PREFIX + name for name in shapes}, older)
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    missing = sorted(weights.keys() - shapes.keys()) if partial else []
    for name in missing:
        del weights[name]
    check_shapes(opened.where, weights, shapes)
    for name, tensor in weights.items():
        opened.read_into(name, tensor)
    opened.check_copies(weights.keys())
    return PartialLoad([*weights], missing, sorted(shapes.keys() - weights.keys()))


def _saved_config(folder: Path) -> dict:
    """config.json of an export, without its model_type. Raises ValueError."""
    saved = read_named(folder / CONFIG_FILE)
    if not isinstance(saved, dict) or saved.pop("model_type", None) != MODEL_TYPE:
        raise ValueError(f"{folder / CONFIG_FILE} was not written by moe-dualpipe export")
    return saved
