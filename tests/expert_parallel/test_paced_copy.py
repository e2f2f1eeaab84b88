"""The copy that models a link: run in the interpreter, and compiled for several GPUs, which needs no GPU.

Each test runs in its own process, because Triton reads TRITON_INTERPRET when the module of a kernel is imported.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import torch
from torch import bfloat16, float32, int64, uint8
from moe_dualpipe.expert_parallel.modelled.paced_copy import BLOCK, paced_copy
for rows, columns, dtype in [(1, 1, uint8), (7, 33, bfloat16), (300, 17, float32), (0, 5, int64)]:
    for sms in (1, 3):
        x = torch.randint(0, 200, (rows, columns)).to(dtype)
        y = paced_copy(x, torch.empty_like(x), 0.0, sms)
        assert y.dtype == dtype and torch.equal(x, y) and (y.data_ptr() != x.data_ptr() or not rows)
"""

COMPILED = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_dualpipe.expert_parallel.modelled.paced_copy import BLOCK, _paced_copy
signature = {"source": "*u8", "target": "*u8", "num_bytes": "i32", "duration_ns": "i32", "pieces_each": "i32",
             "BLOCK": "constexpr", "PACED": "constexpr"}
for arch in (80, 90, 100):
    source = ASTSource(_paced_copy, signature, {"BLOCK": BLOCK, "PACED": True})
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    ptx = kernel.asm["ptx"]
    assert len(re.findall("globaltimer", ptx)) >= 2, ptx  # at the start, and in the waiting loop
    assert "st.global" in ptx
    assert re.search(r"extsi %duration_ns", kernel.asm["ttir"])  # nanoseconds times pieces need 64 bits
"""


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_it_copies_all_bytes():
    run(INTERPRETED, TRITON_INTERPRET="1")


@pytest.mark.long
def test_it_compiles_and_reads_the_clock():
    run(COMPILED, TRITON_INTERPRET="0")
