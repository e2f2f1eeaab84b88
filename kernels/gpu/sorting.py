"""Sort choices by expert in Triton, stably, in two launches: a counting sort.

    count     each program counts the keys of its choices
    scatter   each program sums the counts of all programs, which gives its first position of each key, and writes its
              choices there; all programs together write the tables of tiles (tiles.py)

Reading the counts of all programs in each of them takes less time than a third launch that sums them, as long as there
are few programs: a program has several blocks of choices if there are many choices. The kernels use neither atomics nor
host syncs, so results are deterministic, and CUDA graphs can capture them.

E keys (experts or ranks), K choices per row, M positions.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..order import ExpertOrder
from .launch_args import ceil_div, next_power_of_2
from .tiles import Tiling, store_tiles

BLOCK = 64  # choices that are sorted at a time: all pairs of them are compared
MAX_PROGRAMS = 256  # each program reads the counts of all programs


@triton.jit
def _keys(ids, i, num_choices, K: tl.constexpr, E: tl.constexpr, PER_KEY: tl.constexpr, ONCE: tl.constexpr):
    """The sort key of each choice: id // PER_KEY, or E if the id is invalid.

    ONCE: of the choices of a row with equal keys, only the first is valid.
    """
    key = tl.load(ids + i, mask=i < num_choices, other=-1).to(tl.int32)
    valid = (key >= 0) & (key < E * PER_KEY)
    key = tl.where(valid, key, 0) // PER_KEY
    if ONCE:
        for k in range(K):
            earlier = (k < i % K) & (i < num_choices)
            other = tl.load(ids + i // K * K + k, mask=earlier, other=-1).to(tl.int32)
            valid = valid & ~((other >= 0) & (other // PER_KEY == key))
    return tl.where(valid, key, E)


@triton.jit(do_not_specialize=["num_choices", "blocks"])
def count_kernel(ids, counts, num_choices, blocks, K: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
                 PER_KEY: tl.constexpr, ONCE: tl.constexpr, BLOCK: tl.constexpr, LOWEST: tl.constexpr):  # fmt: skip
    """Count the keys of the choices of each program. LOWEST: assert that no id is less than it, or too large."""
    counted = tl.zeros((E_PADDED,), tl.int32)
    for block in range(blocks):
        i = (tl.program_id(0).to(tl.int64) * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        if LOWEST is not None:
            given = tl.load(ids + i, mask=i < num_choices, other=0)
            tl.device_assert((given >= LOWEST) & (given < E * PER_KEY), "an expert id is out of range")
        counted += tl.histogram(_keys(ids, i, num_choices, K, E, PER_KEY, ONCE), E_PADDED)
    e = tl.arange(0, E_PADDED)
    tl.store(counts + tl.program_id(0) * (E + 1) + e, counted, mask=e <= E)


@triton.jit(do_not_specialize=["num_choices", "max_choices", "blocks", "slots"])
def scatter_kernel(
    ids, counts, gather_idx, choice_idx, positions, offsets, tables, num_choices, max_choices, blocks, slots,
    K: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr, PER_KEY: tl.constexpr, ONCE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TABLES: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """Write each choice to its position, and what depends on the counts alone: offsets and tables of tiles."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, E_PADDED)
    in_all = tl.zeros((ROWS, E_PADDED), tl.int32)
    in_earlier = tl.zeros((ROWS, E_PADDED), tl.int32)
    for first in range(0, programs, ROWS):
        p = (first + tl.arange(0, ROWS))[:, None]
        counted = tl.load(counts + p * (E + 1) + e[None, :], mask=(p < programs) & (e <= E)[None, :], other=0)
        in_all += counted
        in_earlier += tl.where(p < program, counted, 0)
    count_E = tl.sum(in_all, 0)
    end_E = tl.cumsum(count_E, 0)
    next_E = end_E - count_E + tl.sum(in_earlier, 0)  # the position of the next choice of each key
    within = tl.arange(0, BLOCK)
    for block in range(blocks):
        i = (program.to(tl.int64) * blocks + block) * BLOCK + within
        key = _keys(ids, i, num_choices, K, E, PER_KEY, ONCE)
        before = (key[:, None] == key[None, :]) & (within[None, :] < within[:, None])
        position = tl.gather(next_E, key, 0) + tl.sum(before.to(tl.int32), 1)
        # Invalid choices are written too, so that indices past the last offset are those of rows.
        inside = (i < num_choices) & (position < max_choices)
        tl.store(gather_idx + position, (i // K).to(tl.int32), mask=inside)
        tl.store(choice_idx + position, i.to(tl.int32), mask=inside)
        tl.store(positions + i, tl.where(inside & (key < E), position, -1), mask=i < num_choices)
        next_E += tl.histogram(key, E_PADDED)
    # Grouped products write the rows up to the last offset, so it must not exceed the length of the indices.
    start_E = tl.minimum(end_E - count_E, max_choices)
    end_E = tl.where(e < E, tl.minimum(end_E, max_choices), start_E)
    if program == 0:
        tl.store(offsets + e + 1, end_E, mask=e < E)
        tl.store(offsets, 0)
    for table in tl.static_range(TABLES):
        store_tiles(tables + table * 3 * (1 + slots), start_E, end_E, E_PADDED, HEIGHT << table, 128)


def order_by_expert(
    ids: Tensor, num_keys: int, max_choices: int, ids_per_key: int = 1, once: bool = False, lowest: int | None = None,
    heights: tuple[int, ...] = (),
) -> ExpertOrder:  # fmt: skip
    """Sort contiguous ids [N, K] by key, id // ids_per_key, in two launches.

    Ids outside range(num_keys * ids_per_key) are invalid: they sort after all keys, and their positions are -1.
    max_choices: M, at least the number of valid choices and at most N x K.
    once: use each key at most once per row. lowest: fail a device-side assertion for ids below it, and for ids too
    large. heights: of the tables of tiles to write (tiles.py), each twice the one before.
    """
    num_choices = ids.numel()
    empty = partial(torch.empty, dtype=torch.int32, device=ids.device)
    indices = empty(max_choices), empty(max_choices), empty(ids.shape), empty(num_keys + 1)
    if not num_choices:
        indices[-1].zero_()
        return ExpertOrder(*indices)
    blocks = ceil_div(ceil_div(num_choices, BLOCK), MAX_PROGRAMS)  # of each program
    programs = ceil_div(num_choices, blocks * BLOCK)
    padded = next_power_of_2(num_keys + 1)
    sizes = (ids.shape[1], num_keys, padded, ids_per_key, once, BLOCK)
    slots = Tiling(indices[-1], max_choices).max_tiles(heights[0]) if heights else 0
    slots |= 3  # each table has 3 (1 + slots) words and begins at a multiple of 16 bytes
    counts, tables = empty(programs, num_keys + 1), empty(len(heights), 1 + slots, 3)
    count_kernel[(programs,)](
        ids, counts, num_choices, blocks, *sizes, lowest, debug=lowest is not None, sanitize_overflow=False
    )
    scatter_kernel[(programs,)](
        ids, counts, *indices, tables, num_choices, max_choices, blocks, slots, *sizes,
        max(1, 1024 // padded), len(heights), heights[0] if heights else 1,
    )  # fmt: skip
    return ExpertOrder(*indices, dict(zip(heights, tables, strict=True)))
