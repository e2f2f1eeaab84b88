"""The weights in a folder: a checkpoint, an export of this project, or a published model in Hugging Face's format.

Each is a `WeightsFolder`, which reads one tensor at a time by its global name. So a rank reads only the tensors that
it holds.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

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
from .manifest import EXPORT_FILE, RUN_FILE, read_manifest, verify_export
from .model_options import check_sizes, model_config, with_named_layers
from .partial import PartialLoad, group_names
from .tensor_folder import INDEX_FILE, TensorFolder
from .weights import CONFIG_FILE, MODEL_TYPE, PREFIX, WEIGHTS_FILE, OwnLayer, global_weights


class SavedModel:
    """The weights of a checkpoint, or of a folder that `moe-dualpipe export` wrote, whichever `folder` is."""

    def __init__(self, folder: Path):
        self._folder, self._is_checkpoint = folder, (folder / RUN_FILE).is_file()
        self._prefix = PREFIX if self._is_checkpoint else ""
        self.where = folder if self._is_checkpoint else folder / WEIGHTS_FILE

    @cached_property
    def checksum(self) -> int:
        """Reads all files of an export once, to compare their checksums. Raises ValueError if it is broken."""
        if self._is_checkpoint:
            return read_manifest(self._folder).checksum
        try:
            return verify_export(self._folder, WEIGHTS_FILE, CONFIG_FILE)
        except ValueError as error:
            reason = str(error).replace(f"{self._folder}/", "")
            raise ValueError(f"{self._folder} is broken: {reason}; export or copy it again") from None

    @cached_property
    def _tensors(self) -> TensorFolder:
        return (TensorFolder.of_checkpoint if self._is_checkpoint else TensorFolder)(self._folder)

    @cached_property
    def _options(self) -> dict[str, Any]:
        if self._is_checkpoint:
            return read_manifest(self._folder).model
        saved = read_named(self._folder / CONFIG_FILE)
        if not isinstance(saved, dict) or saved.pop("model_type", None) != MODEL_TYPE:
            raise ValueError(f"{self._folder / CONFIG_FILE} was not written by moe-dualpipe export")
        return saved

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        entries, prefix = self._tensors.entries.items(), self._prefix
        return {name.removeprefix(prefix): entry.shape for name, entry in entries if name.startswith(prefix)}

    @property
    def config(self) -> ModelConfig:
        """The model. Reads no weights. Raises ValueError if it cannot be built."""
        with self._building():
            return model_config(self._options)

    def config_with(self, named: Mapping[str, OwnLayer]) -> ModelConfig:
        """The model with its custom layers, which must be named: a folder never decides which class is imported.

        named: "experts", "router", "attention", "block". Raises ValueError if the model has other layers, or if it has
        more parameters than the folder.
        """
        config = self.config
        with self._building():
            check_sizes(config, [*self.shapes.values()])
        return with_named_layers(config, named, str(self._folder))

    @contextmanager
    def _building(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"cannot build the model of {printable(self._folder)}: {printable(error)}") from None

    def differences(self, model: ModelConfig) -> list[str]:
        return model_differences(self._options, model)

    def read_into(self, name: str, tensor: Tensor) -> None:
        tensor.copy_(self._tensors.read(self._prefix + name))

    def check_copies(self, names: Collection[str]) -> None:
        """Nothing to do: there is one copy of each weight."""


WeightsFolder = SavedModel | PublishedModel
"""A folder of weights by global name.

where: the path in messages. checksum: differs for folders with different tensors. `differences` returns the options in
which a model differs from that of the folder, one message each. `read_into` reads one weight into a tensor of the same
shape. `check_copies` raises ValueError if the folder has copies of these weights that differ from them.
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


def load_model(
    folder: Path, experts: OwnLayer = None, router: OwnLayer = None, attention: OwnLayer = None, block: OwnLayer = None
) -> TransformerStage:
    """Build the whole model of a checkpoint, or of an exported folder, in fp32.

    experts, router, attention, block: custom layers of this model. A folder never decides which class is imported, so
    they must be named. Raises ValueError if the folder is broken or has other layers.
    """
    model = build_model(
        saved_model(folder, {"experts": experts, "router": router, "attention": attention, "block": block})
    )
    state = {PREFIX + name: tensor for name, tensor in global_weights(model).items()}
    load_weights(folder, state, older_names([model]))
    return model


def saved_model(folder: Path, named: Mapping[str, OwnLayer]) -> ModelConfig:
    """The model of a checkpoint or an export, with its custom layers. named, and errors: as in `load_model`."""
    opened = SavedModel(folder)
    _ = opened.checksum
    return opened.config_with(named)


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


def load_weights(
    folder: Path, state: Mapping[str, Tensor], older: Mapping[str, str] | None = None, partial: bool = False
) -> PartialLoad:
    """Load the weights in `state` in place, and read only these. Returns the names of all ranks together. Collective.

    older: as in `load_checkpoint`. partial: load only those that the folder has, at least one.

    Raises ValueError on all ranks if on any rank the folder is broken, or a weight is missing or has another shape, and
    if the ranks found different weights.
    """
    fault, checksum, names = "", 0, PartialLoad((), (), ())
    try:
        opened = open_weights(folder)
        checksum = opened.checksum
        names = _load(opened, {n: t for n, t in state.items() if n.startswith(PREFIX)}, older or {}, partial)
    except (ValueError, StorageError) as error:
        fault = str(error)
    different = f"the ranks found different weights at {folder}: --weights needs a shared path, or equal copies"
    check_on_all_ranks(fault, checksum, different)  # a weight may be missing on one rank only
    parts = gather_objects((names.loaded, names.missing))
    loaded, missing = ({name for part in parts for name in part[i]} for i in range(2))
    ignored = {*names.loaded, *names.ignored} - loaded
    if partial and not loaded:
        has, wanted = group_names(ignored) or "no tensors", group_names(missing)
        raise ValueError(
            f"{open_weights(folder).where} has no weight of the model: it has {has}; the model has {wanted}"
        )
    return PartialLoad(sorted(loaded), sorted(missing), sorted(ignored))


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
