"""The peak memory of each pipeline rank, by parts, for any model and any layout.

A `ModelConfig` is a model that this project trains. A `ModelShape` may be any model, also with tensor and context
parallelism; for its activations (activations.py), it is converted to a `ModelConfig` with the same sizes. Parameters
are computed from sizes, and ZeRO divides them evenly, but this project does not divide a tensor: the replica with the
embedding or the head has all of it. The schedule decides how many micro-batches a rank holds.

Not counted: communication buffers, and fragmentation of the allocator.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from ..models import ModelConfig, StageSpec, split
from ..models.costs import shape_of
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
    """Two moments in fp32, and the weights in fp32 if they are narrower."""
    activations: int
    """Saved for backward, of all micro-batches that the rank holds at once."""
    temporary: int
    """What the backward of the loss or of one block needs beyond that."""

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        names = "weights", "gradients", "optimizer", "activations", "temporary"
        return {name: getattr(self, name) for name in names}


def peak_memory(
    model: ModelShape | ModelConfig, schedule: Schedule, batch: MicroBatch, dp: int = 1, precision: str = "bf16",
    zero: bool = True, stages: Sequence[StageSpec] | None = None, gradient_copies: int = 0, moments: int = 2,
) -> tuple[PeakMemory, ...]:  # fmt: skip
    """The peak memory of each rank of a pipeline. The fullest is `max(..., key=lambda rank: rank.total)`.

    precision: bf16, fp8, mxfp8 or fp32.
    dp: replicas of the model; ranks of context parallelism do not count. A stage is on dp x cp x tp ranks, which share
    its experts in groups of `batch.ep`. zero: replicas divide the optimizer state (ZeRO-1); the largest share counts.
    stages: the layers of each stage. None: as in this project, with about the same FLOPs each.
    gradient_copies: copies of a stage's gradients while replicas sum them, after the stage's last backward: 1 in this
    project, 2 on CPUs, 0 if gradients are in one buffer.
    moments: of the optimizer for a parameter: 2 with AdamW.
    For a `ModelShape`, a few bytes per token of norms and routers are not counted.

    Raises ValueError for a model with fewer layers than stages, and for a `ModelConfig` with tp, cp or unknown layers.
    """
    own = isinstance(model, ModelConfig)
    if own and batch.tp * batch.cp > 1:
        raise ValueError("tensor and context parallelism need a shape: use shape_of(config)")
    shape = shape_of(model) if own else model
    config = model if own and not model.mtp_layers else config_of(shape)
    element = 4 if precision == "fp32" else 2
    batch = replace(batch, element=element, fp8=precision in ("fp8", "mxfp8"))
    specs = stages or split(model if own else config, schedule.num_stages)
    # Modules of multi-token prediction count as further layers.
    blocks = [replace(s, layers=range(s.layers.start, s.layers.stop + len(s.mtp)), mtp=range(0)) for s in specs]

    kinds: dict[tuple[object, ...], int] = {}
    like = [kinds.setdefault((s.embedding, s.head, *map(config.is_dense, s.layers)), i) for i, s in enumerate(blocks)]

    @cache
    def stage_bytes(stage: int) -> StageBytes:
        spec = blocks[stage]
        working = (working_bytes(config, spec, batch, deferring) for deferring in (False, True))
        return StageBytes(saved_bytes(config, spec, batch), deferred_bytes(config, spec, batch), *working)

    # Messages to and from each neighbor.
    links = [2 + (s > 0) + (s < schedule.num_stages - 1) for s in range(schedule.num_stages)]
    message = batch.tokens * config.hidden_size * element * (schedule.num_ranks > 1)
    state = 4 * moments + 4 * (element < 4)
    ranks = []
    for rank, held in enumerate(schedule.placement.stages):
        specs_held = [blocks[s] for s in held]
        dense, experts, ends = rank_shares(shape, specs_held, batch)
        holders, end_ranks = len(schedule.placement.holders(held[0])), len(end_holders(schedule.placement))
        replicas = dp * batch.cp * holders, dp * batch.cp * batch.tp * holders // batch.ep, dp * batch.cp * end_ranks
        total = owned = dense + experts + ends
        if zero:
            whole = shape.embedding * (own and any(s.embedding or s.head for s in specs_held))
            owned = max(whole, sum(-(-n // by) for n, by in zip((dense, experts, ends), replicas, strict=True)))
        copies = 4 * gradient_copies * (dp * batch.cp * end_ranks > 1)
        sums = {s: copies * sum(rank_shares(shape, [blocks[s]], batch)) for s in held}
        sizes = {s: stage_bytes(like[s])._replace(sums=sums[s]) for s in held}
        activations, temporary = peak_of_actions(schedule.actions[rank], sizes)
        ranks.append(PeakMemory(
            (element + batch.fp8) * total + 2 * experts * (batch.fp8_block > 0), 4 * total, state * owned, activations,
            temporary + message * max(links[s] for s in held),
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
        layers = [shape.layers[min(layer, len(shape.layers) - 1)] for layer in spec.layers]
        dense += sum(layer.dense_parameters(shape.hidden) for layer in layers)
        experts += sum(layer.expert_parameters(shape.hidden) for layer in layers)
        dense += spec.embedding * (shape.learned_positions * shape.hidden + shape.embedding * (not shared))
        join = shape.mtp_join.weights + 3 * shape.hidden
        dense += spec.head * (shape.mtp * join + shape.other + shape.embedding * (not shape.tied))
    ends = shape.embedding * (shared and any(spec.embedding or spec.head for spec in specs))
    return -(-dense // batch.tp), -(-experts // batch.ep), -(-ends // batch.tp)


def config_of(shape: ModelShape) -> ModelConfig:
    """A model of this project whose activations have the sizes of `shape`, for activations.py.

    Blocks without a gate get half their inner width, because they save half as many inner activations. Modules of
    multi-token prediction count as further layers. Windows and positions do not change what is saved.
    """
    layers = shape.layers + shape.layers[-1:] * shape.mtp
    attention = shape.layers[0].attention
    routed = next((layer for layer in layers if layer.experts), None)
    dense = max((layer.dense_size // (2 - layer.gated) for layer in layers), default=0)
    sizes: dict[str, Any] = {}
    if routed:
        inner = routed.expert_size // (2 - routed.gated)
        sizes = {
            "expert_size": inner, "num_experts": routed.experts, "experts_per_token": routed.top_k,
            "num_shared_experts": -(-(routed.shared_size // (2 - routed.gated)) // inner),
            "shared_gate": routed.shared_gate,
        }  # fmt: skip
    latents: dict[str, Any] = {
        "rope_dim": attention.rope_dim,
        "kv_rank": attention.kv_rank,
        "value_dim": attention.v_dim,
    }
    return ModelConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, num_layers=len(layers), num_dense_layers=0,
        dense_layers=tuple(index for index, layer in enumerate(layers) if not layer.experts),
        dense_size=dense or 1, attention=attention.kind, num_heads=attention.heads,
        num_kv_heads=attention.kv_heads, head_dim=attention.qk_dim - attention.rope_dim, q_rank=attention.q_rank,
        tied_embeddings=shape.tied, **sizes, **(latents if attention.kind == "mla" else {}),
    )  # fmt: skip
