"""The minimum time of each layer shape from a GPU's data sheet (roofline model). Nothing is measured.

    python -m benchmarks.gpu.roofline
    python -m benchmarks.gpu.roofline --tflops 989 --tb-per-s 4.8

A kernel launch takes at least its FLOPs over the matmul rate, and at least its bytes over the memory bandwidth. The
larger of the two is its minimum time. Launches run one after another, so their minimum times add up. Bytes are those of
the fused graph: each input and each output of a launch once. Re-reads after cache misses are not counted.
"""

import argparse
import math
from dataclasses import dataclass

from .shapes import SHAPES, Shape

H200 = (989.0, 4.8)  # NVIDIA's data sheet of the H200 SXM: dense bf16 TFLOP/s, memory bandwidth in TB/s


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """FLOPs and bytes of one kernel launch in bf16."""

    name: str
    flops: int
    bytes: int

    def min_ms(self, tflops: float, tb_per_s: float) -> float:
        return 1e3 * max(self.flops / (tflops * 1e12), self.bytes / (tb_per_s * 1e12))


def launches_of(shape: Shape) -> dict[str, list[KernelLaunch]]:
    """Return the launches of forward and backward. Token rows gathered through an index count once per token."""
    m, d, f, tokens = shape.rows, shape.D, shape.F, 2 * shape.T * shape.D
    matmul_flops = 2 * m * d * f  # [M, D] x [D, F]
    gate_up, down, rows_f, rows_d = 4 * shape.E * f * d, 2 * shape.E * f * d, 2 * m * f, 2 * m * d  # bytes
    return {
        "forward": [
            KernelLaunch("up", 2 * matmul_flops, tokens + gate_up + 3 * rows_f),
            KernelLaunch("down", matmul_flops, rows_f + down + rows_d),
            KernelLaunch("sum", 0, rows_d + tokens),
        ],
        "backward": [
            KernelLaunch("down_backward", matmul_flops, tokens + down + 5 * rows_f),
            KernelLaunch("wgrad of down", matmul_flops, tokens + rows_f + 2 * down),
            KernelLaunch("up_backward", 2 * matmul_flops, 2 * rows_f + gate_up + rows_d),
            KernelLaunch("sum", 0, rows_d + tokens),
            KernelLaunch("wgrad of gate_up", 2 * matmul_flops, tokens + 2 * rows_f + 2 * gate_up),
        ],
    }


def roofline_table(tflops: float, tb_per_s: float) -> str:
    lines = [
        "| shape | forward, TFLOP | GB | min ms | max TFLOP/s | backward, TFLOP | GB | min ms | max TFLOP/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        cells = [str(shape)]
        for launches in launches_of(shape).values():
            flops, num_bytes = sum(k.flops for k in launches), sum(k.bytes for k in launches)
            min_ms = sum(k.min_ms(tflops, tb_per_s) for k in launches)
            cells += [f"{flops / 1e12:.2f}", f"{num_bytes / 1e9:.1f}", f"{min_ms:.2f}", f"{flops / min_ms / 1e9:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tflops", type=float, default=H200[0], help="dense bf16 rate (default: H200 data sheet)")
    parser.add_argument("--tb-per-s", type=float, default=H200[1], help="memory bandwidth (default: H200 data sheet)")
    options = parser.parse_args()
    for name, rate in (("--tflops", options.tflops), ("--tb-per-s", options.tb_per_s)):
        if not 0 < rate < math.inf:
            parser.error(f"{name} must be a positive number: got {rate:g}")
    print(roofline_table(options.tflops, options.tb_per_s))


if __name__ == "__main__":
    main()
