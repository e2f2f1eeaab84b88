"""Run the expert kernels alone: compare their accuracy, saved bytes and time with plain torch.

    python examples/fused_experts.py
    python examples/fused_experts.py --tokens 4096 --hidden 2048 --inner 768 --experts 64        (on a GPU)

Without a GPU, Triton interprets the same kernels on the CPU, which is slow.
"""

import argparse
import os
import sys
import time

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.routing import expert_order, route


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--inner", type=int, default=32)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    sizes = parser.parse_args()
    for name, size in vars(sizes).items():
        if size < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1: got {size}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    x = normal(sizes.tokens, sizes.hidden).to(dtype)
    gate_up = (normal(sizes.experts, 2 * sizes.inner, sizes.hidden) / sizes.hidden**0.5).to(dtype)
    down = (normal(sizes.experts, sizes.hidden, sizes.inner) / sizes.inner**0.5).to(dtype)
    logits, dy = normal(sizes.tokens, sizes.experts), normal(sizes.tokens, sizes.hidden)

    def run(kernels, dtype=dtype):
        """Return the output and all gradients, the bytes per token that are saved for backward, and the seconds."""
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, gate_up, down)]
        scores = logits.to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()
        saved: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            saved[t.untyped_storage().data_ptr()] = t.nbytes
            return t

        started = time.perf_counter()
        weights, ids = route(scores, sizes.top_k, kernels=kernels)
        order = expert_order(ids, sizes.experts, kernels=kernels)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = experts(leaves[0], leaves[1], leaves[2], order, weights, kernels=kernels)
        parameters = {t.untyped_storage().data_ptr() for t in leaves[1:]}
        activations = sum(size for pointer, size in saved.items() if pointer not in parameters)
        y.backward(dy.to(y.dtype))
        if device == "cuda":
            torch.cuda.synchronize()
        return [y, scores.grad, *(t.grad for t in leaves)], activations / sizes.tokens, time.perf_counter() - started

    exact, _, _ = run("reference", torch.float64)
    print(f"{dtype} on {device}; relative error against float64:")
    names = ("y", "d logits", "d x", "d gate_up", "d down")
    print(f"{'':10}" + "".join(f"{name:>11}" for name in names) + " saved/token")
    for kernels in ("reference", "triton"):
        results, saved, seconds = run(kernels)
        errors = "".join(f"{relative_error(ours, truth):11.1e}" for ours, truth in zip(results, exact, strict=True))
        print(f"{kernels:10}{errors}{saved:10,.0f} B   {seconds:.2f} s")
    formula = x.element_size() * (sizes.hidden + 2 * sizes.top_k * sizes.inner)
    print(f"x and the pre-activations alone (formula): {formula:,} B per token")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"fused_experts.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
