"""Compile every kernel for GPUs that this machine does not have, and check the generated code.

    python -m benchmarks.codegen                         all GPUs, bf16 and fp32; exit code 1 if a check fails
    python -m benchmarks.codegen --arch sm_90 gfx942 --dtype bf16
    python -m benchmarks.codegen --brief gfx942          only the tuned sizes for this GPU

The launchers run as usual, on uninitialized tensors, but compile each kernel instead of launching it. The sizes are all
of the shipped table, and some that no fast path accepts. A kernel fails if it spills registers to memory, needs more
shared memory than the GPU has, or causes ptxas warnings C75xx (serialized matrix products). On NVIDIA GPUs, the loop of
a product must load asynchronously; on Hopper, it must use wgmma and keep one group of them in flight. In FP8, it
must add each block's sum in fp32, and nothing more. Spills are allowed outside this loop where the table sets `maxnreg`
and two blocks then fit on a multiprocessor. The kernels of one-sided transfers must store 16 bytes at a time, and
release only after a barrier.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moe_dualpipe.kernels.fp8 import DTYPE, Fp8Matrix
from moe_dualpipe.kernels.gpu import (
    configs,
    fp8,
    gemm,
    permute,
    push,
    receive,
    routing,
    signals,
    sorting,
    swiglu,
    tiles,
    wgrad,
)
from moe_dualpipe.kernels.gpu.families import family_of
from moe_dualpipe.kernels.gpu.launch_args import interpreter_enabled
from moe_dualpipe.kernels.options import RoutingOptions, Score

from .generated_code import DTYPES, Built, Compiled, describe

TARGETS = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 90, 100, 103, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx942", "gfx950")},
}


_CACHE = tempfile.TemporaryDirectory()
"""Where each process keeps its kernels: one from the usual cache would have no log."""
_LOGS: dict[str, str] = {}
"""What ptxas printed, by the hash that Triton gives a kernel: a process compiles a kernel once."""


def _no_gpu(arch: str) -> Any:
    """Stands in for Triton's driver: answers what compilation needs, without a device."""
    return SimpleNamespace(
        utils=None, get_current_target=lambda: TARGETS[arch],
        # Triton caches compiled kernels by device number, so each architecture gets its own number.
        get_current_device=lambda: list(TARGETS).index(arch), set_current_device=lambda _device: None,
        get_current_stream=lambda _device=0: 0, get_active_torch_device=lambda: torch.device("cpu"),
        get_device_interface=lambda: torch.cpu, map_python_to_cpp_type=lambda ty: ty,
    )  # fmt: skip


@contextlib.contextmanager
def compiling(arch: str) -> Iterator[list[Built]]:
    """Make launchers compile for `arch` instead of launching. Yields a list that collects the kernels."""
    compiled: list[Built] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        name = self.__name__.removesuffix("_kernel").strip("_")
        with contextlib.redirect_stdout(io.StringIO()) as log, knobs.nvidia.scope(), knobs.cache.scope():
            knobs.nvidia.dump_ptxas_log = True
            knobs.cache.dir = f"{_CACHE.name}/{os.getpid()}"
            kernel: Any = run(self, *args, **{**options, "warmup": True})
        compiled.append(Built(name, kernel, _LOGS.setdefault(kernel.hash, log.getvalue())))

    before = driver._active  # read directly: on a machine without a GPU the accessor raises
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        for module in (fp8, gemm, swiglu, wgrad):
            stack.enter_context(mock.patch.object(module, "arch_of", lambda _device: arch))
        driver.set_active(_no_gpu(arch))
        try:
            yield compiled
        finally:
            driver._active = before


