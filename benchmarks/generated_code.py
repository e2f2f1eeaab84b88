"""Facts about compiled kernels, and the checks of `benchmarks.codegen`.

A pipelined product copies the next tiles to shared memory asynchronously, while it multiplies the current ones. If
Triton cannot pipeline a load, it compiles it to an ordinary load in the loop, without a message. So the loop must have
asynchronous copies, and no other loads of tiles. On Hopper, one group of products (wgmma) must stay in flight from step
to step, so that the tensor cores do not wait for the loads of the next one.

A kernel that writes into the memory of other GPUs (kernels/gpu/signals.py) releases what all threads of a block have
stored, so a barrier of the block must precede the release. All threads must leave a wait for a flag together, so the
clock that limits it must be the same for all of them.

These checks read PTX: ptxas keeps the copies as they are, and warns (C75xx) if it serializes products. Only ptxas
allocates registers, so spills are read from its log and from SASS.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from moe_dualpipe.kernels.gpu.families import SHARED_LIMIT, family_of

SHARED_RESERVED = 1024  # a multiprocessor has this much more than a block may use, and every block needs it
REGISTERS = 65_536  # of a multiprocessor of an NVIDIA GPU
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRODUCTS = {"rows_times_weights", "swiglu_up", "swiglu_down_backward", "weight_gradients", "fp8_rows_times_weights"}
TRANSFERS = {"push", "receive_rows", "receive_sums"}
NVIDIA_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

_LABEL = re.compile(r"\s*([.$]L\w+):")
_BRANCH = re.compile(r"\bbra\b[^;]*?([.$]L\w+)", re.IGNORECASE)
_SIGNAL = re.compile(r"atom\S*\.(?:release|acq_rel)\S*\.(?:exch|add)|st\.global|bar\.sync")
_CLOCK = re.compile(r"%globaltimer;(.*?)\bbra\b", re.DOTALL)
_PRODUCT = re.compile(r"mma|fma\.rn\.f32|FFMA", re.IGNORECASE)


class Built(NamedTuple):
    """A kernel from Triton's compiler. log: what ptxas printed; "" on AMD."""

    name: str
    kernel: Any
    log: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel. sizes: D x F. matrix: number of matrix instructions."""

    kernel: str
    arch: str
    dtype: str
    sizes: str
    tma: bool
    registers: int
    shared: int
    matrix: int
    problems: tuple[str, ...]


def describe(built: Built, arch: str, dtype: str, sizes: tuple[int, ...] = ()) -> Compiled:
    """Read the code of a kernel, and check it. sizes: D and F; loads cannot be wide unless both fill 16 bytes."""
    name, kernel, log = built
    shared, shape = kernel.metadata.shared, "x".join(map(str, sizes))
    problems = []
    if shared > (limit := SHARED_LIMIT[family_of(arch)]):
        problems.append(f"{shared:,} bytes of shared memory of {limit:,}")
    if "ptx" not in kernel.asm:
        text = kernel.asm["amdgcn"]
        registers, spills = (_number(rf"\.{key}:\s*(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count"))
        problems += [f"{spills} spilled"] if spills else []
        matrix = text.count("v_mfma")
        return Compiled(name, arch, dtype, shape, False, registers, shared, matrix, tuple(problems))
    ptx = kernel.asm["ptx"]
    registers = _number(r"Used (\d+) registers", log)
    spills = _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log)
    problems += spill_problems(kernel, arch, registers, spills)
    matrix = len(re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", ptx))
    hopper = arch == "sm_90" and dtype != "fp32"
    product = name in PRODUCTS
    if product and hopper and "wgmma.mma_async" not in ptx:
        problems.append("no wgmma")
    if product and all(size * DTYPES[dtype].itemsize % 16 == 0 for size in sizes):
        promoted = name == "fp8_rows_times_weights"
        problems += pipeline_problems(ptx, hopper and not promoted)
        problems += promotion_problems(product_loop(_sass(kernel.asm["cubin"]))) if hopper and promoted else []
    if name in TRANSFERS and "st.global.v4" not in ptx:
        problems.append("no stores of 16 bytes")
    problems += signal_problems(ptx) if name in {*TRANSFERS, "release", "wait_for_ranks"} else []
    problems += sorted(set(re.findall(r"C75\d\d", log)))
    tma = "cp.async.bulk.tensor" in ptx
    return Compiled(name, arch, dtype, shape, tma, registers, shared, matrix, tuple(problems))


def product_loop(assembly: str, contents: re.Pattern[str] = _PRODUCT) -> str:
    """The innermost loop with products, or other `contents`, in PTX or SASS: the shortest one. "" if there is none."""
    lines, labels, loops = assembly.splitlines(), {}, []
    for i, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = i
        elif (branch := _BRANCH.search(line)) and branch[1] in labels:  # a branch back
            loops.append("\n".join(lines[labels[branch[1]] : i + 1]))
    return min(filter(contents.search, loops), key=len, default="")


def pipeline_problems(ptx: str, wgmma: bool) -> list[str]:
    """Reasons why the loop of products is not pipelined. wgmma: it uses Hopper's asynchronous products."""
    loop = product_loop(ptx)
    found = []
    if not re.search(r"cp\.async\.(c[ag]|bulk\.tensor)", loop):
        found.append("no asynchronous loads in the loop")
    if loads := _synchronous_loads(loop):
        found.append(f"{loads} synchronous loads in the loop")
    in_flight = [int(number) for number in re.findall(r"wgmma\.wait_group\S* (\d+)", loop)]
    if wgmma and (not in_flight or min(in_flight) == 0):
        found.append("the loop waits for all wgmma")
    return found


