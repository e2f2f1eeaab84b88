"""Compiles the kernels with the shipped tile sizes for GPUs that this machine need not have.

All sizes are compiled for sm_90 only. The other GPUs compile the tuned sizes; `make codegen` compiles everything.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def codegen(*arguments):
    # In another process, because Triton interprets in this one.
    command = [sys.executable, "-m", "benchmarks.codegen", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=230, check=False)


@pytest.mark.parametrize("arch,brief", [("sm_80", True), ("sm_90", False), ("sm_100", True), ("gfx942", True)])
def test_every_kernel_compiles_without_spills_and_warnings(arch, brief):
    done = codegen("--arch", arch, "--dtype", "bf16", *(["--brief"] if brief else []))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert {"swiglu_up", "swiglu_down_backward", "rows_times_weights", "weight_gradients"} <= lines.keys()
    assert {"top_k_experts", "top_k_experts_backward", "count", "scatter", "tile_table"} <= lines.keys()
    assert {"sum_rows", "gather_rows", "dot_rows", "sum_partials", "paced_copy"} <= lines.keys()
    assert " 0 failed" in done.stdout


DESCRIBED = """
import torch
from benchmarks.codegen import compiling, describe, launch_experts
from moe_dualpipe.kernels.gpu import gemm, tiles
from moe_dualpipe.kernels.gpu.configs import TileConfig, override_config

for d, f, aligned in ((1000, 200, True), (1001, 203, False)):
    with compiling("sm_90") as compiled:
        launch_experts(d, f, torch.bfloat16)
    found = [describe(name, kernel, "sm_90", "bf16", "") for name, kernel in compiled]
    matmuls = [c for c in found if c.kernel in ("swiglu_up", "rows_times_weights", "swiglu_down_backward")]
    assert len(matmuls) == 5
    assert all(c.matrix and c.tma == aligned for c in matmuls)

def find_problems(config):
    a, w = torch.empty(8, 256, dtype=torch.bfloat16), torch.empty(2, 512, 256, dtype=torch.bfloat16)
    with override_config("down", config), compiling("sm_90") as compiled:
        gemm.rows_times_weights("down", a, w, tiles.Tiling(torch.zeros(3, dtype=torch.int32), 8))
    name, kernel = compiled[-1]
    return describe(name, kernel, "sm_90", "bf16", "").problems()

assert not find_problems(TileConfig(128, 128, 64, 8, 3, 8, True))
assert "spilled" in find_problems(TileConfig(128, 256, 64, 4, 3, 8, True))[0]       # a tile needs twice the registers
assert "shared memory" in find_problems(TileConfig(128, 256, 64, 8, 6, 8, True))[0]
"""


def test_spills_and_excess_shared_memory_are_reported():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBED], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_command_fails_if_the_interpreter_is_enabled():
    command = [sys.executable, "-m", "benchmarks.codegen"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set, which disables compilation: unset it" in done.stderr
