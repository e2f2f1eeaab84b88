"""The file of a checkpoint with the measured loads of its experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..data import strict_json
from ..data.stores import is_url
from ..messages import printable
from .load import find_checkpoint

LOADS_FILE = "expert_loads.json"
"""The file of a checkpoint with `layers`, the numbers of layers, `loads`, [layers, experts], the sum over steps, and
`maxima`, [layers]: the largest load of an expert in a step divided by the mean, as a mean over steps."""


@dataclass(frozen=True, slots=True)
class _Loads:
    loads: list[list[float]]
    layers: list[int] | None = None
    maxima: list[float] | None = None


def loads_file(layers: Sequence[int], load_LE: Tensor, maxima_L: Tensor) -> dict[str, bytes]:
    """The file, by its name; {} without layers or loads. load_LE: tokens per layer and expert, [L, E]."""
    if not load_LE.any():
        return {}
    value = {"layers": [*layers], "loads": load_LE.tolist(), "maxima": maxima_L.tolist()}
    return {LOADS_FILE: strict_json.write(value).encode()}


def find_loads(run_or_file: str) -> Path:
    """The file with the loads of a run, or the file itself. Raises the errors of `find_checkpoint`."""
    if not is_url(run_or_file) and not Path(run_or_file).is_dir():
        return Path(run_or_file)
    checkpoint = find_checkpoint(run_or_file)
    if not (file := checkpoint / LOADS_FILE).is_file():
        raise ValueError(f"{printable(checkpoint)} has no {LOADS_FILE}: its model has no experts, or it is older")
    return file


def read_loads(path: Path) -> tuple[list[int], list[list[float]], list[float]]:
    """The numbers of the layers, their loads and their maxima. By default, layers count from 0, and maxima are 1.

    Raises ValueError for an invalid file.
    """
    found = strict_json.read_named(path, _Loads)
    layers, maxima = found.layers or [*range(len(found.loads))], found.maxima or [1.0] * len(found.loads)
    if not len(layers) == len(maxima) == len(found.loads):
        raise ValueError(f'"layers" and "maxima" in {printable(path)} must be a number for each list of "loads"')
    return layers, found.loads, maxima