def launch_experts(d: int, f: int, dtype: torch.dtype, rows_per_expert: int = configs.MANY_ROWS) -> None:
    """Launch all kernels of `experts` and `grouped_linear`, forward and backward, for experts of [D, F]."""
    num_experts = 4
    rows = rows_per_expert * num_experts
    x, index = torch.empty(rows, d, dtype=dtype), torch.zeros(rows, dtype=torch.int32)
    gate_up, down = torch.empty(num_experts, 2 * f, d, dtype=dtype), torch.empty(num_experts, d, f, dtype=dtype)
    tiling = tiles.Tiling(torch.zeros(num_experts + 1, dtype=torch.int32), rows)
    weights = torch.empty(rows)
    z, h = swiglu.swiglu_up(x, index, gate_up, tiling, None, index)
    assert z is not None
    swiglu.swiglu_up(x, index, gate_up, tiling, weights, index, store_z=False)
    gemm.rows_times_weights("down", h, down, tiling)
    swiglu.swiglu_down_backward(x, index, down, z, tiling, weights, index)
    gemm.rows_times_weights("up_backward", z, gate_up, tiling, True)
    for add_to in (None, torch.empty(num_experts, 2 * f, d)):
        wgrad.weight_gradients(z, x, tiling.offsets, torch.float32, index_b=index, add_to=add_to)
    wgrad.weight_gradients(x, h, tiling.offsets, torch.float32, index)
    wgrad.weight_gradients(z, x, tiling.offsets, dtype)


