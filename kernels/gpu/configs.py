"""Tile sizes of the kernels, from a table that ships with the package and a table that the user has tuned.

Autotuning in the first training step would cost minutes on every rank. Instead, `python -m benchmarks.tune` writes a
table beforehand, and lookups are cached. The user's table has priority over the shipped one. Among the entries of a
table for a kernel, GPU and element size, the one with the nearest N, K and rows per expert is used: with few rows, most
of a high tile would be empty. A GPU without entries uses those of its family (families.py).

N: number of output columns of one expert's product; for "up", number of pairs of gate and up. K: number of terms of
its sums. For "wgrad", which sums over rows, N and K are the two widths.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .families import family_of

KERNEL_NAMES = ("up", "down", "down_backward", "up_backward", "wgrad", "fp8", "any")
SHIPPED = Path(__file__).with_name("tuned.json")
MANY_ROWS = 2048


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile sizes and launch options of a kernel. A tile is block_m x block_n; the sum advances in steps of block_k.

    group_m: number of row tiles that pass over the columns together, which reuses weights in the L2 cache. tma: load
    weights through the tensor memory accelerator (Hopper and newer) if their sizes allow it. maxnreg: maximum number of
    registers per thread, on NVIDIA GPUs; None: the compiler's choice. With fewer registers, a second block may fit on a
    multiprocessor. per_sm: number of programs per multiprocessor, each of which computes many tiles; None: one program
    per tile.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    tma: bool = False
    maxnreg: int | None = None
    per_sm: int | None = None


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """An entry of a table: the configuration of `kernel` on `arch` for elements of dtype_bytes.

    n, k, rows: sizes for which it was chosen; rows per expert.
    """

    kernel: str
    arch: str
    dtype_bytes: int
    n: int
    k: int
    config: TileConfig
    rows: int = MANY_ROWS


_overrides: dict[str, TileConfig] = {}


def lookup(kernel: str, arch: str, dtype_bytes: int, n: int, k: int, rows: int = MANY_ROWS) -> TileConfig:
    """Return the configuration for one launch. arch: "sm_90", "gfx942", ..., or "interpreter". rows: per expert.

    If N or K elements are not a multiple of 16 bytes, loads cannot be wide, and all kernels use the entries "any".
    """
    aligned = n * dtype_bytes % 16 == 0 and k * dtype_bytes % 16 == 0
    entries = kernel if aligned else "any"
    if override := _overrides.get(kernel) or _overrides.get(entries):
        return override
    rows = 1 << (rows - 1).bit_length() if rows else 1  # few different values, because lookups are cached
    return _nearest(entries, arch, dtype_bytes, n, k, rows)


@functools.cache
def _nearest(kernel: str, arch: str, dtype_bytes: int, n: int, k: int, rows: int) -> TileConfig:
    def distance(e: TunedKernel) -> float:
        return abs(math.log(e.n / n)) + abs(math.log(e.k / k)) + abs(math.log(e.rows / rows))

    for table in (_load_user_table(), load_table(SHIPPED)):
        fitting = [e for e in table if (e.kernel, e.dtype_bytes) == (kernel, dtype_bytes)]
        entries = [e for e in fitting if e.arch == arch] or [e for e in fitting if e.arch == family_of(arch)]
        if entries:
            return min(entries, key=distance).config
    raise ValueError(f"no configuration of kernel {kernel!r} for {arch} with elements of {dtype_bytes} bytes")


@functools.cache
def tile_heights(arch: str) -> tuple[int, ...]:
    """The powers of two from the smallest to the largest block_m that `lookup` returns for `arch`, except for wgrad."""
    tables = _load_user_table(), load_table(SHIPPED)
    heights = [e.config.block_m for t in tables for e in t if e.kernel != "wgrad" and e.arch in (arch, family_of(arch))]
    return tuple(1 << i for i in range(min(heights).bit_length() - 1, max(heights).bit_length()))


def user_table_path() -> Path:
    """Path of the user's table, which `python -m benchmarks.tune` writes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-dualpipe" / "tuned.json"


@functools.cache
def _load_user_table() -> tuple[TunedKernel, ...]:
    path = user_table_path()
    return load_table(path) if path.exists() else ()


def load_table(path: Path) -> tuple[TunedKernel, ...]:
    """Read a table. Raises ValueError with the name of the file if it is not a valid table."""
    try:
        lines = json.loads(path.read_text())["entries"]
        entries = tuple(TunedKernel(**{**line, "config": TileConfig(**line["config"])}) for line in lines)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a table of tuned kernels ({error}): delete it, or tune again") from error
    for entry in entries:
        if entry.kernel not in KERNEL_NAMES:
            raise ValueError(f"{path}: unknown kernel {entry.kernel!r}; the kernels are {', '.join(KERNEL_NAMES)}")
    return entries


def save_table(path: Path, entries: Sequence[TunedKernel], **about: str) -> None:
    """Write a table. about: its origin (GPU, versions, date), for people who read the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n    ".join(json.dumps(dataclasses.asdict(entry)) for entry in entries)
    path.write_text(f'{{\n  "about": {json.dumps(about)},\n  "entries": [\n    {body}\n  ]\n}}\n')
    clear_caches()


def clear_caches() -> None:
    """Make the next lookup read the tables again."""
    _load_user_table.cache_clear()
    _nearest.cache_clear()
    tile_heights.cache_clear()


@contextmanager
def override_config(kernel: str, config: TileConfig) -> Iterator[None]:
    """Inside this context, `kernel` runs with `config` instead of the tables' configuration. For tuning and tests.

    "any": all kernels with sizes that use these entries, except those with an override of their own.
    """
    if kernel not in KERNEL_NAMES:
        raise ValueError(f"unknown kernel {kernel!r}; the kernels are {', '.join(KERNEL_NAMES)}")
    before = _overrides.get(kernel)
    _overrides[kernel] = config
    try:
        yield
    finally:
        if before is None:
            del _overrides[kernel]
        else:
            _overrides[kernel] = before
