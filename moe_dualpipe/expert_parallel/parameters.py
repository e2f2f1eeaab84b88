"""Which parameters belong to routed experts, and names of their tensors that are the same in every parallel layout.

An expert layer holds the parameters of this rank's experts. `MoE` sets the ids of these experts as the attribute
`local_experts` of the layer. Code that treats expert parameters differently (gradient sums, optimizer state,
checkpoints) reads this attribute.
"""

from collections.abc import Iterator

from torch import Tensor, nn


def expert_ids(module: nn.Module) -> dict[str, range]:
    """Map the name of each expert parameter in `module` to the ids of the experts that it holds."""
    layers = ((prefix, layer, getattr(layer, "local_experts", None)) for prefix, layer in module.named_modules())
    return {
        ".".join(filter(None, (prefix, name))): ids
        for prefix, layer, ids in layers
        if isinstance(ids, range)
        for name, _ in layer.named_parameters()
    }


def global_tensors(name: str, tensor: Tensor, local_experts: range | None) -> Iterator[tuple[str, Tensor]]:
    """The global names under which a tensor with the shape of a parameter is saved, each with a view of `tensor`.

    local_experts: the experts that the parameter holds; None for other parameters.

    Example: `mlp.experts.up` of shape [2, F, D] with experts 4 and 5 -> `mlp.experts.up.4` and `mlp.experts.up.5`,
    each [F, D]. A parameter of a custom layer that does not stack its experts is saved whole, as `NAME.4-5`. It can be
    loaded only with the same number of expert-parallel ranks.
    """
    if local_experts is None:
        yield name, tensor
    elif tensor.ndim and len(tensor) == len(local_experts):
        yield from ((f"{name}.{expert}", tensor[i]) for i, expert in enumerate(local_experts))
    else:
        yield f"{name}.{local_experts.start}-{local_experts.stop - 1}", tensor
