"""The names of tensors outside of this rank: the same however a run is divided.

Experts are named one by one (`layers.1.mlp.experts.gate_up.5`), so their number per rank leaves no trace.
"""

from collections.abc import Iterator

from torch import Tensor


def global_tensors(name: str, tensor: Tensor, local_experts: range) -> Iterator[tuple[str, Tensor]]:
    """The global names, and views, under which a parameter-shaped tensor of this rank is saved."""
    if ".experts." not in name:
        yield name, tensor
    elif tensor.ndim and len(tensor) == len(local_experts):
        yield from ((f"{name}.{expert}", tensor[i]) for i, expert in enumerate(local_experts))
    else:  # an expert layer of the user's own that stacks nothing: only as a whole, for this division of experts
        yield f"{name}.{local_experts.start}-{local_experts.stop - 1}", tensor
