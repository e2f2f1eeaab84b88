"""This project's fused experts as an `experts_implementation` of Hugging Face transformers 5.

    from moe_dualpipe.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation=register())

transformers 5 stores the experts of a layer as two stacked tensors, gate_up_proj [E, 2F, D] and down_proj [E, D, F], as
`kernels.experts` does, and selects the function that computes them by name. This module registers such a function. It
rejects experts other than a SwiGLU MLP, and turns expert ids into an ExpertOrder.

N tokens, K choices per token, E experts of this rank, D model dim, F expert hidden size.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_module_registration_hook

from ..kernels.backend import Kernels, validate_kernels
from ..kernels.experts import experts
from ..kernels.routing import expert_order

NAME = "moe_dualpipe"

# Options of transformers' decorator `use_experts_implementation`, which become attributes of the experts.
_UNSUPPORTED = (
    ("has_gate", False, "up_proj without a gate"),
    ("has_bias", True, "biases"),
    ("is_transposed", True, "weights stored as [E, in, out]"),
    ("is_concatenated", False, "rows of gate and up alternate"),
    ("has_post_expert_norm", True, "a norm after each expert"),
)


def register(name: str = NAME, kernels: Kernels = "auto") -> str:
    """Register `experts_forward` as the `experts_implementation` called `name`, and return the name.

    kernels: "auto" uses Triton for tensors on a GPU and plain torch elsewhere; see kernels/backend.py.
    Raises ImportError without transformers 5, and ValueError for an unknown value of `kernels`. Building a model with
    this implementation raises ValueError if its experts are not supported, before its weights are read.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError("experts_implementation needs transformers 5: pip install 'transformers>=5'") from error
    ALL_EXPERTS_FUNCTIONS.register(name, partial(experts_forward, kernels=validate_kernels(kernels)))
    _check_new_models(name)
    return name


@cache
def _check_new_models(name: str) -> None:
    """Check experts whose configuration names this implementation when they become part of a model."""

    def check(_parent: nn.Module, _name: str, module: Any) -> None:
        config = getattr(module, "config", None)
        if hasattr(module, "has_gate") and getattr(config, "_experts_implementation", None) == name:
            _check_supported(module, name)

    register_module_module_registration_hook(check)


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, kernels: Kernels = "auto"
) -> Tensor:
    """Return the weighted sum of each token's experts: [N, D]. transformers calls this as the experts' `forward`.

    module: an nn.Module of transformers with the experts `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F].
    hidden_states: [N, D]. top_k_index, top_k_weights: [N, K]. With transformers' expert parallelism, ids of E or more
    are experts of other ranks, which contribute nothing here.
    Raises ValueError for experts other than a SwiGLU MLP without biases, in the layout above.
    """
    _check_supported(module)
    gate_up_EGD, down_EDF = module.gate_up_proj, module.down_proj
    ids_NK, num_choices = top_k_index, None
    if getattr(module, "_is_expert_parallel", False):
        is_local_NK = ids_NK < len(down_EDF)
        ids_NK = ids_NK.masked_fill(~is_local_NK, -1)
        # On a GPU, counting would be a host sync. The kernels need only an upper bound there.
        num_choices = ids_NK.numel() if ids_NK.is_cuda else int(is_local_NK.sum())
    order = expert_order(ids_NK, len(down_EDF), num_choices, kernels)
    weights_NK = top_k_weights.to(torch.promote_types(top_k_weights.dtype, torch.float32))
    return experts(hidden_states, gate_up_EGD, down_EDF, order, weights_NK, kernels=kernels)


def _check_supported(module: Any, name: str = NAME) -> None:
    """Raise ValueError with the features of these experts that `experts` lacks, by what transformers sets."""
    from transformers.integrations.moe import _default_apply_gate

    found = [f"{name}={value}: {what}" for name, value, what in _UNSUPPORTED if getattr(module, name, None) is value]
    own_gate = type(module)._apply_gate is not _default_apply_gate
    act_fn = getattr(module, "act_fn", None)
    if own_gate and module.has_gate:
        found.append("its own _apply_gate")
    elif not _is_silu(act_fn):
        found.append(f"activation {type(act_fn).__name__}, not SiLU")
    if found:
        what = f"experts_implementation={name!r} does not support {type(module).__name__}"
        raise ValueError(f"{what} ({'; '.join(found)}): use 'grouped_mm' or 'eager'")


def _is_silu(act_fn: object) -> bool:
    from transformers.activations import SiLUActivation

    return isinstance(act_fn, nn.SiLU | SiLUActivation) or act_fn is functional.silu
