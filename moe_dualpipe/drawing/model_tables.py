"""The size of models, and the memory of each rank, in Markdown tables and sentences."""

from collections.abc import Mapping, Sequence

from ..planner import ModelSize, RankMemory
from .tables import markdown

HEADINGS = (
    "rank", "stages", "dense, M", "experts, M", "weights", "gradients", "optimizer", "(ZeRO-1)", "activations",
    "total", "(ZeRO-1)",
)  # fmt: skip


def sizes_table(sizes: Mapping[str, ModelSize]) -> str:
    """Return a table with one row per model."""
    rows = [["preset", "layers", "experts", "per token", "shared", "vocabulary", "parameters", "active"]]
    for name, size in sizes.items():
        config = size.config
        numbers = config.num_layers, config.num_experts, config.experts_per_token, config.num_shared_experts
        counts = format_count(size.parameters), format_count(size.active)
        rows.append([name, *map(str, numbers), f"{config.vocab_size:,}", *counts])
    return markdown(rows)


def size_summary(name: str, size: ModelSize) -> str:
    """Return layers, experts, parameters and FLOPs of one model in sentences."""
    config, forward = size.config, size.forward_flops
    dense = sum(map(config.is_dense, range(config.num_layers)))
    return (
        f"{name}: {config.num_layers} layers, {dense} of them dense; {config.num_experts} experts, "
        f"{config.experts_per_token} per token, and {config.num_shared_experts} shared\n"
        f"{format_count(size.parameters)} parameters, {format_count(size.active)} active "
        f"({format_count(size.active - size.embedding)} without the embedding, which is only looked up)\n"
        f"FLOPs per token at {size.seq_len:,} tokens: {forward / 1e9:,.2f} G forward, "
        f"{size.score_flops / forward:.0%} of it causal attention; {size.train_flops / 1e9:,.2f} G in training"
    )


def memory_table(ranks: Sequence[RankMemory]) -> str:
    """Return a table with one row per rank, the rank with the most memory, and what is not counted."""
    rows: list[list[str]] = [[*HEADINGS]]
    for r in ranks:
        sizes = (r.weights, r.gradients, r.optimizer, r.optimizer_sharded, r.activations, r.total, r.total_sharded)
        millions = (f"{count / 1e6:,.1f}" for count in (r.dense_parameters, r.expert_parameters))
        rows.append([str(r.rank), ", ".join(map(str, r.stages)), *millions, *map(_gib, sizes)])
    fullest, sharded = max(ranks, key=lambda rank: rank.total), max(ranks, key=lambda rank: rank.total_sharded)
    return (
        f"{markdown(rows)}\n\n"
        f"Rank {fullest.rank} needs the most memory, {_gib(fullest.total)} GiB; "
        f"with ZeRO-1, rank {sharded.rank} does, {_gib(sharded.total_sharded)} GiB.\n"
        "All sizes are in GiB. (ZeRO-1): optimizer state divided over replicas. Not counted: temporary buffers of\n"
        "kernels, communication buffers, fragmentation. Triton kernels and flash attention are assumed."
    )


def format_count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