def launch_others(dtype: torch.dtype, brief: bool = False) -> None:
    """Launch routing, sorting and permutation. brief: for one number of experts instead of three."""
    x, index, weights = torch.empty(64, 4096, dtype=dtype), torch.zeros(64, dtype=torch.int32), torch.empty(64, 8)
    ids, positions = (torch.zeros(64, 8, dtype=dtype) for dtype in (torch.int64, torch.int32))
    permute.gather_rows(x, index)
    permute.gather_rows(x, index, None, weights, index)
    for given in (None, weights):
        permute.sum_rows(x, positions, given)
    permute.dot_rows(x, x, positions)
    permute.sum_partials(torch.empty(4, 64), positions)
    for num_experts, groups in ((256, 8),) if brief else ((8, 1), (256, 8), (512, 1)):
        logits, bias = torch.empty(64, num_experts, dtype=dtype), torch.empty(num_experts)
        for score in get_args(Score):
            options = RoutingOptions(8, score, groups, max(1, groups // 2))
            for replay in (None, ids):
                routing.top_k_experts(logits, bias, options, replay)
            routing.top_k_experts_backward(logits, ids, weights, options)
        tiles.Tiling(torch.zeros(num_experts + 1, dtype=torch.int32), 64)(128)
        sorting.order_by_expert(ids, num_experts, 512, heights=(64, 128))
    sorting.order_by_expert(ids, 8, 512, lowest=-1)
    sorting.order_by_expert(ids, 8, 512, 32, True)


def launch_transfers(dtype: torch.dtype) -> None:
    """Launch the kernels of one-sided transfers."""
    zeros = partial(torch.zeros, dtype=torch.int32)
    x, weights, ids, starts = torch.empty(64, 4096, dtype=dtype), torch.empty(64, 8), zeros(64, 8), zeros(9)
    operation, addresses = signals.Operation(0, 0, 0), torch.zeros(8, dtype=torch.int64)
    state, counter = signals.new_state(2, x.device), torch.zeros((), dtype=torch.int64)
    windows = signals.Windows(addresses, state, 0, 2, 64, 4112, 4096, 4104, 20, 600.0)
    push.push(windows, operation, x, zeros(64), starts, weights, ids)
    push.push(windows, operation, x, None, starts)
    push.push(windows, operation, x, zeros(64), starts, weights, ids, push.Pace(8320, 0.0, 0.0, counter))
    for sent, chosen in ((None, None), (weights, ids)):
        receive.receive_rows(windows, operation, x, starts, sent, chosen)
        receive.receive_sums(windows, operation, x, ids, starts, sent)
    signals.wait_with_one_program(windows, operation)


def launch_fp8(dtype: torch.dtype, mx: bool, d: int = 2048, f: int = 512) -> None:
    """Launch the kernels of products in 8 bits, and those that round to 8 bits. mx: with the scales of MX."""
    num_experts, rows, block = 4, 4 * configs.MANY_ROWS, 32 if mx else 128
    tiling, choice = tiles.Tiling(torch.zeros(num_experts + 1, dtype=torch.int32), rows), torch.zeros(rows).int()
    x = fp8.quantize_rows(torch.empty(rows, d, dtype=dtype), block, True)
    of_weights = torch.empty(num_experts, f if mx else f // block, d // block)
    weights = Fp8Matrix(torch.empty(num_experts, f, d, dtype=DTYPE), of_weights, 1 if mx else block, block)
    for index in (None, choice):
        fp8.fp8_rows_times_weights(x, weights, tiling, dtype, index)
    z, dh = torch.empty(rows, 2 * f, dtype=dtype), torch.empty(rows, f)
    for routing_weights in (None, torch.empty(rows)):
        fp8.swiglu_round(z, routing_weights, choice, block, True)
        fp8.swiglu_backward(dh, z, routing_weights, choice)


def check(arch: str, dtype: str, brief: bool = False) -> list[Compiled]:
    """Compile all kernels for one GPU and dtype. brief: only the tuned sizes, and one number of experts."""
    size = DTYPES[dtype].itemsize
    tuned = [e for e in configs.load_table(configs.SHIPPED) if e.arch == family_of(arch) and e.dtype_bytes == size]
    shipped = sorted({(max(e.n, e.k), min(e.n, e.k)) for e in tuned})
    rows = sorted({e.rows for e in tuned}, reverse=True)
    found: dict[str, Compiled] = {}  # by the hash that Triton gives a compiled kernel
    sizes = shipped if brief else [*shipped, (1000, 200), (1001, 203)]
    launches = [((d, f), partial(launch_experts, d, f, rows_per_expert=r)) for d, f in sizes for r in rows]
    others: list[Callable[[torch.dtype], None]] = [partial(launch_others, brief=brief)]
    if arch.startswith("sm_"):  # transfers read NVIDIA's clock
        others.append(launch_transfers)
    if family_of(arch) in ("sm_90", "sm_100", "sm_120") and dtype == "bf16":
        formats = (False, True) if family_of(arch) != "sm_90" else (False,)
        others += [partial(launch_fp8, mx=mx) for mx in formats]
    for shape, launch in [*launches, *(((), launch) for launch in others)]:
        with compiling(arch) as compiled:
            launch(DTYPES[dtype])
        for built in compiled:
            if built.kernel.hash not in found:
                found[built.kernel.hash] = describe(built, arch, dtype, shape)
    return list(found.values())


def table(found: list[Compiled]) -> str:
    lines = [
        f"{'kernel':27} {'GPU':7} {'dtype':5} {'D x F':>9} {'TMA':3} {'regs':>4} {'shared':>7} {'matrix':>6}  problems"
    ]
    lines += [
        f"{c.kernel:27} {c.arch:7} {c.dtype:5} {c.sizes:>9} {'yes' if c.tma else '-':3} {c.registers:4} {c.shared:7,} "
        f"{c.matrix:6}  {', '.join(c.problems) or '-'}"
        for c in found
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every kernel without a GPU, and check the generated code.")
    parser.add_argument("--arch", nargs="+", choices=TARGETS, default=list(TARGETS), help="GPU architectures")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16", "fp32"], help="dtypes of the rows")
    parser.add_argument(
        "--brief", nargs="+", choices=TARGETS, default=[], metavar="ARCH",
        help="architectures for which only the tuned sizes and one number of experts are compiled",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print only kernels that fail a check")
    options = parser.parse_args()
    if interpreter_enabled():
        parser.error("TRITON_INTERPRET is set, which disables compilation: unset it")
    jobs = [(arch, dtype, arch in options.brief) for arch in options.arch for dtype in options.dtype]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = [c for part in pool.map(check, *zip(*jobs, strict=True)) for c in part]
    failed = [c for c in found if c.problems]
    if shown := failed if options.quiet else found:
        print(table(shown))
    print(f"triton {triton.__version__}: {len(found)} kernels compiled, {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
