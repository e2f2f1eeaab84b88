"""Draws docs/images/kernels.png: what the fused experts launch, what is kept, and how much that is.

    PYTHONPATH=. python docs/draw_kernels.py

The bytes are measured: what autograd keeps between forward and backward, with the Triton kernels (interpreted, if there
is no GPU) and with the chain of plain-torch operators, at the sizes of a Qwen3-30B-A3B layer and few tokens.
"""

import os
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.gpu.configs import KERNEL_NAMES, TileConfig, override_config
from moe_dualpipe.kernels.routing import expert_order

OUT = Path(__file__).parent / "images" / "kernels.png"
FORWARD, BACKWARD, KEPT, PLAIN = "#f0a860", "#7fbf7f", "#4c78a8", "#b0b0b0"
T, D, F, E, K = 32, 2048, 768, 8, 8


def kept_bytes(kernels) -> dict[str, int]:
    """Bytes a token that autograd keeps, by the kind of tensor."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16
    x, gate_up, down = (
        (torch.randn(*shape, device=device) / D**0.5).to(dtype).requires_grad_()
        for shape in ((T, D), (E, 2 * F, D), (E, D, F))
    )
    weights = torch.rand(T, K, device=device, requires_grad=True)
    ids = torch.stack([torch.randperm(E, device=device)[:K] for _ in range(T)])
    order = expert_order(ids, E, kernels=kernels)
    kept: dict[int, torch.Tensor] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        experts(x, gate_up, down, order, weights, kernels=kernels)
    kinds = {D * T: "x", D * T * K: "rows of D", 2 * F * T * K: "pre-activation z", F * T * K: "rows of F"}
    found: dict[str, int] = {}
    for t in kept.values():
        if t.untyped_storage().data_ptr() not in {
            gate_up.untyped_storage().data_ptr(),
            down.untyped_storage().data_ptr(),
        }:
            name = kinds.get(t.untyped_storage().nbytes() // t.element_size(), "routing weights")
            found[name] = found.get(name, 0) + t.untyped_storage().nbytes() // T
    return found


def box(ax, x, y, text, color, width=1.9, height=0.62) -> None:
    style = "round,pad=0.02,rounding_size=0.08"
    ax.add_patch(
        FancyBboxPatch((x - width / 2, y - height / 2), width, height, boxstyle=style, fc=color, ec="black", lw=0.8)
    )
    ax.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if color == KEPT else "black")


def arrow(ax, start, end, text="", dashed=False) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "lw": 0.9, "ls": "--" if dashed else "-"})
    if text:
        ax.text((start[0] + end[0]) / 2 + 0.06, (start[1] + end[1]) / 2, text, fontsize=7.5, va="center")


def graph(ax) -> None:
    ax.set_xlim(0, 10)
    ax.set_ylim(0.2, 6.2)
    ax.axis("off")
    ax.set_title("one launch a box, two small ones left out; T tokens, M = T K rows in expert-major order", fontsize=9)
    box(ax, 1.1, 5.5, "x [T, D]", KEPT)
    box(ax, 3.9, 5.5, "up: gather, GEMM,\nSwiGLU", FORWARD)
    box(ax, 6.4, 5.5, "down: GEMM", FORWARD)
    box(ax, 8.9, 5.5, "gather-sum by\nrouting weight", FORWARD)
    box(ax, 3.9, 4.1, "z [M, 2F]", KEPT)
    box(ax, 8.9, 2.8, "dy [T, D]", "white")
    box(ax, 6.05, 2.8, "down_backward: gather, GEMM,\nSwiGLU again, d weights", BACKWARD, 3.1, 0.7)
    box(ax, 3.1, 1.7, "up_backward:\nGEMM", BACKWARD)
    box(ax, 1.1, 2.8, "gather-sum: dx", BACKWARD)
    box(ax, 6.2, 0.75, "wgrad: d gate_up", BACKWARD)
    box(ax, 8.9, 0.75, "wgrad: d down", BACKWARD)
    arrow(ax, (2.05, 5.5), (2.95, 5.5))
    arrow(ax, (4.85, 5.5), (5.45, 5.5), "")
    ax.text(5.15, 5.68, "h", fontsize=8, ha="center")
    arrow(ax, (7.35, 5.5), (7.95, 5.5))
    arrow(ax, (3.9, 5.19), (3.9, 4.41))
    arrow(ax, (4.5, 3.79), (5.4, 3.15))
    arrow(ax, (7.95, 2.8), (7.62, 2.8))
    arrow(ax, (5.3, 2.45), (4.05, 1.8))
    ax.text(4.95, 2.0, "dz", fontsize=7.5, va="center")
    arrow(ax, (2.5, 2.01), (1.5, 2.49))
    arrow(ax, (6.2, 2.45), (6.2, 1.06), "dz")
    arrow(ax, (6.9, 2.45), (8.5, 1.06))
    ax.text(7.95, 1.75, "w h", fontsize=7.5, va="center")
    arrow(ax, (8.9, 2.49), (8.9, 1.06), "dy")
    arrow(ax, (1.1, 5.19), (5.25, 0.85), "", True)


def bars(ax) -> None:
    with_triton, plain = {}, {}
    config = TileConfig(64, 128, 128, 4, 1)
    if torch.cuda.is_available():
        with_triton = kept_bytes("triton")
    else:
        from contextlib import ExitStack

        with ExitStack() as stack:
            for kernel in KERNEL_NAMES:
                stack.enter_context(override_config(kernel, config))
            with_triton = kept_bytes("triton")
    plain = kept_bytes("reference")
    names = ["x", "pre-activation z", "rows of F", "rows of D", "routing weights"]
    colors = [KEPT, "#72a0cf", "#d8b070", "#b0b0b0", "black"]
    for column, found in enumerate((with_triton, plain)):
        bottom = 0.0
        for name, color in zip(names, colors, strict=True):
            kib = found.get(name, 0) / 1024
            ax.bar(column, kib, bottom=bottom, color=color, width=0.55, label=name if column else None)
            bottom += kib
        ax.text(column, bottom + 1, f"{bottom:.1f} KiB", ha="center", fontsize=8)
        print(("triton", "reference")[column], {k: round(v / 1024, 2) for k, v in found.items()}, round(bottom, 2))
    ax.set_xticks([0, 1], ["Triton kernels", "chain of\nplain-torch operators"], fontsize=8)
    ax.set_ylabel("kept for the backward, KiB a token", fontsize=8)
    ax.set_ylim(0, 150)
    ax.legend(fontsize=7, loc="upper left", frameon=False)
    ax.set_title(f"D={D}, F={F}, K={K}, 16 bits", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(2.4, 1))
    graph(left)
    bars(right)
    figure.tight_layout()
    figure.savefig(OUT, dpi=150)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
