"""What `moe-dualpipe model` prints: sizes of models, and a table of the memory of each rank."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..drawing.tables import markdown
from ..models import PRESETS, ModelConfig, preset, split
from ..schedule import build, default_micro_batches
from .activations import MicroBatch
from .flops import forward_flops, score_flops, train_flops_per_token
from .memory import Parameters, RankMemory, count, rank_memory

if TYPE_CHECKING:
    from ..commands.model import ShowModel

HEADINGS = (
    "rank", "stages", "dense, M", "experts, M", "weights", "gradients", "optimizer", "(ZeRO-1)", "activations",
    "total", "(ZeRO-1)",
)  # fmt: skip
NOT_COUNTED = (
    "GiB. (ZeRO-1): replicas share the optimizer's state. Not counted: what kernels need in passing, buffers of\n"
    "communication, gaps between allocations. Triton kernels and flash attention are assumed."
)


def show(options: "ShowModel") -> str:
    """Raises ValueError for numbers that do not fit together."""
    config = preset(options.preset)
    for name in ("pp", "ep", "seq", "micro_batch_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {getattr(options, name)}")
    for name in ("dp", "micro_batches"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} cannot be negative: got {getattr(options, name)}")
    element = {"bfloat16": 2, "float32": 4}[options.dtype]
    batch = MicroBatch(
        options.micro_batch_size, options.seq, element, options.ep, options.recompute, options.fused_loss
    )
    name = options.schedule if options.schedule != "auto" else ("dualpipe" if options.pp > 1 else "1f1b")
    schedule = build(name, options.pp, options.micro_batches or default_micro_batches(options.pp))
    dp = options.dp or options.ep
    ranks = rank_memory(config, schedule, batch, dp)
    if options.json:
        return json.dumps(as_object(config, options.seq, ranks), indent=1)
    fullest, sharded = max(ranks, key=lambda rank: rank.total), max(ranks, key=lambda rank: rank.total_sharded)
    return (
        f"{describe(options.preset, config, options.seq)}\n\n"
        f"{name} over {options.pp} pipeline x {dp} data-parallel ranks, experts over {options.ep}, in {options.dtype}\n"
        f"{schedule.num_micro_batches} micro-batches of {batch.tokens:,} tokens, recompute {options.recompute}\n\n"
        f"{table(ranks)}\n\n"
        f"The fullest is rank {fullest.rank} with {gib(fullest.total)}; "
        f"with ZeRO-1, rank {sharded.rank} with {gib(sharded.total_sharded)}.\n"
        f"{NOT_COUNTED}"
    )


def presets() -> str:
    rows = [["preset", "layers", "experts", "a token", "shared", "vocabulary", "parameters", "active"]]
    for name, config in PRESETS.items():
        parameters, _ = totals(config)
        sizes = config.num_layers, config.num_experts, config.experts_per_token, config.num_shared_experts
        counts = amount(parameters.all), amount(parameters.active(config))
        rows.append([name, *map(str, sizes), f"{config.vocab_size:,}", *counts])
    return markdown(rows)


def totals(config: ModelConfig) -> tuple[Parameters, int]:
    """The whole model's parameters, and how many of them are the embedding's."""
    return count(config, split(config, 1)[0]), config.vocab_size * config.hidden_size


def describe(name: str, config: ModelConfig, seq_len: int) -> str:
    parameters, embedding = totals(config)
    active = parameters.active(config)
    forward, train = forward_flops(config, seq_len), train_flops_per_token(config, seq_len)
    attention = config.num_layers * score_flops(config, seq_len)
    return (
        f"{name}: {config.num_layers} layers, {config.num_dense_layers} of them dense; {config.num_experts} experts, "
        f"{config.experts_per_token} a token, and {config.num_shared_experts} shared\n"
        f"{amount(parameters.all)} parameters, {amount(active)} active ({amount(active - embedding)} without the "
        f"embedding, which is only looked up)\n"
        f"FLOPs a token at {seq_len:,} tokens: {forward / 1e9:,.2f} G forward, {attention / forward:.0%} of it causal "
        f"attention; {train / 1e9:,.2f} G in training"
    )


def amount(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def table(ranks: tuple[RankMemory, ...]) -> str:
    rows = [
        [
            str(r.rank), ", ".join(map(str, r.stages)), f"{r.dense_parameters / 1e6:,.1f}",
            f"{r.expert_parameters / 1e6:,.1f}",
            *map(gib, (r.weights, r.gradients, r.optimizer, r.optimizer_sharded, r.activations, r.total)),
            gib(r.total_sharded),
        ]
        for r in ranks
    ]  # fmt: skip
    return markdown([list(HEADINGS), *rows])


def as_object(config: ModelConfig, seq_len: int, ranks: tuple[RankMemory, ...]) -> dict[str, Any]:
    parameters, embedding = totals(config)
    return {
        "parameters": parameters.all,
        "active_parameters": parameters.active(config),
        "embedding_parameters": embedding,
        "forward_flops": forward_flops(config, seq_len),
        "train_flops": train_flops_per_token(config, seq_len),
        "ranks": [asdict(r) | {"total": r.total, "total_sharded": r.total_sharded} for r in ranks],
    }
