"""AdamW or Muon on fp32 master weights, with the state divided among the ranks (ZeRO-1).

Gradients are fp32 for parameters of any dtype (`grad_dtype`). For a bf16 model the optimizer keeps fp32 master weights
and rounds them into the model after each step; for an fp32 model the parameters are the master weights. State is
stored per owned tensor (replicas.py) whether it is divided or not, so both cases do the same operations on the same
shapes and give bit-identical results.

Frozen parameters (`requires_grad=False`) have no state and are never updated. They are saved in the dtype of the model.

Muon (muon.py) uses the same learning rate and weight decay as AdamW. It updates the matrices between hidden states,
each separately: stacked ones (query, key, value; gate, up; models/layers.py) are split. AdamW updates norms, and the
matrices that their modules declare: embedding, head and routers (`elementwise_matrices`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import EllipsisType

import torch
from torch import Tensor

from .background import Background
from .learning_rate import OptimizerConfig
from .muon import Muon
from .replicas import OwnedTensor, ReplicaSet, Shards, check_frozen
from .stage_sums import StageOrder, WeightGathers

Rows = slice | EllipsisType


class Optimizer:
    """Master weights and moments of this rank's share of the trained parameters, by global name.

    replicas: the parameters, in sets that the same ranks hold. zero: divide the state among the ranks of a set.
    stacked: the rows of each matrix, for parameters that stack several. elementwise: the parameters without Muon.
    order: of the stages, whose new weights are sent in the order of their use.
    Parameters must be frozen before this, on all replicas. Raises ValueError if `stacked` does not add up to all rows,
    and on all ranks if a parameter is frozen on some replicas only. Collective.
    """

    def __init__(
        self, replicas: Sequence[ReplicaSet], config: OptimizerConfig, zero: bool = True,
        stacked: Mapping[str, Sequence[int]] | None = None, elementwise: Collection[str] = (),
        order: StageOrder | None = None,
    ):  # fmt: skip
        check_frozen(replicas)
        trained, frozen = ([one.only(trained) for one in replicas] for trained in (True, False))
        self.parameters = {name: p for one in trained for name, p in one.parameters.items()}
        self.frozen_parameters = {name: p for one in frozen for name, p in one.parameters.items()}
        self.experts = {name: held for one in trained for name, held in one.experts.items()}
        for parameter in self.parameters.values():
            parameter.grad_dtype = torch.float32
        self.shards, self.frozen = ([Shards(one, divide=zero) for one in sets] for sets in (trained, frozen))
        self.owned = {name: piece for shards in self.shards for name, piece in shards.updated.items()}
        self.master = {name: piece.weight.float() for name, piece in self.owned.items()}  # fp32: the weight itself
        self.moments: dict[str, dict[str, Tensor]] = {}
        self.parts: dict[str, list[tuple[Tensor, Rows]]] = {}  # what torch's optimizers update
        device = next((p.device for one in replicas for p in one.parameters.values()), torch.device("cpu"))
        self.gathers = WeightGathers(self.shards, order or StageOrder({}), Background(device))
        self.before_update: Callable[[], None] = lambda: None
        """Called at the beginning of `step`."""

        hidden = (n for n, w in self.master.items() if w.ndim == 2 and self.owned[n].parameter not in elementwise)
        for_muon = [*hidden] if config.name != "adamw" else []
        self.adamw = self._adamw([name for name in self.master if name not in for_muon], config)
        self.muon = self._muon(for_muon, config, stacked or {})

    def _adamw(self, names: Sequence[str], config: OptimizerConfig) -> torch.optim.AdamW:
        matrices = {"params": [self.master[name] for name in names if self.master[name].ndim > 1]}
        vectors = {"params": [self.master[name] for name in names if self.master[name].ndim <= 1], "weight_decay": 0.0}
        betas, decay = (config.beta1, config.beta2), config.weight_decay
        adamw = torch.optim.AdamW([matrices, vectors], betas=betas, weight_decay=decay, fused=bool(names))
        for name in names:  # create the state now: a checkpoint is loaded into it
            weight = self.master[name]
            self.moments[name] = {kind: torch.zeros_like(weight) for kind in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), dtype=torch.float32, device=weight.device)
            adamw.state[weight] = {"step": step, **self.moments[name]}
            self.parts[name] = [(weight, ...)]
        return adamw

    def _muon(self, names: Sequence[str], config: OptimizerConfig, stacked: Mapping[str, Sequence[int]]) -> Muon:
        weights, momenta = [], []
        for name in names:
            self.parts[name] = [(self.master[name][rows], rows) for rows in _matrices(self.owned[name], stacked)]
            momentum = torch.zeros_like(self.master[name])
            self.moments[name] = {"momentum": momentum}
            weights += [matrix for matrix, _ in self.parts[name]]
            momenta += [momentum[rows] for _, rows in self.parts[name]]
        return Muon(weights, momenta, config)

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | float, wait: bool = True) -> None:
        """Update from `grad * grad_scale` and drop the gradients. Collective if the state is divided.

        Only the gradients of the tensors that this rank updates are read. wait: False returns before the other ranks'
        weights have arrived; call `wait` before anything reads them. A pipeline's steps do so for each stage.

        Raises RuntimeError if a parameter was frozen or unfrozen after the optimizer was built.
        """
        self.before_update()
        self._check_frozen()
        for group in self.adamw.param_groups:
            group["lr"] = lr
        grads: dict[str, Tensor] = {}
        for shards in self.shards:
            grads |= shards.gradients(shards.updated_parameters)
        grads = {name: grads[name] for name in self.parts}
        if grads:
            torch._foreach_mul_([*grads.values()], grad_scale)
        for name, parts in self.parts.items():
            for weight, rows in parts:
                weight.grad = grads[name][rows]
        self.adamw.step()
        self.muon.step(lr)
        for parts in self.parts.values():
            for weight, _ in parts:
                weight.grad = None
        self.drop_gradients()
        self._update_model()
        if wait:
            self.wait()

    def wait(self, stage: int | None = None) -> None:
        """Wait for the other ranks' new weights of a stage, if they have not arrived; None: of all stages."""
        self.gathers.wait(stage)

    def drop_gradients(self) -> None:
        """Skip a step: drop the gradients and change nothing else."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """This rank's share of the state by global name, to be saved or loaded in place."""
        moments = {f"{kind}.{name}": t for name, kinds in self.moments.items() for kind, t in kinds.items()}
        frozen = {name: piece.weight for shards in self.frozen for name, piece in shards.updated.items()}
        return {f"model.{name}": weight for name, weight in (self.master | frozen).items()} | moments

    @torch.no_grad()
    def after_load(self, step: int) -> None:
        """Call after loading into `tensors()`, with the number of updates. Collective if the state is divided."""
        for state in self.adamw.state.values():
            state["step"].fill_(step)
        self._update_model()
        frozen = WeightGathers(self.frozen, StageOrder({}), self.gathers.background)
        frozen.start()
        for gathers in (self.gathers, frozen):
            gathers.wait()

    @property
    def state_bytes(self) -> int:
        """Bytes of the moments, and of the master weights that are not the model's own parameters."""
        copies = [weight for name, weight in self.master.items() if weight is not self.owned[name].weight]
        return sum(t.nbytes for t in copies) + sum(t.nbytes for kinds in self.moments.values() for t in kinds.values())

    def _check_frozen(self) -> None:
        frozen, trained = self.frozen_parameters.items(), self.parameters.items()
        changed = [name for name, p in trained if not p.requires_grad] + [n for n, p in frozen if p.requires_grad]
        if changed:
            raise RuntimeError(f"requires_grad of {changed[0]} changed after the optimizer was built: set it before")

    def _update_model(self) -> None:
        """Copy the master weights into the model, and start to send them to the other ranks that hold it."""
        for name, piece in self.owned.items():
            if piece.weight.dtype != self.master[name].dtype:
                piece.weight.copy_(self.master[name])
        self.gathers.start()


def _matrices(piece: OwnedTensor, stacked: Mapping[str, Sequence[int]]) -> list[slice]:
    rows = stacked.get(piece.parameter, [len(piece.weight)])
    if sum(rows) != len(piece.weight):
        raise ValueError(f"{piece.parameter} has {len(piece.weight)} rows: `stacked` cannot divide them into {[*rows]}")
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    return [slice(end - size, end) for end, size in zip(ends, rows, strict=True)]
