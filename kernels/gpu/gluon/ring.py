"""The ring of buffers between the warps that load tiles and the warps that multiply them.

One warpgroup, the producer, copies tiles from global to shared memory. The other two, the consumers, multiply. They
share a ring of STAGES slots; a slot holds a tile of each operand for one step of a sum. Each slot has two barriers:

    full[slot]     the tiles have arrived; consumers wait for it
    empty[slot]    the products have read the tiles; the producer waits for it

A barrier has a phase, which flips when everything that it counts has arrived. `wait(barrier, phase)` returns once that
phase is over. It sees only the parity, so nobody may fall two phases behind; tests/kernels explores all orders.

Steps are counted over all tiles of a program, so that loads run ahead across tiles. With five slots:

    step    0  1  2  3  4    5  6  7  8  9    10 ...
    slot    0  1  2  3  4    0  1  2  3  4    0
    phase   0  0  0  0  0    1  1  1  1  1    0

Tiles are loaded by the tensor memory accelerator (TMA). Hopper's TMA cannot gather, so the threads of the producer
copy gathered rows with cp.async.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

PRODUCER_WARPS = gl.constexpr(4)


@gluon.jit
def slot_and_phase(step, STAGES: gl.constexpr):
    return step % STAGES, step // STAGES & 1


@gluon.jit
def create_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    fence_async_shared()
    return barriers


@gluon.jit
def create_ring(a, b, GATHER: gl.constexpr):
    """A ring of buffers a and b, [STAGES, ...] each. GATHER: the threads of the producer copy one of them."""
    # One arrival announces the bytes of TMA. With GATHER, each thread of the producer arrives when its copies have.
    STAGES: gl.constexpr = a.shape[0]
    full = create_barriers(STAGES, 1 + 32 * PRODUCER_WARPS if GATHER else 1)
    empty = create_barriers(STAGES, 1)
    return a, b, full, empty


@gluon.jit
def acquire_slot(ring, step, BYTES: gl.constexpr):
    """Producer: wait until the slot of this step is empty, and announce BYTES that TMA will copy to it."""
    a, b, full, empty = ring
    STAGES: gl.constexpr = a.shape[0]
    slot, phase = slot_and_phase(step, STAGES)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    return a.index(slot), b.index(slot), full.index(slot)


@gluon.jit
def _flatten(tile):
    """A tile [..., columns] as [rows, columns]."""
    return tile.reshape([tile.numel // tile.shape[-1], tile.shape[-1]])


@gluon.jit
def multiply_steps(
    ring, step, steps, acc, TRANSPOSE_A: gl.constexpr, TRANSPOSE_B: gl.constexpr, GATHER: gl.constexpr
):  # fmt: skip
    """Consumer: add the products of `steps` steps from `step` to acc. The last may still be running.

    The tiles of a are [rows, sum], or [sum, rows] with TRANSPOSE_A; those of b [sum, columns], or [columns, sum].
    """
    a_ring, b_ring, full, _ = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    for i in range(steps):
        slot, phase = slot_and_phase(step + i, STAGES)
        mbarrier.wait(full.index(slot), phase)
        if GATHER:
            fence_async_shared()  # products read through the asynchronous proxy; cp.async does not write through it
        a, b = a_ring.index(slot), b_ring.index(slot)
        a, b = _flatten(a), _flatten(b)
        a = a.permute((1, 0)) if TRANSPOSE_A else a
        b = b.permute((1, 0)) if TRANSPOSE_B else b
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        release_slot(ring, step + i - 1, i > 0)  # this product runs on, the previous one is finished
    return acc


@gluon.jit
def finish_steps(ring, acc, next_step):
    """Consumer: wait for the last product before next_step, and release its slot."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release_slot(ring, next_step - 1, True)
    return acc


@gluon.jit
def release_slot(ring, step, condition):
    STAGES: gl.constexpr = ring[0].shape[0]
    slot, _ = slot_and_phase(step + STAGES, STAGES)  # of a step that may be -1
    mbarrier.arrive(ring[3].index(slot), count=1, pred=condition)


# ---- ping-pong: the two consumers take turns ----


@gluon.jit
def wait_for_turn(turns, count, WHO: gl.constexpr):
    """Consumer WHO, before it multiplies tile `count` of the program: wait until the other has issued its products.

    Otherwise it could take a slot's tiles for those of its own steps, two phases later.
    """
    mbarrier.wait(turns.index(WHO), (count // 2 & 1) ^ (1 - WHO))  # nobody goes before tile 0


@gluon.jit
def pass_turn(turns, WHO: gl.constexpr):
    mbarrier.arrive(turns.index(1 - WHO), count=1)
