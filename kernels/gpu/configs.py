"""Which tile sizes a kernel runs with: a table that ships with the package, and one that the user's GPU was tuned with.

A kernel that tunes itself at the first training step costs minutes there, on every rank. These tables are made before
(`python -m benchmarks.tune`), and looking one up costs a dictionary access. The user's own table stands before the
shipped one; in both, the entry of the same kernel and GPU whose sizes are nearest is taken.

N, K: columns of the output, and the length of the sum, of one expert's product; "up" has N pairs of gate and up, and
"wgrad" sums over rows, so that K is the other width.
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

KERNEL_NAMES = ("up", "down", "down_backward", "up_backward", "wgrad", "any")
SHIPPED = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One way to run a kernel. The tile is block_m x block_n, and the sum advances in steps of block_k.

    group_m: row tiles that go over the columns together, which keeps their weights in the L2 cache. tma: weights
    through Hopper's tensor memory accelerator, where their sizes allow it.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    tma: bool = False


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """A line of a table: the kernel on GPUs of this architecture, with elements of so many bytes, near N and K."""

    kernel: str
    arch: str
    dtype_bytes: int
    n: int
    k: int
    config: TileConfig


_overrides: dict[str, TileConfig] = {}


def lookup(kernel: str, arch: str, dtype_bytes: int, n: int, k: int) -> TileConfig:
    """The configuration for one launch. arch: "sm_90", "gfx942", ..., "interpreter".

    Rows that are no multiple of 16 bytes cannot be read with wide loads: all kernels then take the tiles called "any".
    """
    if kernel in _overrides:
        return _overrides[kernel]
    aligned = n * dtype_bytes % 16 == 0 and k * dtype_bytes % 16 == 0
    return _nearest(kernel if aligned else "any", arch, dtype_bytes, n, k)


@functools.cache
def _nearest(kernel: str, arch: str, dtype_bytes: int, n: int, k: int) -> TileConfig:
    for table in (_users(), load_table(SHIPPED)):
        for family in (arch, _fallback(arch)):
            fitting = [e for e in table if (e.kernel, e.arch, e.dtype_bytes) == (kernel, family, dtype_bytes)]
            if fitting:
                return min(fitting, key=lambda e: abs(math.log(e.n / n)) + abs(math.log(e.k / k))).config
    raise ValueError(f"no configuration of kernel {kernel!r} for {arch} with elements of {dtype_bytes} bytes")


def _fallback(arch: str) -> str:
    """The architecture whose entries a GPU without its own takes: one that is in the shipped table."""
    if arch.startswith("gfx"):
        return "gfx942"
    return "sm_80"


def user_table() -> Path:
    """Where `python -m benchmarks.tune` writes, and this module reads, what was tuned on this machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "moe-dualpipe" / "tuned.json"


@functools.cache
def _users() -> tuple[TunedKernel, ...]:
    path = user_table()
    return load_table(path) if path.exists() else ()


def load_table(path: Path) -> tuple[TunedKernel, ...]:
    """Read a table. Raises ValueError, naming the file, for anything that is no table."""
    try:
        lines = json.loads(path.read_text())["entries"]
        entries = tuple(TunedKernel(**{**line, "config": TileConfig(**line["config"])}) for line in lines)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of tuned kernels ({error}): delete it, or tune again") from error
    for entry in entries:
        if entry.kernel not in KERNEL_NAMES:
            raise ValueError(f"{path}: unknown kernel {entry.kernel!r}; there are {', '.join(KERNEL_NAMES)}")
    return entries


def save_table(path: Path, entries: Sequence[TunedKernel], **about: str) -> None:
    """Write a table. about: where it comes from (GPU, versions, date), for the reader of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dataclasses.asdict(entry)) for entry in entries]
    body = ",\n    ".join(lines)
    path.write_text(f'{{\n  "about": {json.dumps(about)},\n  "entries": [\n    {body}\n  ]\n}}\n')
    clear_caches()


def clear_caches() -> None:
    """Read the tables again at the next lookup."""
    _users.cache_clear()
    _nearest.cache_clear()


@contextmanager
def override_config(kernel: str, config: TileConfig) -> Iterator[None]:
    """Within this context, `kernel` runs with `config`, whatever the tables say: for tuning and tests."""
    if kernel not in KERNEL_NAMES:
        raise ValueError(f"unknown kernel {kernel!r}; there are {', '.join(KERNEL_NAMES)}")
    before = _overrides.get(kernel)
    _overrides[kernel] = config
    try:
        yield
    finally:
        if before is None:
            del _overrides[kernel]
        else:
            _overrides[kernel] = before
