"""Compiles the kernels with the shipped tile sizes for GPUs that this machine need not have.

For Hopper (with TMA and wgmma) and AMD, which have compilers of their own, the tuned sizes, and for Hopper also matrix
products of other sizes. `make codegen` compiles everything for all GPUs.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

GPUS = "sm_90", "gfx942"


def codegen(*arguments):
    # In another process, because Triton interprets in this one.
    command = [sys.executable, "-m", "benchmarks.codegen", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def compiled():
    """The output for both GPUs; one process imports Triton for them."""
    done = codegen("--arch", *GPUS, "--dtype", "bf16", "--brief", *GPUS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)  # the first of them compiles for both GPUs
@pytest.mark.parametrize("arch", GPUS)
def test_every_kernel_compiles_without_spills_and_warnings(compiled, arch):
    lines = {words[0] for words in compiled if words[1] == arch}
    assert {"swiglu_up", "swiglu_down_backward", "rows_times_weights", "weight_gradients"} <= lines
    assert {"top_k_experts", "top_k_experts_backward", "count", "scatter", "tile_table"} <= lines
    assert {"sum_rows", "gather_rows", "dot_rows", "sum_partials", "paced_copy"} <= lines


DESCRIBED = """
import torch
from benchmarks.codegen import compiling, describe, launch_experts
from moe_dualpipe.kernels.gpu import gemm, tiles
from moe_dualpipe.kernels.gpu.configs import TileConfig, override_config

for d, f, aligned in ((1000, 200, True), (1001, 203, False)):
    with compiling("sm_90") as compiled:
        launch_experts(d, f, torch.bfloat16)
    matmuls = [b for b in compiled if b.name in ("swiglu_up", "rows_times_weights", "swiglu_down_backward")]
    matmuls = [describe(built, "sm_90", "bf16", "") for built in matmuls]
    assert len(matmuls) == 5
    assert all(c.matrix and c.tma == aligned for c in matmuls)
    assert not [problem for built in compiled for problem in describe(built, "sm_90", "bf16", "").problems()]

def find_problems(config):
    a, w = torch.empty(8, 256, dtype=torch.bfloat16), torch.empty(2, 512, 256, dtype=torch.bfloat16)
    with override_config("down", config), compiling("sm_90") as compiled:
        gemm.rows_times_weights("down", a, w, tiles.Tiling(torch.zeros(3, dtype=torch.int32), 8))
    return describe(compiled[-1], "sm_90", "bf16", "").problems()

assert not find_problems(TileConfig(128, 128, 64, 8, 3, 8, True))
assert "spilled" in find_problems(TileConfig(128, 256, 64, 4, 3, 8, True))[0]       # a tile needs twice the registers
assert "shared memory" in find_problems(TileConfig(128, 256, 64, 8, 6, 8, True))[0]
"""


@pytest.mark.long
def test_spills_and_excess_shared_memory_are_reported():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBED], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_command_fails_if_the_interpreter_is_enabled():
    command = [sys.executable, "-m", "benchmarks.codegen"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set, which disables compilation: unset it" in done.stderr
