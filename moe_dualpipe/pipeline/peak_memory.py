"""The peak memory of each pipeline rank, by parts, for any model and any layout.

Parameters and activations are computed from the sizes of the model. The schedule decides how many micro-batches a rank
holds at once.

Not counted: communication buffers, and fragmentation of the allocator.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from ..models.partition import StageSpec
from ..models.shape import ModelShape
from ..runtime.groups import end_holders
from ..schedule import Action, Forward, Part, Schedule, members
from .activations import MicroBatch, deferred_bytes, saved_bytes, working_bytes


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes of a rank at its peak, by parts."""

    weights: int
    """In the precision of the products. With fp8, also an 8-bit copy; with experts in FP8, two copies of their
    weights."""
    gradients: int
    """In fp32."""
    optimizer: int
    """The moments in fp32, and the weights in fp32 if they are narrower."""
    activations: int
    """Saved for backward, of all micro-batches that the rank holds at once."""
    temporary: int
    """What the backward of the loss or of one block needs beyond that."""
    checkpoint: int
    """This rank's part of a checkpoint: the moments, and the weights in fp32. It is not part of `total`."""

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        names = "weights", "gradients", "optimizer", "activations", "temporary"
        return {name: getattr(self, name) for name in names}


class Adapters(NamedTuple):
    """Low-rank adapters: their rank, and the layers that have them (LORA_TARGETS)."""

    rank: int
    targets: tuple[str, ...]