def promotion_problems(sass: str) -> list[str]:
    """Reasons why the loop of an FP8 product on Hopper, in SASS, is more than 4 products and a sum in fp32."""
    count = {name: len(re.findall(rf"\b{name}\b", sass)) for name in ("QGMMA", "HGMMA", "FFMA", "FMUL", "LDL", "STL")}
    found = []
    if count["QGMMA"] != 4 or count["HGMMA"]:
        found.append(f"{count['QGMMA']} QGMMA and {count['HGMMA']} HGMMA in the loop, not 4 and 0")
    if not 64 <= count["FFMA"] + count["FMUL"] <= 68:
        found.append(f"{count['FFMA']} FFMA and {count['FMUL']} FMUL in the loop, not 64 to 68")
    return found + ["spills in the loop"] * bool(count["LDL"] + count["STL"])


def signal_problems(ptx: str) -> list[str]:
    """Reasons why a signal may overtake what it announces, or why threads may leave a wait at different times."""
    found, events = [], _SIGNAL.findall(ptx)
    before = ["", *events[:-1]]
    if any(event.startswith("atom") and last != "bar.sync" for last, event in zip(before, events, strict=True)):
        found.append("a release without a barrier before it")
    if not all("bar.sync" in after for after in _CLOCK.findall(ptx)):
        found.append("threads may leave a wait at different times")
    return found


def _synchronous_loads(loop: str) -> int:
    """Number of synchronous loads of tiles. Narrower loads are of row indices."""
    return len(re.findall(r"ld\.global\S*\.(?:v\d|b16)", loop))


def spill_problems(kernel: Any, arch: str, registers: int, spills: int) -> list[str]:
    """Spills are allowed outside the loop if `maxnreg` causes them and two blocks then fit on a multiprocessor."""
    if not spills:
        return []
    if kernel.metadata.maxnreg is None:
        return [f"{spills} bytes spilled"]
    found = []
    if re.search(r"\b(LDL|STL)\b", product_loop(_sass(kernel.asm["cubin"]))):
        found.append(f"{spills} bytes spilled, some in the loop")
    threads, allocated = 32 * kernel.metadata.num_warps, 8 * triton.cdiv(registers, 8)
    shared, available = kernel.metadata.shared + SHARED_RESERVED, SHARED_LIMIT[family_of(arch)] + SHARED_RESERVED
    if 2 * threads * allocated > REGISTERS or 2 * shared > available:
        found.append(f"{spills} bytes spilled, but two blocks do not fit")
    return found


def _sass(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [NVIDIA_BIN / "nvdisasm", "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if not found:
        raise RuntimeError(f"the assembler output has no match for {pattern!r}:\n{text[-2000:]}")
    return int(found[1])
