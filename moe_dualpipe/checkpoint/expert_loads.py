"""Files about experts: the loads that a checkpoint stores, and the placements of `moe-dualpipe model balance`."""

from pathlib import Path
from typing import Any

from ..data.stores import is_url
from ..data.strict_json import read_named
from ..expert_parallel.placement import Placement
from ..messages import printable
from .load import find_checkpoint

LOADS_FILE = "expert_loads.json"
"""The file of a checkpoint with `layers`, the numbers of layers, and `loads`, [layers, experts]."""


def find_loads(run_or_file: str) -> Path:
    """The file with the loads of a run, or the file itself. Raises the errors of `find_checkpoint`."""
    if not is_url(run_or_file) and not Path(run_or_file).is_dir():
        return Path(run_or_file)
    checkpoint = find_checkpoint(run_or_file)
    if not (file := checkpoint / LOADS_FILE).is_file():
        raise ValueError(f"{printable(checkpoint)} has no {LOADS_FILE}: its model has no experts, or it is older")
    return file


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


def read_placement(path: Path) -> tuple[list[int], Placement]:
    """The numbers of the layers and the placement in a file that `moe-dualpipe model balance --json` has printed.

    Raises ValueError for a wrong file.
    """
    found = read_named(path)
    found = found if isinstance(found, dict) else {}
    layers, gpus, experts = (found.get(key) for key in ("layers", "gpus", "experts"))
    rows: list[Any] = experts if isinstance(experts, list) and experts else [None]
    if not all(isinstance(row, list) and row and all(type(e) is int and e >= 0 for e in row) for row in rows):
        raise ValueError(f'{printable(path)} must have "experts", a list of expert ids for each layer')
    if not isinstance(layers, list) or len(layers) != len(rows) or any(type(layer) is not int for layer in layers):
        raise ValueError(f'"layers" in {printable(path)} must be a number for each list of "experts"')
    if type(gpus) is not int or gpus < 1 or any(len(row) != len(rows[0]) or len(row) % gpus for row in rows):
        raise ValueError(f'"gpus" in {printable(path)} must divide the slots of each layer, which have equal numbers')
    return layers, Placement(tuple(map(tuple, rows)), gpus)
