"""Persistent buffers of layers: saved in checkpoints and compared between replicas, like parameters.

A forward must not change them. Replicas of a layer see different tokens, so their buffers would differ. And
recomputation runs a forward twice, so it would change them twice. Between steps, all replicas may change a buffer in
the same way, as a router moves its biases. Buffers with `persistent=False` are neither saved nor compared.
"""

from collections.abc import Collection

from torch import Tensor, nn

from ..expert_parallel.parameters import expert_ids, global_tensors
from .groups import Groups
from .replicas import ReplicaSet

WAY_OUT = (
    "replicas of the layer see other tokens, and recomputation runs a forward twice. Compute the value anew in each "
    "forward, or train it as a parameter; a router may change buffers in `move_bias`, after each update"
)


class Buffers:
    """The persistent buffers of this rank's stages, with global names."""

    def __init__(self, stages: Collection[nn.Module], groups: Groups):
        self.groups = groups
        self.experts = {name: held for stage in stages for name, held in expert_ids(stage).items()}
        self._owners: dict[str, tuple[nn.Module, str]] = {}  # not the tensors: a layer may assign a new one
        for stage in stages:
            saved = stage.state_dict().keys()
            for prefix, layer in stage.named_modules():
                for name, _ in layer.named_buffers(recurse=False):
                    global_name = f"{prefix}.{name}" if prefix else name
                    if global_name in saved:
                        self._owners[global_name] = layer, name

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(layer, attribute) for name, (layer, attribute) in self._owners.items()}

    def sets(self) -> list[ReplicaSet]:
        """All buffers, in two sets: those of dense parts, and those of experts."""
        tensors = self.tensors()
        dense = {name: tensor for name, tensor in tensors.items() if name not in self.experts}
        of_experts = {name: tensor for name, tensor in tensors.items() if name in self.experts}
        return [
            ReplicaSet(dense, self.groups.dense),
            ReplicaSet(of_experts, self.groups.expert_replicas, self.experts),
        ]

    def state(self) -> dict[str, Tensor]:
        """The buffers for checkpoints. Loading into these tensors sets the buffers."""
        return {
            f"model.{global_name}": view
            for one in self.sets()
            for name, tensor in one.parameters.items()
            for global_name, view in global_tensors(name, tensor, one.experts.get(name))
        }
