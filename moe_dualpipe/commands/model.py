"""`moe-dualpipe model`: how large the models are, and what each rank of a division of one holds."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, subcommand

from ..models import PRESETS, ModelConfig, preset, split
from ..models.flops import forward_flops, score_flops, train_flops_per_token
from ..models.memory import MicroBatch
from ..models.recompute import Recompute
from ..schedule import build
from ..schedule.compare import markdown
from ..training.resolve import default_micro_batches
from ..training.sizing import Parameters, RankMemory, count, rank_memory

HEADINGS = (
    "rank", "stages", "dense, M", "experts, M", "weights", "gradients", "optimizer", "(ZeRO-1)", "activations",
    "total", "(ZeRO-1)",
)  # fmt: skip
NOT_COUNTED = (
    "GiB. (ZeRO-1): replicas share the optimizer's state. Not counted: what kernels need in passing, buffers of\n"
    "communication, gaps between allocations. Triton kernels and flash attention are assumed."
)


@dataclass(frozen=True)
class ShowModel:
    """How large a model is, and what each pipeline rank holds of it while it trains."""

    preset: Positional[str]
    """Name of the model, such as tiny or deepseek-v3."""
    pp: int = 1
    """Pipeline ranks."""
    ep: int = 1
    """Ranks over which the experts of a layer are spread."""
    dp: int = 0
    """Data-parallel ranks, of which ep share the experts. 0: as many as ep."""
    seq: int = 4096
    """Tokens in a sequence."""
    micro_batch_size: int = 1
    """Sequences in a micro-batch."""
    micro_batches: int = 0
    """Micro-batches a step, on each data-parallel rank. 0: 8, or more where the schedule needs them."""
    schedule: str = "auto"
    """Pipeline schedule. auto: dualpipe, or 1f1b on a single rank."""
    recompute: Recompute = "none"
    """What to compute again in the backward instead of keeping it: none, norms, attention or full."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and activations; gradients and the optimizer's state are float32."""
    fused_loss: bool = False
    """The head and the loss as one, without logits as a whole."""
    json: bool = False
    """Print JSON: bytes, for each rank."""

    def run(self) -> None:
        config = preset(self.preset)
        for name in ("pp", "ep", "seq", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {getattr(self, name)}")
        for name in ("dp", "micro_batches"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} cannot be negative: got {getattr(self, name)}")
        element = {"bfloat16": 2, "float32": 4}[self.dtype]
        batch = MicroBatch(self.micro_batch_size, self.seq, element, self.ep, self.recompute, self.fused_loss)
        name = self.schedule if self.schedule != "auto" else ("dualpipe" if self.pp > 1 else "1f1b")
        schedule = build(name, self.pp, self.micro_batches or default_micro_batches(self.pp))
        dp = self.dp or self.ep
        ranks = rank_memory(config, schedule, batch, dp)
        if self.json:
            print(json.dumps(as_object(config, self.seq, ranks), indent=1))
            return
        print(describe(self.preset, config, self.seq))
        print(
            f"\n{name} over {self.pp} pipeline x {dp} data-parallel ranks, experts over {self.ep}, in {self.dtype}\n"
            f"{schedule.num_micro_batches} micro-batches of {batch.tokens:,} tokens, recompute {self.recompute}\n"
        )
        print(table(ranks))
        fullest = max(ranks, key=lambda rank: rank.total_sharded)
        print(
            f"\nThe fullest is rank {fullest.rank}: {gib(fullest.total)} GiB, {gib(fullest.total_sharded)} with ZeRO-1."
            f"\n{NOT_COUNTED}"
        )


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


@dataclass(frozen=True)
class ListModels:
    """The named models and their sizes."""

    def run(self) -> None:
        rows = [["preset", "layers", "experts", "a token", "shared", "vocabulary", "parameters", "active"]]
        for name, config in PRESETS.items():
            parameters, _ = totals(config)
            sizes = config.num_layers, config.num_experts, config.experts_per_token, config.num_shared_experts
            counts = amount(parameters.all), amount(parameters.active(config))
            rows.append([name, *map(str, sizes), f"{config.vocab_size:,}", *counts])
        print(markdown(rows))


@dataclass(frozen=True)
class ModelCommands:
    """Models: their size, and the memory that training them takes."""

    command: Annotated[
        Annotated[ListModels, subcommand("list")] | Annotated[ShowModel, subcommand("show")],
        tyro.conf.arg(name=""),
    ]
