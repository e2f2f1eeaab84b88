"""Expert layers made of one module per expert, or of a function of the rows and weights of one expert.

Both loop over the experts, so the host must know the number of rows of each: on a GPU, one host sync per layer. A layer
with `grouped_linear` (kernels/grouped_gemm.py) computes all experts at once, without a host sync.

M rows in expert-major order, D model dim, E experts of this rank.
"""

import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .custom_layers import mark_custom
from .experts import ExpertLayer
from .layer_calls import checked_output

Size = int | str
"""An integer, or the name of a field of `ModelConfig`, such as "hidden_size"."""


class PerExpert(ExpertLayer):
    """One module for each expert. A module maps rows [m, D] to rows [m, D], and is called only if it has rows."""

    def __init__(self, each: nn.ModuleList):
        super().__init__()
        self.each = each

    def forward(self, x_MD: Tensor, expert_offsets: Tensor) -> Tensor:
        return _each_on_its_rows(self, self.each, x_MD, expert_offsets)


def expert_function(**shapes: Sequence[Size]) -> Callable[[Callable[..., Tensor]], Callable[..., nn.Module]]:
    """Decorator: make an expert layer from a function of rows and the weights of one expert.

    shapes: the shape of each weight of an expert, by the name of the argument that receives it.

        @expert_function(up=("expert_size", "hidden_size"), down=("hidden_size", "expert_size"))
        def gelu_experts(rows, up, down):
            return F.linear(F.gelu(F.linear(rows, up)), down)

    Matrices start from a normal distribution with the standard deviation `init_std`, or `residual_std` if their first
    size is the hidden size; vectors start from 0. Raises TypeError if `shapes` does not name exactly the arguments that
    follow the rows.
    """

    def decorate(function: Callable[..., Tensor]) -> Callable[..., nn.Module]:
        _, *arguments = inspect.signature(function).parameters
        if sorted(arguments) != sorted(shapes):
            got, given = ", ".join(arguments) or "none", ", ".join(shapes) or "none"
            raise TypeError(f"the parameters of {function.__name__} after the rows must be {given}: got {got}")

        @functools.wraps(function)
        def build(config: ModelConfig, num_local_experts: int) -> nn.Module:
            sizes = {n: [s if isinstance(s, int) else getattr(config, s) for s in shape] for n, shape in shapes.items()}
            return FunctionExperts(function, config, num_local_experts, sizes)

        del build.__wrapped__  # inspect.signature must see the arguments of `build`
        mark_custom(build, function)
        return build

    return decorate


class FunctionExperts(ExpertLayer):
    """Calls `function` for each expert that has rows. Weights: [E, ...], with the names of the function's arguments."""

    def __init__(
        self, function: Callable[..., Tensor], config: ModelConfig, num_local_experts: int,
        shapes: dict[str, list[int]],
    ):  # fmt: skip
        super().__init__()
        self.function, self.names = function, [*shapes]
        self.std = {
            name: 0.0 if len(shape) < 2 else config.residual_std if shape[0] == config.hidden_size else config.init_std
            for name, shape in shapes.items()
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(num_local_experts, *shape)))

    @torch.no_grad()
    def reset_expert(self, e: int) -> None:
        for name, std in self.std.items():
            self.get_parameter(name)[e].normal_(std=std)

    def forward(self, x_MD: Tensor, expert_offsets: Tensor) -> Tensor:
        weights = zip(*(self.get_parameter(name).unbind() for name in self.names), strict=True)
        experts = [functools.partial(self.function, **dict(zip(self.names, of_one, strict=True))) for of_one in weights]
        return _each_on_its_rows(self, experts, x_MD, expert_offsets)


def _each_on_its_rows(
    layer: nn.Module, experts: Sequence[Callable[[Tensor], Tensor]] | nn.ModuleList, x_MD: Tensor, offsets: Tensor
) -> Tensor:  # fmt: skip
    """The outputs of all experts for their rows, [M, D]. Without rows: `x_MD`, so that autograd reaches it."""
    bounds = offsets.tolist()
    pieces = [(expert, x_MD[start:end]) for expert, start, end in zip(experts, bounds, bounds[1:], strict=False)]
    outputs = [checked_output("experts", layer, rows, expert(rows)) for expert, rows in pieces if len(rows)]
    return torch.cat(outputs) if outputs else x_MD
