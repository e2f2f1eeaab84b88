"""The memory of every pipeline rank, computed before a run starts: does the model fit?

Weights, gradients and optimizer state are computed from the parameters of a rank's stages, which are built on the meta
device. Activations are computed from the schedule, which gives the number of micro-batches that a rank holds at a time,
and from the bytes of each (activations.py). Not counted: temporary buffers of kernels, communication buffers, and
fragmentation of the allocator.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from ..expert_parallel import Loopback
from ..expert_parallel.parameters import expert_ids, global_tensors
from ..messages import plural
from ..models import ModelConfig, StageSpec, TransformerStage, split
from ..runtime.zero import elements_per_owner
from ..schedule import Costs, Schedule, simulate
from .activations import MicroBatch, deferred_bytes, saved_bytes
from .flops import forward_flops, score_flops, train_flops_per_token


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of a pipeline rank in bytes: the maximum over its data-parallel ranks.

    `optimizer_sharded`: the optimizer state if it is divided over replicas (ZeRO-1).
    """

    rank: int
    stages: tuple[int, ...]
    dense_parameters: int
    expert_parameters: int
    weights: int
    gradients: int
    optimizer: int
    optimizer_sharded: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total_sharded(self) -> int:
        return self.total - self.optimizer + self.optimizer_sharded


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a whole model, and its FLOPs per token in sequences of `seq_len`."""

    config: ModelConfig
    seq_len: int
    parameters: int
    active: int
    """The parameters that one token uses, the embedding included."""
    forward_flops: int
    score_flops: int
    train_flops: int

    @classmethod
    def of(cls, config: ModelConfig, seq_len: int = 4096) -> Self:
        sizes = parameter_sizes(config, split(config, 1)[0])
        dense, experts = sum(sizes.dense.values()), sum(sizes.experts.values())
        active = dense + experts * config.experts_per_token // config.num_experts
        flops = (count(config, seq_len) for count in (forward_flops, score_flops, train_flops_per_token))
        return cls(config, seq_len, dense + experts, active, *flops)

    @property
    def embedding(self) -> int:
        return self.config.vocab_size * self.config.hidden_size


class ParameterSizes(NamedTuple):
    """Sizes of dense tensors, of routed experts' tensors, and of the tensors among them that are frozen."""

    dense: dict[str, int]
    experts: dict[str, int]
    frozen: dict[str, int]


def parameter_sizes(config: ModelConfig, spec: StageSpec, ep: int = 1) -> ParameterSizes:
    """Sizes of a stage's tensors on one of `ep` ranks, by global name.

    ZeRO-1 divides the optimizer state by these tensors (runtime/zero.py).
    """
    with torch.device("meta"):
        stage = TransformerStage(config, spec, Loopback(config.num_experts, ep))
    dense, experts, frozen = ParameterSizes({}, {}, {})
    ids = expert_ids(stage)
    for name, parameter in stage.named_parameters():
        sizes = {n: t.numel() for n, t in global_tensors(name, parameter, ids.get(name))}
        (experts if name in ids else dense).update(sizes)
        frozen.update({} if parameter.requires_grad else sizes)
    return ParameterSizes(dense, experts, frozen)


def rank_memory(config: ModelConfig, schedule: Schedule, batch: MicroBatch, dp: int) -> tuple[RankMemory, ...]:
    """The memory of each rank of a pipeline. There are `dp` pipelines; `batch.ep` of them share the experts of a layer.

    Raises ValueError for a model with fewer layers than stages, and if `batch.ep` does not divide `dp` or the experts.
    """
    if dp % batch.ep:
        raise ValueError(f"--ep {batch.ep} does not divide the {dp} data-parallel ranks: use --dp {batch.ep}")
    if config.num_experts % batch.ep:
        fitting = [str(e) for e in range(1, config.num_experts + 1) if config.num_experts % e == 0]
        raise ValueError(
            f"--ep {batch.ep} does not divide the {plural(config.num_experts, 'expert')}: "
            f"use --ep {' or '.join(fitting)}"
        )
    specs = split(config, schedule.num_stages)
    divided = [parameter_sizes(config, spec, batch.ep) for spec in specs]
    saved = [saved_bytes(config, spec, batch) for spec in specs]
    deferred = [deferred_bytes(config, spec, batch) for spec in specs]
    activations = simulate(schedule, Costs()).peak_bytes(saved, deferred)  # only the order matters, not the times
    state = 12 if batch.element < 4 else 8  # two moments in fp32; fp32 weights too if the weights are narrower
    ranks = []
    for rank, stages in enumerate(schedule.placement.stages):
        dense, experts, frozen = (
            {n: size for s in stages for n, size in divided[s][kind].items()} for kind in (0, 1, 2)
        )
        counts = sum(dense.values()), sum(experts.values())
        holders = schedule.placement.holders(stages[0])
        trained, trained_experts = ({n: size for n, size in d.items() if n not in frozen} for d in (dense, experts))
        share = _largest_share(trained, trained_experts, dp, batch.ep, holders.index(rank), len(holders))
        weights = batch.element * sum(counts)
        gradients, optimizer = (factor * (sum(counts) - sum(frozen.values())) for factor in (4, state))
        memory = weights, gradients, optimizer, state * share, activations[rank]
        ranks.append(RankMemory(rank, stages, *counts, *memory))
    return tuple(ranks)


def _largest_share(dense: dict[str, int], experts: dict[str, int], dp: int, ep: int, place: int, holders: int) -> int:
    """The most numbers that a data-parallel rank owns, on pipeline rank `place` of the `holders` of the same stages.

    All data-parallel ranks have replicas of dense parameters; of an expert, every ep-th one (runtime/groups.py).
    """
    of_dense, of_experts = elements_per_owner(dense, holders * dp), elements_per_owner(experts, holders * dp // ep)
    return max(of_dense[place * dp + d] + of_experts[(place * dp + d) // ep] for d in range(dp))
