"""Will it fit? The memory of every pipeline rank, reckoned before anything is started.

Weights, gradients and the optimizer's state follow from the parameters of the stages that a rank holds, which are
counted on stages as a run builds them, only without numbers. Activations follow from the schedule, which says how many
micro-batches a rank holds at a time, and from what each keeps (activations.py). What a kernel needs in passing, the
buffers of communication, and the allocator's gaps are not counted: leave some room.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..expert_parallel import Loopback
from ..expert_parallel.parameters import expert_ids, global_tensors
from ..models import ModelConfig, StageSpec, TransformerStage, split
from ..runtime.zero import elements_per_owner
from ..schedule import Schedule
from ..schedule.actions import Forward, Part, halves
from .activations import MicroBatch, kept_for_backward, kept_for_weights


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many a rank holds; `dense` are those that are not routed experts."""

    dense: int
    experts: int

    @property
    def all(self) -> int:
        return self.dense + self.experts

    def active(self, config: ModelConfig) -> int:
        """Those that a token meets, if these are a whole model's."""
        return self.dense + self.experts * config.experts_per_token // config.num_experts


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a pipeline rank holds, in bytes; of the data-parallel ranks that are this pipeline rank, the fullest one.

    `optimizer_sharded`: where replicas share the optimizer's state (ZeRO-1).
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


def count(config: ModelConfig, spec: StageSpec, ep: int = 1) -> Parameters:
    """The parameters of a stage on one of `ep` ranks. Raises ValueError when those do not divide the experts."""
    dense, experts = pieces(config, spec, ep)
    return Parameters(sum(dense.values()), sum(experts.values()))


def pieces(config: ModelConfig, spec: StageSpec, ep: int = 1) -> tuple[dict[str, int], dict[str, int]]:
    """The same as the pieces that ZeRO-1 gives to owners (zero.py), by global name: dense ones, and experts."""
    with torch.device("meta"):
        stage = TransformerStage(config, spec, Loopback(config.num_experts, ep))
    dense, experts = {}, {}
    ids = expert_ids(stage)
    for name, parameter in stage.named_parameters():
        sizes = {n: t.numel() for n, t in global_tensors(name, parameter, ids.get(name))}
        (experts if name in ids else dense).update(sizes)
    return dense, experts


def peak_activations(schedule: Schedule, rank: int, kept: Sequence[int], owed: Sequence[int]) -> int:
    """The most bytes that `rank` holds at a time, for kept[s] from F to B or I, and owed[s] from I to W, of stage s."""
    now = peak = 0
    for action in schedule.actions[rank]:
        parts = halves(action)
        now += sum(kept[half.stage] for half in parts if isinstance(half, Forward))
        peak = max(peak, now)
        for half in parts:
            if not isinstance(half, Forward):
                now -= 0 if half.part is Part.WEIGHT else kept[half.stage]
                now += {Part.FULL: 0, Part.INPUT: owed[half.stage], Part.WEIGHT: -owed[half.stage]}[half.part]
        peak = max(peak, now)
    return peak


def rank_memory(config: ModelConfig, schedule: Schedule, batch: MicroBatch, dp: int) -> tuple[RankMemory, ...]:
    """What each rank of a pipeline holds, of `dp` pipelines over which experts are spread `batch.ep` ways.

    Raises ValueError for a model with fewer layers than stages, and ranks that cannot be divided.
    """
    if dp % batch.ep:
        raise ValueError(f"--ep {batch.ep} does not divide the {dp} data-parallel ranks: use --dp {batch.ep}")
    if config.num_experts % batch.ep:
        fitting = [str(e) for e in range(1, config.num_experts + 1) if config.num_experts % e == 0]
        raise ValueError(
            f"--ep {batch.ep} does not divide the {config.num_experts} experts: use --ep {' or '.join(fitting)}"
        )
    specs = split(config, schedule.num_stages)
    divided = [pieces(config, spec, batch.ep) for spec in specs]
    kept = [kept_for_backward(config, spec, batch) for spec in specs]
    owed = [kept_for_weights(config, spec, batch) for spec in specs]
    state = 12 if batch.element < 4 else 8  # moments in fp32, and master weights if the weights are narrower
    ranks = []
    for rank, stages in enumerate(schedule.placement.stages):
        dense, experts = ({n: size for s in stages for n, size in divided[s][kind].items()} for kind in (0, 1))
        number = sum(dense.values()) + sum(experts.values())
        holders = schedule.placement.holders(stages[0])
        sharded = state * _largest_share(dense, experts, dp, batch.ep, holders.index(rank), len(holders))
        ranks.append(
            RankMemory(
                rank, stages, sum(dense.values()), sum(experts.values()), batch.element * number, 4 * number,
                state * number, sharded, peak_activations(schedule, rank, kept, owed),
            )
        )  # fmt: skip
    return tuple(ranks)


def _largest_share(
    dense: Mapping[str, int], experts: Mapping[str, int], dp: int, ep: int, place: int, holders: int
) -> int:
    """The most that a data-parallel rank owns of what `holders` pipeline ranks hold, on the one at `place` of them.

    In the groups of runtime/groups.py: the dense parameters are all replicas', the experts are those of every
    ep-th data-parallel rank.
    """
    of_dense, of_experts = elements_per_owner(dense, holders * dp), elements_per_owner(experts, holders * dp // ep)
    return max(of_dense[place * dp + d] + of_experts[(place * dp + d) // ep] for d in range(dp))
