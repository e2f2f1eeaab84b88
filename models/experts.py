"""The expert layer: many small MLPs over rows that are grouped by expert. You can replace it by your own class.

The interface of an expert layer, which `ModelConfig.experts = "module:Class"` selects:

    Class(config: ModelConfig, num_local_experts: int)   an nn.Module with the parameters of this rank's experts. If the
                                            constructor has a parameter `expert_ids`, it gets their global ids, a
                                            range; with `layer`, the number of the block, counted from 0 (MTP blocks
                                            follow the last layer). Afterwards the attribute `local_experts` is set,
                                            which is the same range
    forward(x_MD, expert_offsets) -> y_MD   row m belongs to the expert e with expert_offsets[e] <= m <
                                            expert_offsets[e + 1]; expert_offsets: [E + 1] in int32, from 0 to M

Optional:

    reset_expert(e)       draw all weights of local expert e; called with a seed for that expert. Without it, they come
                          from Class(config, 1, expert_ids=range(g, g + 1)), built with that seed, where g is the
                          expert's global id. So weights do not depend on the number of ranks (build_experts.py)
    weight_grads = None   set by the pipeline; pass it to the operators of moe_dualpipe.kernels: defers weight gradients
    kernels = "auto"      set by the model; pass it to the same operators: selects Triton or plain torch
    stacked = {"gate_up": (F, F)}   the rows of each matrix in an expert's parameter, for optimizers (see layers.py)
    elementwise = ("gate",)         parameters that Muon leaves to AdamW (see layers.py)
    averaged_buffers = ("running_mean",)   buffers to average over the replicas of the layer after each step
    takes_order = True    forward is called as forward(x_ND, order, weights_NK) -> y_ND: from received rows to weighted
                          sums of expert outputs. `order` is an ExpertOrder (kernels/routing.py): indices to read rows
                          by. Choices of experts on other ranks, and of no expert, have position -1: ignore their
                          weights. Indices past the last offset are unused. weights_NK is in fp32.

Each expert is saved separately, and loads on any number of ranks, if parameters stack the local experts along their
first dimension, or if its parameters are in an nn.ModuleList with one module per local expert. All experts of the rank
share the other parameters. These start equal on all ranks, are not kept equal, are saved whole, and load only on the
same number of ranks. Buffers are treated alike. To tell these cases apart, layers with one and with two experts are
built, and their shapes compared.

Parameters with `requires_grad=False` are frozen: never changed, without gradient and optimizer state.

N rows received, M rows in expert-major order, K choices a row, D model dim, F inner width, E local experts. Any number
of rows may be zero.
"""

import importlib
import inspect
import traceback
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_dualpipe.kernels.backend import Kernels
from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.routing import ExpertOrder
from moe_dualpipe.kernels.weight_grads import WeightGrads
from moe_dualpipe.messages import describe, printable

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
        self.gate_up[e].normal_(std=self.std)
        self.down[e].normal_(std=self.out_std)

    def forward(self, x_ND: Tensor, order: ExpertOrder, weights_NK: Tensor) -> Tensor:
        options = {"weight_grads": self.weight_grads, "kernels": self.kernels}
        return experts(x_ND, self.gate_up, self.down, order, weights_NK, **options)


def expert_class(name: str) -> type[nn.Module]:
    """The expert layer called `name`: "swiglu" or "module:Class". Raises ValueError if there is no such layer."""
    if name == "swiglu":
        return SwiGLUExperts
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"cannot import the expert layer {name!r}: {describe(error)}") from error
    except (Exception, SystemExit) as error:  # the file can do anything, such as call a main function
        raise ValueError(f"cannot import the expert layer {name!r}: {describe_error(error)}") from error
    found = getattr(imported, attribute, None)
    if found is None:
        raise ValueError(f"cannot find the expert layer {name!r}: {module} has no {attribute}")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"the expert layer {name!r} must be an nn.Module class: got {found!r}")
    try:
        if found.__init__ is nn.Module.__init__:
            raise TypeError("it has no constructor")
        inspect.signature(found).bind("config", 1, **dict.fromkeys(accepted_keywords(found)))
    except TypeError as error:
        raise ValueError(
            f"the expert layer {name!r} must accept {attribute}(config, num_local_experts): {error}"
        ) from None
    return found


def accepted_keywords(found: type[nn.Module]) -> set[str]:
    """Which of the optional arguments `expert_ids` and `layer` the constructor of an expert layer names.

    `**kwargs` does not count: it often leads to the constructor of a parent that does not know them.
    """
    parameters = inspect.signature(found).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return named & {"expert_ids", "layer"}


def describe_error(error: BaseException) -> str:
    """One line: the type, the place and the message of an error in a file of the user."""
    if isinstance(error, SyntaxError):
        file, line, message = error.filename or "?", error.lineno, error.msg
    else:
        place = traceback.extract_tb(error.__traceback__)[-1]
        file, line, message = place.filename, place.lineno, error
    return f"{type(error).__name__} in {Path(file).name}, line {line}: {printable(message)}"