def peak_memory(
    shape: ModelShape, schedule: Schedule, batch: MicroBatch, stages: Sequence[StageSpec], dp: int = 1,
    precision: str = "bf16", zero: bool = True, whole_embedding: bool = False, gradient_copies: int = 0,
    moments: int = 2, adapters: Adapters | None = None,
) -> tuple[PeakMemory, ...]:  # fmt: skip
    """The peak memory of each rank of a pipeline. Compare ranks by their `total`.

    stages: the layers of each stage. dp: replicas of the model; ranks of context parallelism do not count. A stage is
    on dp x cp x tp ranks, which share its experts in groups of `batch.ep`.
    precision: bf16, fp8, mxfp8 or fp32. zero: replicas divide the optimizer state (ZeRO-1); the largest share counts.
    whole_embedding: ZeRO-1 gives each tensor to one replica, as in this project. False: it cuts tensors.
    gradient_copies: further copies of a stage's gradients while replicas sum them, after the stage's last backward: in
    this project 1 on GPUs and 2 on CPUs; 0 if gradients are in one buffer.
    moments: of the optimizer for a matrix inside the blocks: 2 with AdamW, 1 with Muon. Embedding and head have 2.
    adapters: only these are trained. None: all parameters are.
    """
    element = 4 if precision == "fp32" else 2
    batch = replace(batch, element=element, fp8=precision in ("fp8", "mxfp8"))

    @cache
    def bytes_of(stage: int) -> StageBytes:
        spec = stages[stage]
        working = (working_bytes(shape, spec, batch, deferring) for deferring in (False, True))
        return StageBytes(saved_bytes(shape, spec, batch), deferred_bytes(shape, spec, batch), *working)

    # Stages with the same layers need the same bytes.
    first: dict[tuple[object, ...], int] = {}
    like = [first.setdefault((s.embedding, s.head, *map(shape.block, s.blocks)), i) for i, s in enumerate(stages)]
    # Messages to and from each neighbor.
    links = [2 + (s > 0) + (s < schedule.num_stages - 1) for s in range(schedule.num_stages)]
    message = batch.tokens * shape.hidden * element * (schedule.num_ranks > 1)
    copies_of_model, end_ranks = dp * batch.cp, len(end_holders(schedule.placement))

    def trained(specs: Sequence[StageSpec]) -> tuple[int, int, int]:
        """As `rank_shares`, of the parameters that are trained."""
        if adapters is None:
            return rank_shares(shape, specs, batch)
        layers = [shape.block(layer) for spec in specs for layer in spec.layers]
        counts = [layer.adapter_parameters(shape.hidden, *adapters) for layer in layers]
        return sum(others for _, others in counts), -(-sum(experts for experts, _ in counts) // batch.ep), 0

    ranks = []
    for rank, held in enumerate(schedule.placement.stages):
        specs = [stages[s] for s in held]
        _, all_experts, _ = shares = rank_shares(shape, specs, batch)
        dense, experts, ends = trained(specs)
        updated = owned = dense + experts + ends
        tables = any(s.embedding or (s.head and (shape.tied or shape.mtp)) for s in specs)
        tables += any(s.head and not shape.tied for s in specs)
        total = sum(shares) + updated * (adapters is not None)
        if zero:
            replicas = copies_of_model * len(schedule.placement.holders(held[0]))
            owned = -(-dense // replicas) - (-experts // (replicas * batch.tp // batch.ep))
            owned -= -ends // (1 if whole_embedding else copies_of_model * end_ranks)
            if whole_embedding and adapters is None and any(s.embedding or s.head for s in specs):
                owned = max(owned, shape.embedding)
            tables = -(-tables // replicas)
        copies = 4 * gradient_copies * (copies_of_model * end_ranks > 1)
        sizes = {s: bytes_of(like[s])._replace(sums=copies * sum(trained([stages[s]]))) for s in held}
        activations, temporary = peak_of_actions(schedule.actions[rank], sizes)
        state = 4 * (moments * owned + (2 - moments) * tables * shape.embedding)
        ranks.append(PeakMemory(
            (element + batch.fp8) * total + 2 * all_experts * (batch.fp8_block > 0), 4 * updated,
            state + 4 * owned * (element < 4), activations, temporary + message * max(links[s] for s in held),
            checkpoint=state + 4 * owned,
        ))  # fmt: skip
    return tuple(ranks)


class StageBytes(NamedTuple):
    """Bytes of a micro-batch on a stage. saved: from forward to backward. deferred: for its weight gradients.

    full, split: needed only during a full backward, and only during an input backward (I). sums: needed after the
    stage's last action, to sum gradients.
    """

    saved: int
    deferred: int
    full: int
    split: int
    sums: int = 0


def peak_of_actions(actions: Iterable[Action], sizes: Mapping[int, StageBytes]) -> tuple[int, int]:
    """The largest number of bytes that a rank's activations and deferred weight gradients take together, and how much
    more it needs at its peak. Only the order of the actions matters, not their times. sizes: by stage.
    """
    steps = [half for action in actions for half in members(action)]
    last = {half.stage: index for index, half in enumerate(steps)}
    now = peak = most = summing = 0
    for index, half in enumerate(steps):
        size = sizes[half.stage]
        if isinstance(half, Forward):
            now += size.saved
        else:
            if half.part is not Part.WEIGHT:
                most = max(most, now + summing + (size.full if half.part is Part.FULL else size.split))
                now -= size.saved
            now += {Part.FULL: 0, Part.INPUT: 1, Part.WEIGHT: -1}[half.part] * size.deferred
        peak = max(peak, now)
        summing += size.sums * (last[half.stage] == index)
        most = max(most, now + summing)
    return peak, max(0, most - peak)


def rank_shares(shape: ModelShape, specs: Sequence[StageSpec], batch: MicroBatch) -> tuple[int, int, int]:
    """Parameters of one rank that holds `specs`: dense ones, those of its experts, and the embedding if the first and
    the last stage share it (tied embeddings or multi-token prediction)."""
    dense = experts = 0
    shared = shape.tied or shape.mtp > 0
    for spec in specs:
        layers = [shape.block(index) for index in spec.blocks]
        dense += sum(layer.dense_parameters(shape.hidden) for layer in layers)
        experts += sum(layer.expert_parameters(shape.hidden) for layer in layers)
        dense += spec.embedding * (shape.learned_positions * shape.hidden + shape.embedding * (not shared))
        join = shape.mtp_join.weights + 3 * shape.hidden
        dense += spec.head * (shape.mtp * join + shape.other + shape.embedding * (not shape.tied))
    ends = shape.embedding * (shared and any(spec.embedding or spec.head for spec in specs))
    return -(-dense // batch.tp), -(-experts // batch.ep), -(-ends // batch.tp)
