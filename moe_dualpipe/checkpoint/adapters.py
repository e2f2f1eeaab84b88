"""Low-rank adapters (models/lora.py) in a checkpoint: their description, and their matrices beside the base weights.

lora.json says rank, scale and targets. The matrices are tensors like all others, so a resumed run finds them by their
names. Whoever reads the model gets merged weights, W + scale * B A: generation, evaluation, exports and new runs need
to know nothing of adapters.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from ..data.strict_json import read_named
from ..messages import check_range, printable
from ..models.config import LoRA
from ..models.lora import adapted_weight

LORA_FILE = "lora.json"
Pairs = Mapping[str, list[tuple[str, str]]]
"""The adapters of each adapted weight, by its global name: the names of A and B of each of its matrices."""


@dataclass(frozen=True, slots=True)
class SavedAdapters:
    """The contents of lora.json. base: the --weights from which the run started."""

    lora: LoRA
    base: str | None = None

    def file(self) -> dict[str, bytes]:
        """The file for a checkpoint: name -> content."""
        return {LORA_FILE: json.dumps(asdict(self), indent=2).encode()}


def saved_adapters(checkpoint: Path) -> SavedAdapters | None:
    """The description of the adapters in a checkpoint; None if it has none. Raises ValueError for an invalid one."""
    path = checkpoint / LORA_FILE
    if not path.is_file():
        return None
    try:
        saved = msgspec.convert(read_named(path, dict), SavedAdapters)
        check_range("rank", saved.lora.rank, 1)
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{printable(path)}: {printable(error)}") from None
    return saved


def adapter_pairs(names: Iterable[str]) -> Pairs:
    """The adapters among the tensors with these global names. Raises ValueError for half of a pair."""
    found: dict[str, dict[tuple[int, str], str]] = {}
    for name in names:
        if adapted := adapted_weight(name):
            weight, matrix, number = adapted
            found.setdefault(weight, {})[number, matrix] = name
    pairs = {}
    for weight, matrices in found.items():
        wanted = [(number, matrix) for number in range(len(matrices) // 2) for matrix in "AB"]
        if sorted(matrices) != wanted:
            raise ValueError(f"the adapters of {printable(weight)} are incomplete")
        pairs[weight] = [(matrices[number, "A"], matrices[number, "B"]) for number, _ in wanted[::2]]
    return pairs
