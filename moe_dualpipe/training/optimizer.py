"""AdamW or Muon on fp32 master weights, each rank for its share of the model.

Gradients arrive in `parameter.grad`, in fp32 whatever the parameter's dtype (`grad_dtype`). Where the model is bf16,
the optimizer keeps the real weights in fp32 and rounds them into the model after each step; where it is fp32, the
model's own parameters are the master weights. All state is kept by piece (zero.py), whether it is divided or not: so
each number comes from the same operation on the same shape in either case, and is the same to the last bit.

Muon (arXiv 2502.16982) makes the momentum of a matrix orthogonal before it is added, and scales it so that it is as
large as an update of AdamW's: one learning rate and weight decay serve both. It is for matrices between hidden states,
each by itself: query, key, value, gate, up and down are taken apart where they are stacked (models/layers.py).
Embedding, head, norms and routers, which are heads over experts, remain with AdamW.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from ..checkpoint import read_tensor_metadata
from ..expert_parallel.parameters import global_tensors
from ..runtime.replicas import ReplicaSet
from ..runtime.zero import OwnedTensor, Shards
from .config import OptimizerConfig

Rows = slice | EllipsisType
ALWAYS_ADAMW = {"embedding", "head", "router"}  # parts of names


class Optimizer:
    """Master weights and moments of this rank's share of the parameters, by global name.

    replicas: the parameters, in sets of those that the same ranks hold. zero: divide the state among the ranks of a
    set. stacked: the rows of each matrix in the parameters that stack some.
    Raises ValueError for `stacked` rows that a parameter does not have.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaSet],
        config: OptimizerConfig,
        zero: bool = True,
        stacked: Mapping[str, Sequence[int]] | None = None,
    ):
        self.parameters = {name: p for one in replicas for name, p in one.parameters.items()}
        self.local_experts = {name: one.local_experts for one in replicas for name in one.parameters}
        for parameter in self.parameters.values():
            parameter.grad_dtype = torch.float32
        self.shards = [Shards(one, divide=zero) for one in replicas]
        self.owned = {name: piece for shards in self.shards for name, piece in shards.owned.items()}
        self.master = {name: piece.weight.float() for name, piece in self.owned.items()}  # fp32: the weight itself
        self.moments: dict[str, dict[str, Tensor]] = {}
        self.parts: dict[str, list[tuple[Tensor, Rows]]] = {}  # what the torch optimizers know of each master weight

        for_muon = [
            name for name in self.master if config.name == "muon" and _is_hidden_matrix(name, self.master[name])
        ]
        self.adamw = self._adamw([name for name in self.master if name not in for_muon], config)
        self.muon = self._muon(for_muon, config, stacked or {})

    def _adamw(self, names: Sequence[str], config: OptimizerConfig) -> torch.optim.AdamW:
        fused = all(parameter.is_cuda for parameter in self.parameters.values())
        adamw = torch.optim.AdamW(
            [
                {"params": [self.master[name] for name in names if self.master[name].ndim > 1]},
                {"params": [self.master[name] for name in names if self.master[name].ndim <= 1], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=fused,
        )
        for name in names:  # state is present from the start, so that a checkpoint can be loaded into it
            weight = self.master[name]
            self.moments[name] = {kind: torch.zeros_like(weight) for kind in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), dtype=torch.float32, device=weight.device if fused else "cpu")
            adamw.state[weight] = {"step": step, **self.moments[name]}
            self.parts[name] = [(weight, ...)]
        return adamw

    def _muon(
        self, names: Sequence[str], config: OptimizerConfig, stacked: Mapping[str, Sequence[int]]
    ) -> torch.optim.Muon:
        for name in names:
            self.parts[name] = [(self.master[name][rows], rows) for rows in _matrices(self.owned[name], stacked)]
        muon = torch.optim.Muon(
            [{"params": [matrix for name in names for matrix, _ in self.parts[name]]}],
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        for name in names:
            self.moments[name] = {"momentum": torch.zeros_like(self.master[name])}
            for matrix, rows in self.parts[name]:
                muon.state[matrix] = {"momentum_buffer": self.moments[name]["momentum"][rows]}
        return muon

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | float) -> None:
        """One update from `grad * grad_scale`; the gradients are dropped. Collective where state is divided."""
        for group in self.adamw.param_groups + self.muon.param_groups:
            group["lr"] = lr
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            for piece, grad in global_tensors(name, parameter.grad.mul_(grad_scale), self.local_experts[name]):
                for weight, rows in self.parts.get(piece, ()):
                    weight.grad = grad[rows]
        self.adamw.step()
        self.muon.step()
        for parts in self.parts.values():
            for weight, _ in parts:
                weight.grad = None
        for parameter in self.parameters.values():
            parameter.grad = None
        self._publish()

    def drop_gradients(self) -> None:
        """Instead of a step: nothing changes."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """This rank's share of the state by global names, to be saved or loaded in place."""
        moments = {f"{kind}.{name}": t for name, kinds in self.moments.items() for kind, t in kinds.items()}
        return {f"model.{name}": weight for name, weight in self.master.items()} | moments

    @torch.no_grad()
    def loaded(self, step: int) -> None:
        """Call after `tensors()` were loaded in place, after `step` updates. Collective where state is divided."""
        for state in self.adamw.state.values():
            state["step"].fill_(step)
        self._publish()

    @property
    def state_bytes(self) -> int:
        """What this rank keeps beside the model: moments, and master weights that are not the model's own."""
        copies = [weight for name, weight in self.master.items() if weight is not self.owned[name].weight]
        return sum(t.nbytes for t in copies) + sum(t.nbytes for kinds in self.moments.values() for t in kinds.values())

    def _publish(self) -> None:
        """From the master weights into the model, on all ranks that hold it."""
        for name, piece in self.owned.items():
            if piece.weight.dtype != self.master[name].dtype:
                piece.weight.copy_(self.master[name])
        for shards in self.shards:
            shards.broadcast_weights()


def _is_hidden_matrix(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and ALWAYS_ADAMW.isdisjoint(name.split("."))


def _matrices(piece: OwnedTensor, stacked: Mapping[str, Sequence[int]]) -> list[slice]:
    rows = stacked.get(piece.parameter, [len(piece.weight)])
    if sum(rows) != len(piece.weight):
        raise ValueError(f"{piece.parameter} has {len(piece.weight)} rows: `stacked` cannot divide them into {[*rows]}")
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    return [slice(end - size, end) for end, size in zip(ends, rows, strict=True)]


def check_saved(checkpoint: Path, config: OptimizerConfig) -> None:
    """Raise ValueError unless the optimizer that `checkpoint` was saved with is the one to go on with."""
    names = read_tensor_metadata(checkpoint).state_dict_metadata
    saved = "muon" if any(name.startswith("momentum.") for name in names) else "adamw"
    if saved != config.name:
        raise ValueError(
            f"{checkpoint} holds the state of {saved}, which {config.name} cannot use: go on with --optim.name {saved}"
        )
