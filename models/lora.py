"""Low-rank adapters (LoRA, arXiv 2106.09685): train two small matrices beside each frozen one.

    y = W x + scale * B A x         W [O, I] is frozen; A [R, I] starts at random, B [O, R] at zero

So the model starts with the outputs of its base, bit for bit, and only A and B have gradients and optimizer state. A
layer that stacks matrices, such as queries, keys and values, has a pair for each, as published models name them.
Routed experts have a pair each, as grouped products over the same rows.

The adapter of a layer is its submodule `lora`. A checkpoint stores adapters beside the base. Whoever reads a model from
it, except a resumed run, gets W + scale * B A (checkpoint/weights.py).

O output and I input width, R rank, E experts of this rank, M rows in expert-major order.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.weight_grads import WeightGrads

from .config import LoRA

_OF_LINEAR = re.compile(r"(.+)\.lora\.([AB])\.(\d+)")
_OF_EXPERT = re.compile(r"(.+)\.lora\.(\w+)_([AB])\.(\d+)")


def adapted_weight(name: str) -> tuple[str, str, int] | None:
    """The frozen weight of an adapter, A or B, and the number of its matrix in the weight. None for other tensors.

    Names are global, as in checkpoints:
    "layers.0.attention.qkv.lora.B.1" -> ("layers.0.attention.qkv.weight", "B", 1)
    "layers.1.mlp.experts.lora.gate_up_A.7" -> ("layers.1.mlp.experts.gate_up.7", "A", 0)
    """
    if found := _OF_LINEAR.fullmatch(name):
        return f"{found[1]}.weight", found[2], int(found[3])
    if found := _OF_EXPERT.fullmatch(name):
        return f"{found[1]}.{found[2]}.{found[4]}", found[3], 0
    return None


def low_rank_update(pairs: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """scale * B A of each pair (A [..., R, I], B [..., O, R]), stacked along O, in fp32 or wider."""
    dtype = torch.promote_types(pairs[0][0].dtype, torch.float32)
    return scale * torch.cat([b.to(dtype) @ a.to(dtype) for a, b in pairs], dim=-2)


def squared_norm(pairs: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """The squared norm of `low_rank_update`, from matrices of R x R alone: |B A|^2 = <B^T B, A A^T>. In fp64."""
    grams = ((b.double().mT @ b.double()) * (a.double() @ a.double().mT) for a, b in pairs)
    return scale**2 * torch.stack([gram.sum() for gram in grams]).sum()


class Adapter(nn.Module):
    """What adapters share. kind: one of LORA_TARGETS. Muon leaves their matrices to AdamW (`elementwise`)."""

    def __init__(self, lora: LoRA, kind: str):
        super().__init__()
        self.kind, self.rank, self.scale, self.dropout = kind, lora.rank, lora.scale, lora.dropout

    @property
    def elementwise(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.named_parameters())

    def pairs(self) -> Mapping[str, list[tuple[Tensor, Tensor]]]:
        """The matrices A and B of each adapted weight, by its name in the layer."""
        raise NotImplementedError

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class LinearAdapter(Adapter):
    """The adapter of a weight [O, I] whose matrices have `rows`. Returns scale * B A x: [..., O]."""

    weight_grads: WeightGrads | None = None

    def __init__(self, lora: LoRA, kind: str, inputs: int, rows: Sequence[int]):
        super().__init__(lora, kind)
        self.A = nn.ParameterList(nn.Parameter(_random(torch.empty(lora.rank, inputs))) for _ in rows)
        self.B = nn.ParameterList(nn.Parameter(torch.zeros(outputs, lora.rank)) for outputs in rows)

    def forward(self, x: Tensor) -> Tensor:
        x, grads = self.dropped(x), self.weight_grads
        parts = [linear(linear(x, a, grads), b, grads) for a, b in zip(self.A, self.B, strict=True)]
        return self.scale * (parts[0] if len(parts) == 1 else torch.cat(parts, -1))

    def pairs(self) -> Mapping[str, list[tuple[Tensor, Tensor]]]:
        return {"weight": [*zip(self.A, self.B, strict=True)]}


class ExpertsAdapter(Adapter):
    """The adapters of stacked experts: NAME_A [E, R, I] and NAME_B [E, O, R] for each weight NAME [E, O, I].

    seeded_for: a context for the random numbers of a local expert.
    """

    def __init__(
        self, lora: LoRA, kind: str, weights: Mapping[str, Tensor],
        seeded_for: Callable[[int], AbstractContextManager[None]],
    ):  # fmt: skip
        super().__init__(lora, kind)
        self.names = tuple(weights)
        for name, (number, outputs, inputs) in ((name, weight.shape) for name, weight in weights.items()):
            self.register_parameter(f"{name}_A", nn.Parameter(torch.empty(number, lora.rank, inputs)))
            self.register_parameter(f"{name}_B", nn.Parameter(torch.zeros(number, outputs, lora.rank)))
            for expert in range(number):
                with seeded_for(expert):
                    _random(self.pair(name)[0].data[expert])

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        return getattr(self, f"{name}_A"), getattr(self, f"{name}_B")  # torch.compile cannot trace get_parameter

    def low_rank(self, name: str, x_MI: Tensor, expert_offsets: Tensor, **options: Any) -> Tensor:
        """scale * B[e] A[e] x[m] for the rows m of each expert e: [M, O]. options: as for `grouped_linear`."""
        a, b = self.pair(name)
        low_MR = grouped_linear(self.dropped(x_MI), a, expert_offsets, **options)
        return self.scale * grouped_linear(low_MR, b, expert_offsets, **options)

    def pairs(self) -> Mapping[str, list[tuple[Tensor, Tensor]]]:
        return {name: [self.pair(name)] for name in self.names}


def _random(matrix: Tensor) -> Tensor:
    """As torch initializes nn.Linear, and PEFT its A: uniform between -1 / sqrt(I) and 1 / sqrt(I)."""
    bound = matrix.shape[-1] ** -0.5
    return nn.init.uniform_(matrix, -bound, bound)
