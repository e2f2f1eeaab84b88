"""Parts that the whole model shares: linear layer, SwiGLU MLP, seeding of initial weights."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moe_dualpipe.kernels.experts import swiglu
from moe_dualpipe.kernels.fuse import fuse
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.weight_grads import WeightGrads

from .config import LoRA
from .lora import LinearAdapter, low_rank_update


class Linear(nn.Module):
    """y = x W^T + b. The pipeline sets `weight_grads` to defer the gradient of W.

    fp32: compute y in fp32 in a model of any dtype. bias: add b, initially zero.
    """

    def __init__(self, in_features: int, out_features: int, std: float, fp32: bool = False, bias: bool = False):
        super().__init__()
        self.fp32 = fp32
        self.weight = nn.Parameter(torch.empty(out_features, in_features).normal_(std=std))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.weight_grads: WeightGrads | None = None
        self.lora: LinearAdapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.weight_grads, self.fp32)
        if self.lora is not None:
            y = y + self.lora(x)
        return y if self.bias is None else y + self.bias

    def add_adapter(self, lora: LoRA, kind: str, rows: Sequence[int] | None, seed: int, name: str) -> None:
        """Train only an adapter. rows: those of each matrix, if there are several. name: for the seed."""
        with seeded(seed, name):
            self.lora = LinearAdapter(lora, kind, self.weight.shape[1], rows or [self.weight.shape[0]])

    def merged_weight(self) -> Tensor:
        """The weight with its adapter, [O, I]."""
        weight = self.weight
        if self.lora is None:
            return weight
        return (weight + low_rank_update(self.lora.pairs()["weight"], self.lora.scale)).to(weight.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), arXiv 2002.05202. Gate and up are one matrix product."""

    compiled: bool = False

    def __init__(self, hidden_size: int, inner_size: int, std: float, out_std: float):
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * inner_size, std)
        self.stacked = {"gate_up.weight": (inner_size, inner_size)}
        self.down = Linear(inner_size, hidden_size, out_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(fuse(swiglu, self.compiled)(self.gate_up(x)))


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


def seed_of(seed: int, name: str) -> int:
    """A seed that depends on `seed` and `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's random numbers on this device. (`torch.manual_seed` also seeds every GPU, which takes 80 us.)"""
    (torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed)(seed)


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
        # torch.manual_seed would also seed GPUs, and formats a stack trace for each kind that is not there.
        torch.default_generator.manual_seed(seed_of(seed, name))
        yield
