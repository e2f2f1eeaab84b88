"""The expert layer: many small MLPs over rows that are grouped by expert. A custom class can replace it.

N rows received, M rows in expert-major order, K choices per row, D model dim, F inner width, E local experts. An
expert, or all of them, may have no rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_dualpipe.kernels.backend import Kernels
from moe_dualpipe.kernels.experts import adapted_experts, experts
from moe_dualpipe.kernels.fp8 import Fp8Recipe
from moe_dualpipe.kernels.order import ExpertOrder
from moe_dualpipe.kernels.weight_grads import WeightGrads

from .config import LoRA, ModelConfig
from .layers import seeded
from .lora import ExpertsAdapter


class ExpertLayer(nn.Module):
    """The contract of an expert layer, with its defaults. It holds the experts of one rank.

    Define a constructor and `forward`; everything else is optional. A plain nn.Module with these two works as well.

        def __init__(self, config, num_local_experts): ...
        def forward(self, x_MD, expert_offsets): ...    # returns y_MD

    Row m belongs to the local expert e with expert_offsets[e] <= m < expert_offsets[e + 1]. expert_offsets: [E + 1] in
    int32, from 0 to M. The result of a row depends only on this row and the weights of its expert.

    The constructor receives, if it has parameters of these names: `expert_ids`, the global ids of the rank's experts, a
    range; `layer`, the number of the block, from 0 (blocks of multi-token prediction follow the last layer); `options`,
    annotated with a dataclass (custom_layers.py).

    You may also give one expert instead of a layer: a class or function with the arguments (config), and optionally
    `expert_id`, `layer` and `options`, that returns an nn.Module from rows to rows; or a function that returns an
    nn.ModuleList of them; or a function of rows and weights (`expert_function` in per_expert.py).

    Weights. Stack the weights of the local experts along the first dimension of a parameter, or keep one module per
    local expert in an nn.ModuleList. Each expert is then saved separately, and loads on any number of ranks. All
    experts share the other parameters: these are equal on all ranks, which sum their gradients. The same holds for
    buffers. Parameters with `requires_grad=False` are frozen.

    The initial weights of an expert do not depend on the number of ranks (build_experts.py). They are copied from a
    layer with this expert alone, or drawn by an optional method

        def reset_expert(self, e): ...                  # draw all weights of local expert e; seeded for that expert
    """

    weight_grads: WeightGrads | None = None
    """Set by the pipeline. Pass it to operators of `moe_dualpipe.kernels`: it defers weight gradients."""
    kernels: Kernels = "auto"
    """Set by the model. Pass it to the same operators: it selects Triton or plain torch."""
    num_sms: int | None = None
    """Set by the model. Pass it to the products: it limits the multiprocessors that they use. None: all."""
    compiled: bool = False
    """Set by the model. Pass it to `experts`, or to `fuse` (kernels/fuse.py): it fuses operators with torch.compile."""
    takes_order: bool = False
    """True: forward is called as `forward(x_ND, order, weights_NK)`, and returns for each received row the weighted sum
    of the outputs of its experts. `order`, an ExpertOrder (kernels/routing.py), has the indices that group the rows by
    expert. Choices without an expert, and those of experts on other ranks, have position -1: ignore their weights. Also
    ignore indices past the last offset. weights_NK is in fp32 or wider."""
    stacked: Mapping[str, Sequence[int]] = {}
    """The rows of each matrix in a parameter that stacks matrices, for optimizers: {"gate_up": (F, F)} (layers.py)."""
    elementwise: Sequence[str] = ()
    """Parameters that Muon leaves to AdamW (layers.py)."""
    local_experts: range
    """Set by the model: the global ids of the experts."""

    def forward(self, x_MD: Tensor, expert_offsets: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define forward(x_MD, expert_offsets)")


class SwiGLUExperts(ExpertLayer):
    """SwiGLU experts, fused where a kernel exists. gate_up: [E, 2F, D]; down: [E, D, F]."""

    takes_order = True
    fp8: Fp8Recipe | None = None
    """Set by the model: how to round the operands of products to 8 bits. None: not at all."""

    def __init__(self, config: ModelConfig, num_local_experts: int):
        super().__init__()
        self.std, self.out_std = config.init_std, config.residual_std
        self.gate_up = nn.Parameter(torch.empty(num_local_experts, 2 * config.expert_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(num_local_experts, config.hidden_size, config.expert_size))
        self.stacked = {"gate_up": (config.expert_size, config.expert_size)}
        self.lora: ExpertsAdapter | None = None

    @torch.no_grad()
    def reset_expert(self, e: int) -> None:
        self.gate_up[e].normal_(std=self.std)
        self.down[e].normal_(std=self.out_std)

    def forward(self, x_ND: Tensor, order: ExpertOrder, weights_NK: Tensor) -> Tensor:  # type: ignore[override]
        options: dict[str, Any] = {
            "weight_grads": self.weight_grads, "kernels": self.kernels, "num_sms": self.num_sms,
            "compiled": self.compiled, "fp8": self.fp8,
        }  # fmt: skip
        if self.lora is not None:
            return adapted_experts(x_ND, self.gate_up, self.down, order, weights_NK, self.lora.low_rank, **options)
        return experts(x_ND, self.gate_up, self.down, order, weights_NK, **options)

    def add_adapter(self, lora: LoRA, kind: str, rows: Sequence[int] | None, seed: int, name: str) -> None:
        """Train only an adapter for each expert. name: for the seeds."""
        weights = {name: self.get_parameter(name) for name in ("gate_up", "down")}
        self.lora = ExpertsAdapter(lora, kind, weights, lambda e: seeded(seed, f"{name}.{self.local_experts[e]}"))
        self.per_expert = getattr(self, "per_expert", frozenset()) | {
            f"lora.{n}" for n, _ in self.lora.named_parameters()
        }
