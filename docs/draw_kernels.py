"""Draws docs/images/kernels.png: the launches of the fused experts, and the bytes that they save for backward.

    PYTHONPATH=. python docs/draw_kernels.py

The bytes are measured: what autograd saves between forward and backward, with the Triton kernels (interpreted without a
GPU) and with the chain of plain-torch operators, for a layer of the size of Qwen3-30B-A3B with few tokens.
"""

import os
from contextlib import ExitStack
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Patch

from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.gpu.configs import KERNEL_NAMES, TileConfig, override_config
from moe_dualpipe.kernels.routing import expert_order

OUT = Path(__file__).parent / "images" / "kernels.png"
FORWARD, BACKWARD, SAVED, TENSOR = "#f5b878", "#9ad19a", "#4c78a8", "white"
COLORS = {"x": SAVED, "z": "#72a0cf", "rows of F": "#d8b070", "rows of D": "#b0b0b0", "routing weights": "black"}
T, D, F, E, K = 32, 2048, 768, 8, 8
COLUMN = (1.1, 3.7, 6.85, 9.6)  # centers
WIDTH, HEIGHT = 1.9, 0.9


def saved_bytes(kernels) -> dict[str, int]:
    """Bytes per token that autograd saves, by kind of tensor."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, gate_up, down = (
        (torch.randn(*shape, device=device) / D**0.5).half().requires_grad_()
        for shape in ((T, D), (E, 2 * F, D), (E, D, F))
    )
    weights = torch.rand(T, K, device=device, requires_grad=True)
    ids = torch.stack([torch.randperm(E, device=device)[:K] for _ in range(T)])
    order = expert_order(ids, E, kernels=kernels)
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        experts(x, gate_up, down, order, weights, kernels=kernels)
    kinds = {D * T: "x", D * T * K: "rows of D", 2 * F * T * K: "z", F * T * K: "rows of F"}
    found: dict[str, int] = {}
    for pointer, storage in saved.items():
        if pointer not in (gate_up.data_ptr(), down.data_ptr()):
            name = kinds.get(storage.nbytes() // x.element_size(), "routing weights")
            found[name] = found.get(name, 0) + storage.nbytes() // T
    return found


def box(ax, column, y, text, color, width=WIDTH) -> None:
    corner = (COLUMN[column] - width / 2, y - HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.1"
    ax.add_patch(FancyBboxPatch(corner, width, HEIGHT, boxstyle=style, fc=color, ec="black", lw=0.8, zorder=2))
    ax.text(COLUMN[column], y, text, ha="center", va="center", fontsize=9, color="white" if color == SAVED else "black")


def arrow(ax, *points, label="", at=(0.0, 0.0)) -> None:
    """A line of horizontal and vertical pieces with a head at its last point."""
    ax.plot(*zip(*points[:-1], strict=True), color="black", lw=1, zorder=1)
    ax.annotate("", points[-1], points[-2], arrowprops={"arrowstyle": "-|>", "lw": 1, "fc": "black", "shrinkA": 0})
    ax.text(*at, label, fontsize=9, ha="center", va="center")


def graph(ax) -> None:
    ax.set_xlim(-0.3, 10.6)
    ax.set_ylim(0.1, 6.7)
    ax.axis("off")
    ax.set_title("One orange or green box per launch. T tokens, M = T K rows in expert-major order", fontsize=10)
    a, b, c, d = COLUMN
    half, wide = WIDTH / 2, 2.75
    forward, saved, backward, weights = 5.6, 4.3, 2.8, 1.0
    box(ax, 0, forward, "x [T, D]", SAVED)
    box(ax, 1, forward, "up: gather,\nGEMM, SwiGLU", FORWARD)
    box(ax, 2, forward, "down: GEMM", FORWARD)
    box(ax, 3, forward, "gather-sum\n→ y [T, D]", FORWARD)
    box(ax, 1, saved, "z [M, 2F]", SAVED)
    box(ax, 3, backward, "dy [T, D]", TENSOR)
    box(ax, 2, backward, "down_backward: gather,\nGEMM, SwiGLU backward,\nd weights", BACKWARD, wide)
    box(ax, 1, backward, "up_backward:\nGEMM", BACKWARD)
    box(ax, 0, backward, "gather-sum\n→ dx [T, D]", BACKWARD)
    box(ax, 1, weights, "wgrad:\nd gate_up", BACKWARD)
    box(ax, 2, weights, "wgrad:\nd down", BACKWARD)
    arrow(ax, (a + half, forward), (b - half, forward))
    arrow(ax, (b + half, forward), (c - half, forward), label="h", at=((b + c) / 2, forward + 0.25))
    arrow(ax, (c + half, forward), (d - half, forward))
    arrow(ax, (b, forward - HEIGHT / 2), (b, saved + HEIGHT / 2))
    arrow(ax, (b + half, saved), (c, saved), (c, backward + HEIGHT / 2))
    arrow(ax, (d - half, backward), (c + wide / 2, backward))
    arrow(ax, (c - wide / 2, backward), (b + half, backward), label="dz", at=(b + half + 0.25, backward + 0.25))
    arrow(ax, (b - half, backward), (a + half, backward))
    middle = (b + half + c - wide / 2) / 2 + 0.1
    arrow(ax, (middle, backward), (middle, weights), (b + half, weights), label="dz", at=(middle + 0.3, 1.85))
    arrow(ax, (c, backward - HEIGHT / 2), (c, weights + HEIGHT / 2), label="weighted h", at=(c + 0.75, 1.9))
    arrow(ax, (d, backward - HEIGHT / 2), (d, weights), (c + half, weights), label="dy", at=(d - 1.0, weights + 0.25))
    left = a - half - 0.25
    arrow(ax, (a - half, forward), (left, forward), (left, weights), (b - half, weights), label="x", at=(1.6, 1.25))
    kinds = {"forward": FORWARD, "backward": BACKWARD, "saved for backward": SAVED}
    handles = [Patch(fc=color, ec="black", lw=0.8, label=name) for name, color in kinds.items()]
    ax.legend(handles=handles, fontsize=9, ncols=3, loc="lower center", frameon=False, bbox_to_anchor=(0.5, -0.08))


def bars(ax) -> None:
    with ExitStack() as stack:
        if not torch.cuda.is_available():  # large tiles: the interpreter's time is per program
            for kernel in KERNEL_NAMES:
                stack.enter_context(override_config(kernel, TileConfig(64, 128, 128, 4, 1)))
        measured = {"Triton\nkernels": saved_bytes("triton"), "plain-torch\noperators": saved_bytes("reference")}
    for row, (implementation, found) in enumerate(measured.items()):
        left = 0.0
        for name, color in COLORS.items():
            kib = found.get(name, 0) / 1024
            ax.barh(row, kib, left=left, color=color, height=0.6, label=name if row else None)
            left += kib
        ax.text(left + 1, row, f"{left:.1f} KiB", va="center", fontsize=9)
        print(implementation.replace("\n", " "), {k: round(v / 1024, 2) for k, v in found.items()}, round(left, 2))
    ax.set_yticks(range(len(measured)), measured, fontsize=9)
    ax.set_xlim(0, 130)
    ax.invert_yaxis()
    ax.tick_params(axis="x", labelsize=9)
    ax.set_xlabel(f"saved for backward, KiB per token (D={D}, F={F}, K={K}, 16 bits)", fontsize=9)
    ax.legend(fontsize=9, ncols=5, loc="lower center", frameon=False, bbox_to_anchor=(0.45, 0.92), columnspacing=1)
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6.4), height_ratios=(3, 1), layout="constrained")
    graph(top)
    bars(bottom)
    figure.savefig(OUT, dpi=200)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
