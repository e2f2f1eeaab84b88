"""Compiles kernels with the shipped tile sizes for GPUs that need not be here. `make codegen` compiles all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.generated_code import signal_problems

ROOT = Path(__file__).parents[2]
DESCRIBED = """
import torch
from benchmarks.codegen import compiling, launch_experts
from benchmarks.generated_code import describe
from moe_dualpipe.kernels.gpu import gemm, sorting, tiles
from moe_dualpipe.kernels.gpu.configs import TileConfig, override_config

for sizes, aligned in (((1000, 200), True), ((1001, 203), False)):
    with compiling("sm_90") as compiled:
        launch_experts(*sizes, torch.bfloat16)
    found = [describe(built, "sm_90", "bf16", sizes) for built in compiled]
    assert not [c for c in found if c.problems]
    matmuls = [c for c in found if c.kernel in ("swiglu_up", "rows_times_weights", "swiglu_down_backward")]
    assert len(matmuls) == 5
    assert all(c.matrix and c.tma == aligned for c in matmuls)

def find_problems(config, kernel="down"):
    with override_config(kernel, config), compiling("sm_90") as compiled:
        launch_experts(512, 256, torch.bfloat16)
    name = {"down": "rows_times_weights", "down_backward": "swiglu_down_backward"}[kernel]
    return next(describe(built, "sm_90", "bf16").problems for built in compiled if built.name == name)

assert not find_problems(TileConfig(128, 128, 64, 8, 3, 8, True))
assert "spilled" in find_problems(TileConfig(128, 256, 64, 4, 3, 8, True))[0]       # a tile needs twice the registers
assert "shared memory" in find_problems(TileConfig(128, 256, 64, 8, 6, 8, True))[0]
assert find_problems(TileConfig(128, 128, 64, 8, 1, 8, False)) == (                 # one stage: no pipeline
    "no asynchronous loads in the loop", "8 synchronous loads in the loop", "the loop waits for all wgmma")
# Spills outside the loop are allowed if two blocks fit. With four stages, their shared memory does not.
assert not find_problems(TileConfig(128, 128, 64, 8, 3, 8, True, 128), "down_backward")
assert "two blocks do not fit" in find_problems(TileConfig(128, 128, 64, 8, 4, 8, True, 128), "down_backward")[0]

# Ids are checked on the device if asked to.
with compiling("sm_90") as compiled:
    for lowest in (None, 0):
        sorting.order_by_expert(torch.zeros(64, 8, dtype=torch.int64), 8, 512, lowest=lowest)
assert ["assertfail" in b.kernel.asm["ptx"] for b in compiled] == [False, False, True, False]
"""


def run(*arguments):
    """In another process, because Triton interprets in this one."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.long
def test_spills_excess_shared_memory_and_lost_pipelines_are_reported():
    done = run("-c", DESCRIBED)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])  # they have compilers of their own
def test_every_kernel_compiles_without_spills_and_warnings(arch):
    done = run("-m", "benchmarks.codegen", "--arch", arch, "--dtype", "bf16", "--brief", arch)
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"swiglu_up", "swiglu_down_backward", "rows_times_weights", "weight_gradients"} <= compiled
    assert {"top_k_experts", "top_k_experts_backward", "count", "scatter", "tile_table"} <= compiled
    assert {"sum_rows", "gather_rows", "dot_rows", "sum_partials"} <= compiled
    assert arch == "gfx942" or {"push", "receive_rows", "receive_sums", "release"} <= compiled


# ---- The check of signals in compiled kernels, on a short text in the form of PTX ----


SIGNALS = """
	mov.u64 %rd14, %globaltimer;
	shfl.sync.bfly.b32 	%r59, %r58, 16, 31, -1;
	bar.sync 	0;
	@%p6 bra 	$L__BB0_4;
	@%p23 atom.global.acq_rel.gpu.cas.b32 %r19, [ %rd13 + 0 ], %r20, %r21;
	st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
	bar.sync 	0;
	@%p23 atom.global.sys.acq_rel.add.u32 %r57, [ %rd51 + 0 ], %r58;
	bar.sync 	0;
	@%p4 atom.global.sys.release.exch.b32 %r9, [ %rd6 + 0 ], %r10;
	st.global.b32 [ %rd3 + 0 ], { %r10 };
"""


def test_a_release_needs_a_barrier_and_a_wait_one_clock():
    assert signal_problems(SIGNALS) == []
    first, clock, *others = SIGNALS.split("bar.sync")
    unordered = ["a release without a barrier before it"]
    assert signal_problems("bar.sync".join([first, clock]) + "".join(others)) == unordered
    assert signal_problems("bar.sync".join([first, clock, others[0] + others[1]])) == unordered
    assert signal_problems("bar.sync".join([first + clock, *others])) == ["threads may leave a wait at different times"]
