"""Parts that the whole model shares: linear layer, SwiGLU MLP, rotary embedding, seeding of initial weights.

S positions, C head width.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moe_dualpipe.kernels.experts import swiglu
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.weight_grads import WeightGrads


class Linear(nn.Module):
    """y = x W^T, without a bias. The pipeline sets `weight_grads` to defer the weight gradient.

    fp32: compute y in fp32 in a model of any dtype.
    """

    def __init__(self, in_features: int, out_features: int, std: float, fp32: bool = False):
        super().__init__()
        self.fp32 = fp32
        self.weight = nn.Parameter(torch.empty(out_features, in_features).normal_(std=std))
        self.weight_grads: WeightGrads | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.weight_grads, self.fp32)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), arXiv 2002.05202. Gate and up are one matrix product."""

    def __init__(self, hidden_size: int, inner_size: int, std: float, out_std: float):
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * inner_size, std)
        self.stacked = {"gate_up.weight": (inner_size, inner_size)}
        self.down = Linear(inner_size, hidden_size, out_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


def stacked_matrices(stages: Iterable[nn.Module]) -> dict[str, tuple[int, ...]]:
    """For each parameter that stacks several matrices, by its global name: the number of rows of each matrix.

    One product with stacked matrices is faster than one product each, but some optimizers need to know where a matrix
    ends. A module declares its stacks in an attribute: `self.stacked = {"qkv.weight": (128, 64, 64)}` maps the name of
    a parameter to the rows of each matrix. If a parameter also stacks experts, these are the rows within one expert.
    """
    return {
        f"{prefix}.{name}": tuple(rows)
        for stage in stages
        for prefix, module in stage.named_modules()
        for name, rows in getattr(module, "stacked", {}).items()
    }


def elementwise_matrices(stages: Iterable[nn.Module]) -> set[str]:
    """The matrices that do not map hidden states to hidden states, by global name: embedding, head, routers.

    Muon leaves them to AdamW. A module declares them in an attribute: `self.elementwise = ("logits.weight",)` has the
    names of its parameters.
    """
    return {
        ".".join(filter(None, (prefix, name)))
        for stage in stages
        for prefix, module in stage.named_modules()
        for name in getattr(module, "elementwise", ())
    }


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or in fp64 if it is fp64: scores, angles and losses need that precision in a bf16 model."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotary_table(like_S: Tensor, head_dim: int, theta: float, start: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim) for i in [0, C/2), each [S, C]: the C/2 angles twice.

    `like_S` gives the length, device and dtype. The first position is `start`.
    """
    positions_S = torch.arange(start, start + len(like_S), device=like_S.device, dtype=like_S.dtype)
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=like_S.device, dtype=like_S.dtype) / head_dim)
    angles_SC = torch.outer(positions_S, frequencies).repeat(1, 2)
    return angles_SC.cos(), angles_SC.sin()


def rotate(x: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of [..., S, C], pairing channel i with i + C/2."""
    first, second = at_least_fp32(x).chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (at_least_fp32(x) * cos_SC + rotated * sin_SC).to(x.dtype)


def seed_of(seed: int, name: str) -> int:
    """A seed that depends on `seed` and `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Within this context, torch's CPU generator is seeded by `seed` and `name`. Afterwards its state is restored.

    Initial weights then depend on nothing else: a layer has the same weights on any rank, and so do replicas of a
    stage. On the meta device no numbers are drawn, so seeding is skipped: a large model has thousands of experts.
    """
    if torch.get_default_device().type == "meta":
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, name))
        yield
