"""The memory of every pipeline rank, computed before a run starts: does the model fit?

Weights, gradients and optimizer state are computed from the parameters of a rank's stages, which are built on the meta
device. Activations are computed from the schedule, which gives the number of micro-batches that a rank holds at a time,
and from the bytes of each (activations.py). Not counted: temporary buffers of kernels, communication buffers, and
fragmentation of the allocator.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from ..expert_parallel import Loopback
from ..expert_parallel.parameters import expert_ids, global_tensors
from ..models import ModelConfig, StageSpec, TransformerStage, share_embedding, split
from ..runtime.groups import check_ep_divides_experts, check_ep_divides_ranks, end_holders
from ..runtime.zero import elements_per_owner
from ..schedule import Costs, Placement, Schedule, simulate
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
    """Sizes of dense tensors, of routed experts' tensors, and of the tensors among them that are frozen.

    shared: the dense tensors that the first and the last stage hold (`share_embedding` in models/transformer.py).
    """

    dense: dict[str, int]
    experts: dict[str, int]
    frozen: dict[str, int]
    shared: dict[str, int]

    @classmethod
    def of_rank(cls, stages: Iterable[Self]) -> Self:
        """The tensors of all stages of a rank. A tensor of two stages, such as a shared embedding, counts once."""
        return cls(*({n: size for one in kind for n, size in one.items()} for kind in zip(*stages, strict=True)))

    def trained(self) -> tuple[dict[str, int], dict[str, int]]:
        """The dense tensors, and those of experts, that are not frozen."""
        dense, experts = ({n: s for n, s in d.items() if n not in self.frozen} for d in (self.dense, self.experts))
        return dense, experts


def parameter_sizes(config: ModelConfig, spec: StageSpec, ep: int = 1) -> ParameterSizes:
    """Sizes of a stage's tensors on one of `ep` ranks, by global name.

    ZeRO-1 divides the optimizer state by these tensors (runtime/zero.py).
    """
    sample = _distinct_layers(config, spec.layers)
    with torch.device("meta"):
        stage = TransformerStage(config, dataclasses.replace(spec, layers=sample), Loopback(config.num_experts, ep))
    dense, experts, frozen, shared = ParameterSizes({}, {}, {}, {})
    ends = share_embedding([stage]) if config.last_stage_embeds else []
    ids = expert_ids(stage)
    alike = {layer: [] for layer in sample}
    for layer in spec.layers:
        alike[min(max(layer, sample[0]), sample[-1])].append(f"layers.{layer}.")
    for name, parameter in stage.named_parameters():
        sizes = {n: t.numel() for n, t in global_tensors(name, parameter, ids.get(name))}
        parts = name.split(".")
        if parts[0] == "layers":
            start = f"layers.{parts[1]}."
            sizes = {other + n.removeprefix(start): size for other in alike[int(parts[1])] for n, size in sizes.items()}
        (experts if name in ids else dense).update(sizes)
        frozen.update({} if parameter.requires_grad else sizes)
        shared.update(sizes if any(parameter is other for other in ends) else {})
    return ParameterSizes(dense, experts, frozen, shared)


def _distinct_layers(config: ModelConfig, layers: range) -> range:
    """The layers to build: one of each kind is enough, unless a layer may depend on its position.

    If dense layers come first, these are the last dense and the first other layer, if there are both.
    """
    if config.own_layers or config.dense_layers:
        return layers
    first, last = layers[0], layers[-1]
    start = min(max(config.num_dense_layers - 1, first), last)
    return range(start, min(max(config.num_dense_layers, first), last) + 1)


def rank_memory(config: ModelConfig, schedule: Schedule, batch: MicroBatch, dp: int) -> tuple[RankMemory, ...]:
    """The memory of each rank of a pipeline. There are `dp` pipelines; `batch.ep` of them share the experts of a layer.

    Raises ValueError for a model with fewer layers than stages, and if `batch.ep` does not divide `dp` or the experts.
    """
    check_ep_divides_experts(batch.ep, config.num_experts)
    check_ep_divides_ranks(batch.ep, config.num_experts, dp)
    specs = split(config, schedule.num_stages)
    divided = [parameter_sizes(config, spec, batch.ep) for spec in specs]
    saved = [saved_bytes(config, spec, batch) for spec in specs]
    deferred = [deferred_bytes(config, spec, batch) for spec in specs]
    activations = simulate(schedule, Costs()).peak_bytes(saved, deferred)  # only the order matters, not the times
    state = 12 if batch.element < 4 else 8  # two moments in fp32; fp32 weights too if the weights are narrower
    ranks = []
    for rank, stages in enumerate(schedule.placement.stages):
        sizes = ParameterSizes.of_rank(divided[s] for s in stages)
        counts = sum(sizes.dense.values()), sum(sizes.experts.values())
        sharded = state * max(owned_numbers(sizes, schedule.placement, rank, dp, batch.ep))
        weights, trained = batch.element * sum(counts), sum(counts) - sum(sizes.frozen.values())
        memory = weights, 4 * trained, state * trained, sharded, activations[rank]
        ranks.append(RankMemory(rank, stages, *counts, *memory))
    return tuple(ranks)


def owned_numbers(sizes: ParameterSizes, placement: Placement, pp_rank: int, dp: int, ep: int) -> list[int]:
    """How many numbers each data-parallel rank of `pp_rank`, which holds `sizes`, updates under ZeRO-1.

    All data-parallel ranks have replicas of dense parameters; of an expert, every ep-th one (runtime/groups.py). What
    the first and the last stage share is divided among the ranks of both.
    """
    holders, ends = placement.holders(placement.stages[pp_rank][0]), end_holders(placement)
    first, owners = holders.index(pp_rank) * dp, len(holders) * dp
    dense, experts = sizes.trained()
    shared = {name: dense.pop(name) for name in sizes.shared if name in dense}
    of_dense, of_experts = elements_per_owner(dense, owners), elements_per_owner(experts, owners // ep)
    numbers = [of_dense[i] + of_experts[i // ep] for i in range(first, first + dp)]
    if shared:
        of_shared = elements_per_owner(shared, len(ends) * dp)[ends.index(pp_rank) * dp :]
        numbers = [number + more for number, more in zip(numbers, of_shared, strict=False)]
    return numbers
