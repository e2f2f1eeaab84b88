"""Muon (arXiv 2502.16982): the momentum of a matrix, orthogonalized, and scaled to the size of an AdamW update.

`torch.optim.Muon` iterates one matrix at a time, in bf16. Here matrices of a shape form batches, which fit into the
cache of a CPU, and the dtype is what the device multiplies fast. A CPU without instructions for bf16 emulates it: 89
matrices of 128 x 128 took 2.1 s in bf16 and 0.12 s in fp32, on one thread of an AMD EPYC without AVX-512. With
AVX512-BF16, products of 17 such matrices took 0.34 ms in bf16 and 1.05 ms in fp32.

N matrices of A rows and B columns.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .learning_rate import OptimizerConfig

A, B, C = 3.4445, -4.775, 2.0315
"""Coefficients of the Newton-Schulz iteration x <- A x + (B m + C m m) x with m = x x^T; those of torch."""
STEPS, EPSILON = 5, 1e-7
BATCH = {"cpu": 2**18}
"""Numbers in a batch; on other devices 2**24. 88 such matrices took 154 ms at once, and 95 ms in batches of 22."""


def iteration_dtype(x_NAB: Tensor) -> torch.dtype:
    """bf16 on GPUs and on CPUs that multiply in it, else fp32. Results differ by the rounding of bf16: about 1.3%.

    Fp32 for small matrices on CPUs: in bf16, the bits of their products depend on how many are in a batch, which a
    divided optimizer state changes. Of 13,000 random batches with sides from 24, none differed from its parts.
    """
    if x_NAB.device.type != "cpu":
        return torch.bfloat16
    fast = min(x_NAB.shape[1:]) >= 32 and torch.cpu._is_avx512_bf16_supported()  # all CPUs with AMX have it
    return torch.bfloat16 if fast else torch.float32


def orthogonalize(x_NAB: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices with nearly the same singular vectors, and singular values near 1, in `dtype`."""
    tall = x_NAB.shape[1] > x_NAB.shape[2]
    x = (x_NAB.mT if tall else x_NAB).to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


class Muon:
    """Updates `weights` from their `grad`. momenta: of each weight, in place."""

    def __init__(self, weights: Sequence[Tensor], momenta: Sequence[Tensor], config: OptimizerConfig):
        self.momentum, self.decay = config.momentum, config.weight_decay
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for pair in zip(weights, momenta, strict=True):
            by_shape.setdefault(pair[0].shape, []).append(pair)
        self.batches = [batch for pairs in by_shape.values() for batch in _batches(pairs)]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for batch in self.batches:
            weights, momenta = ([*tensors] for tensors in zip(*batch, strict=True))
            grads = [weight.grad for weight in weights]
            torch._foreach_lerp_(momenta, grads, 1 - self.momentum)
            updates = torch.stack(torch._foreach_lerp(grads, momenta, self.momentum))  # Nesterov
            steps = orthogonalize(updates, iteration_dtype(updates))
            torch._foreach_mul_(weights, 1 - lr * self.decay)
            torch._foreach_add_(weights, steps.unbind(), alpha=-0.2 * lr * max(weights[0].shape) ** 0.5)


def _batches(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    weight = pairs[0][0]
    size = max(1, BATCH.get(weight.device.type, 2**24) // weight.numel())
    yield from (pairs[i : i + size] for i in range(0, len(pairs), size))
