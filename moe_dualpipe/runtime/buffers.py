"""Persistent buffers, such as running statistics: saved and compared like parameters, and averaged on request.

Each replica of a layer sees different tokens. So a buffer that changes in forward differs between replicas, and a
checkpoint would hold the buffer of an arbitrary one. A layer declares the buffers to average after each step:

    averaged_buffers = ("running_mean",)    # an attribute of the layer: names as in its `state_dict`

All other buffers must stay equal on all replicas. Buffers with `persistent=False` are neither saved nor compared.
"""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..expert_parallel.parameters import expert_ids, global_tensors
from .groups import Groups
from .replicas import ReplicaSet

RULE = "replicas must stay bit-equal, or be averaged (`averaged_buffers` of the layer)"


class Buffers:
    """The persistent buffers of this rank's stages, with global names.

    Raises ValueError for an attribute `averaged_buffers` that is not a tuple of names of floating-point buffers.
    """

    def __init__(self, stages: Collection[nn.Module], groups: Groups):
        self.groups = groups
        self.experts = {name: held for stage in stages for name, held in expert_ids(stage).items()}
        self.owners: dict[str, tuple[nn.Module, str]] = {}  # not the tensors: a layer may assign a new one
        self.averaged: set[str] = set()
        for stage in stages:
            saved = stage.state_dict().keys()
            layers = [(f"{prefix}." if prefix else "", layer) for prefix, layer in stage.named_modules()]
            self.owners |= {
                prefix + name: (layer, name)
                for prefix, layer in layers
                for name, _ in layer.named_buffers(recurse=False)
                if prefix + name in saved
            }
            for prefix, layer in layers:
                self.averaged |= {prefix + name for name in self._averaged_buffers(prefix, layer)}

    def sets(self) -> list[ReplicaSet]:
        """All buffers, in two sets: those of dense parts, and those of experts."""
        tensors = {name: getattr(layer, attribute) for name, (layer, attribute) in self.owners.items()}
        dense = {name: tensor for name, tensor in tensors.items() if name not in self.experts}
        of_experts = {name: tensor for name, tensor in tensors.items() if name in self.experts}
        return [
            ReplicaSet(dense, self.groups.dense),
            ReplicaSet(of_experts, self.groups.expert_replicas, self.experts, RULE),
        ]

    def state(self) -> dict[str, Tensor]:
        """The buffers for checkpoints. Loading into these tensors sets the buffers."""
        return {
            f"model.{global_name}": view
            for one in self.sets()
            for name, tensor in one.parameters.items()
            for global_name, view in global_tensors(name, tensor, one.experts.get(name))
        }

    @torch.no_grad()
    def average(self) -> None:
        """Replace each buffer to be averaged by its mean over the replicas, computed in fp32 or fp64. Collective."""
        for one in self.sets() if self.averaged else ():
            if one.group is None:
                continue
            buffers = [one.parameters[name] for name in one.parameters if name in self.averaged]
            means = [b.to(torch.promote_types(b.dtype, torch.float32), copy=True) for b in buffers]
            for mean in means:
                dist.all_reduce(mean, group=one.group)
            for buffer, total in zip(buffers, means, strict=True):
                buffer.copy_(total / one.num_replicas)

    def copies(self) -> dict[str, Tensor]:
        """Copies of the buffers to be averaged, for `restore`."""
        return {name: getattr(*self.owners[name]).clone() for name in self.averaged}

    @torch.no_grad()
    def restore(self, copies: Mapping[str, Tensor]) -> None:
        """Undo the changes since `copies()`."""
        for name, copy in copies.items():
            getattr(*self.owners[name]).copy_(copy)

    def _averaged_buffers(self, prefix: str, layer: nn.Module) -> Collection[str]:
        names, where = getattr(layer, "averaged_buffers", ()), f"{type(layer).__name__}.averaged_buffers"
        if not isinstance(names, tuple | list):
            raise ValueError(f"{where} must be a tuple of names: got {names!r}")
        own = [name.removeprefix(prefix) for name in self.owners if name.startswith(prefix)]
        for name in names:
            if name not in own:
                given = f"it has {', '.join(own)}" if own else "it has none"
                raise ValueError(f"{where} names {name!r}, which is not a persistent buffer of this layer: {given}")
            tensor = getattr(*self.owners[prefix + name])
            if not tensor.is_floating_point():
                raise ValueError(f"{where} names {name!r}, which is {tensor.dtype}: only floats can be averaged")
        return names
