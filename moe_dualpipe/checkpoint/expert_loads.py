"""The file of a checkpoint with the measured loads of its experts."""

from pathlib import Path
from typing import Any

from ..data.strict_json import read_named
from ..messages import printable

LOADS_FILE = "expert_loads.json"
"""The file of a checkpoint with `layers`, the numbers of layers, and `loads`, [layers, experts]."""


def read_loads(path: Path) -> tuple[list[int], list[list[float]]]:
    """The numbers of the layers, from 0 if the file has none, and their loads. Raises ValueError for a wrong file."""
    found = read_named(path)
    loads = found.get("loads") if isinstance(found, dict) else None
    rows: list[Any] = loads if isinstance(loads, list) else [None]
    if not all(isinstance(row, list) and all(type(load) in (int, float) for load in row) for row in rows):
        raise ValueError(f'{printable(path)} must have "loads", a list of numbers for each layer')
    layers = found.get("layers", [*range(len(rows))])
    if not isinstance(layers, list) or len(layers) != len(rows) or any(type(layer) is not int for layer in layers):
        raise ValueError(f'"layers" in {printable(path)} must be a number for each list of "loads"')
    return layers, rows
