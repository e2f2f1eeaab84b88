"""The expert layer: many small MLPs over rows that are grouped by expert. You can replace it by your own class.

The interface of an expert layer, which `ModelConfig.experts = "module:Class"` selects:

    Class(config: ModelConfig, num_local_experts: int)   an nn.Module with the parameters of this rank's experts
    forward(x_MD, expert_offsets) -> y_MD   row m belongs to the expert e with expert_offsets[e] <= m <
                                            expert_offsets[e + 1]; expert_offsets: [E + 1] in int32, from 0 to M

Optional:

    reset_expert(e)       draw the weights of local expert e; called with a seed for that expert, so that weights do not
                          depend on the number of ranks
    weight_grads = None   set by the pipeline; pass it to the operators of moe_dualpipe.kernels: defers weight gradients
    kernels = "auto"      set by the model; pass it to the same operators: selects Triton or plain torch
    stacked = {"gate_up": (F, F)}   the rows of each matrix in an expert's parameter, for optimizers (see layers.py)
    takes_order = True    forward is called as forward(x_ND, order, weights_NK) -> y_ND: from received rows to weighted
                          sums of expert outputs. `order` is an ExpertOrder (kernels/routing.py): indices to read rows
                          by. Choices of experts on other ranks have position -1. weights_NK is in fp32.

Parameters that stack the local experts along their first dimension are saved expert by expert, and load on any number
of ranks. Other parameters are saved whole, and load only on the same number of ranks.

N rows received, M rows in expert-major order, K choices a row, D model dim, F inner width, E local experts. Any number
of rows may be zero.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_dualpipe.kernels.backend import Kernels
from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.routing import ExpertOrder
from moe_dualpipe.kernels.weight_grads import WeightGrads

from .config import ModelConfig


class SwiGLUExperts(nn.Module):
    """SwiGLU experts, fused where a kernel exists. gate_up: [E, 2F, D]; down: [E, D, F]."""

    takes_order = True

    def __init__(self, config: ModelConfig, num_local_experts: int):
        super().__init__()
        self.std, self.out_std = config.init_std, config.residual_std
        self.gate_up = nn.Parameter(torch.empty(num_local_experts, 2 * config.expert_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(num_local_experts, config.hidden_size, config.expert_size))
        self.stacked = {"gate_up": (config.expert_size, config.expert_size)}
        self.weight_grads: WeightGrads | None = None
        self.kernels: Kernels = "auto"

    @torch.no_grad()
    def reset_expert(self, e: int) -> None:
        if not self.gate_up.is_meta:
            self.gate_up[e].normal_(std=self.std)
            self.down[e].normal_(std=self.out_std)

    def forward(self, x_ND: Tensor, order: ExpertOrder, weights_NK: Tensor) -> Tensor:
        options = {"weight_grads": self.weight_grads, "kernels": self.kernels}
        return experts(x_ND, self.gate_up, self.down, order, weights_NK, **options)


def expert_class(name: str) -> Callable[[ModelConfig, int], nn.Module]:
    """The expert layer called `name`: "swiglu" or "module:Class". Raises ValueError if there is no such layer."""
    if name == "swiglu":
        return SwiGLUExperts
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ValueError(f"cannot import the expert layer {name!r}: {error}") from error
    except AttributeError:
        raise ValueError(f"cannot find the expert layer {name!r}: {module} has no {attribute}") from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"the expert layer {name!r} must be an nn.Module class: got {found!r}")
    return found
