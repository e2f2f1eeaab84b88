"""The size of models, and the memory of each rank, in Markdown tables and sentences."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..drawing.tables import markdown
from . import ModelShape, PeakMemory

HEADINGS = (
    "rank", "stages", "dense, M", "experts, M", "weights", "gradients", "optimizer", "(ZeRO-1)", "activations",
    "temporary", "total", "(ZeRO-1)",
)  # fmt: skip


class RankMemory(NamedTuple):
    """A pipeline rank: its memory without and with ZeRO-1."""

    stages: tuple[int, ...]
    whole: PeakMemory
    sharded: PeakMemory

    def as_dict(self) -> dict[str, Any]:
        """Bytes, for the JSON report."""
        return {
            "stages": self.stages, "dense_parameters": self.whole.dense_parameters,
            "expert_parameters": self.whole.expert_parameters, **self.whole.parts(),
            "optimizer_sharded": self.sharded.optimizer, "total": self.whole.total, "total_sharded": self.sharded.total,
        }  # fmt: skip


def sizes_table(shapes: Sequence[ModelShape]) -> str:
    """Return a table with one row per model."""
    rows = [["preset", "layers", "experts", "per token", "shared", "vocabulary", "parameters", "active"]]
    for shape in shapes:
        counts = format_count(shape.parameters), format_count(shape.active_parameters)
        rows.append([shape.name, str(len(shape.layers)), *map(str, _experts(shape)), f"{shape.vocab:,}", *counts])
    return markdown(rows)


def _experts(shape: ModelShape) -> tuple[int, int, int]:
    """Experts of a layer, those of a token, and shared ones."""
    last = shape.layers[-1]
    return last.experts, last.top_k, last.shared_size // max(1, last.expert_size)


def size_summary(shape: ModelShape, seq_len: int) -> str:
    """Return layers, experts, parameters and FLOPs of one model in sentences."""
    active, forward = shape.active_parameters, shape.forward_flops(seq_len)
    experts, top_k, shared = _experts(shape)
    dense = sum(not layer.experts for layer in shape.layers)
    return (
        f"{shape.name}: {len(shape.layers)} layers, {dense} of them dense; {experts} experts, "
        f"{top_k} per token, and {shared} shared\n"
        f"{format_count(shape.parameters)} parameters, {format_count(active)} active "
        f"({format_count(active - shape.embedding)} without the embedding, which is only looked up)\n"
        f"FLOPs per token at {seq_len:,} tokens: {forward / 1e9:,.2f} G forward, "
        f"{shape.score_flops(seq_len) / forward:.0%} of it causal attention; "
        f"{shape.train_flops(seq_len) / 1e9:,.2f} G in training"
    )


def memory_table(ranks: Sequence[RankMemory]) -> str:
    """Return a table with one row per rank, the rank with the most memory, and what is not counted."""
    rows: list[list[str]] = [[*HEADINGS]]
    for number, (stages, whole, sharded) in enumerate(ranks):
        sizes = (whole.weights, whole.gradients, whole.optimizer, sharded.optimizer, whole.activations,
                 whole.temporary, whole.total, sharded.total)  # fmt: skip
        millions = (f"{count / 1e6:,.1f}" for count in (whole.dense_parameters, whole.expert_parameters))
        rows.append([str(number), ", ".join(map(str, stages)), *millions, *map(_gib, sizes)])
    most, most_sharded = (
        max((one.total, -n) for n, one in enumerate(kind)) for kind in list(zip(*ranks, strict=True))[1:]
    )
    return (
        f"{markdown(rows)}\n\n"
        f"Rank {-most[1]} needs the most memory, {_gib(most[0])} GiB; "
        f"with ZeRO-1, rank {-most_sharded[1]} does, {_gib(most_sharded[0])} GiB.\n"
        "All sizes are in GiB. (ZeRO-1): optimizer state divided over replicas. Temporary: what a backward needs for\n"
        "a moment. Not counted: communication buffers, fragmentation. Triton kernels and flash attention are assumed."
    )


def format_count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
