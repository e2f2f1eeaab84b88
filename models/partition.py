"""Divide the layers over stages so that all stages have about the same FLOPs."""

from dataclasses import dataclass

from moe_dualpipe.messages import plural

from .attention import ATTENTION
from .config import ModelConfig


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What one stage holds: a range of blocks, the embedding, the head, and its share of the model's FLOPs.

    mtp: the blocks of multi-token prediction, which follow the last layer; only on the last stage.
    """

    layers: range
    embedding: bool
    head: bool
    share: float
    mtp: range = range(0)

    @property
    def blocks(self) -> list[int]:
        """The indices of all blocks of the stage, in order."""
        return [*self.layers, *self.mtp]

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        parts = ["embedding"] * self.embedding
        parts += [f"layer {first}" if first == last else f"layers {first}-{last}"]
        parts += ["head"] * self.head
        parts += [plural(len(self.mtp), "MTP module")] * bool(self.mtp)
        return f"{' + '.join(parts)} ({self.share:.0%} of the work)"


def layer_flops(config: ModelConfig, layer: int) -> int:
    """FLOPs of a block per token, forward, without attention scores, which depend on the length."""
    attention = ATTENTION[config.attention].weight_flops(config)
    if config.is_dense(layer):
        return attention + 6 * config.hidden_size * config.dense_size
    experts = config.experts_per_token + config.num_shared_experts
    return attention + 2 * config.hidden_size * (3 * experts * config.expert_size + config.num_experts)


def head_flops(config: ModelConfig) -> int:
    """FLOPs of the head per token, forward."""
    return 2 * config.hidden_size * config.vocab_size


def mtp_module_flops(config: ModelConfig, block: int) -> int:
    """FLOPs of an MTP module per token, forward: its projection, its block, and the head."""
    return layer_flops(config, block) + 4 * config.hidden_size**2 + head_flops(config)


def split(config: ModelConfig, num_stages: int) -> tuple[StageSpec, ...]:
    """Divide the blocks over `num_stages` stages so that the slowest stage is as fast as possible.

    Raises ValueError if there are fewer blocks than stages.
    """
    if config.num_layers < num_stages:
        raise ValueError(
            f"{plural(config.num_layers, 'layer')} cannot be divided over {plural(num_stages, 'pipeline stage')}: "
            f"use at least {num_stages} layers, fewer pipeline ranks, or a schedule with fewer stages (1f1b)"
        )
    costs = [layer_flops(config, layer) for layer in range(config.num_layers)]
    # The head and the MTP modules are on the stage of the last block.
    costs[-1] += head_flops(config) + sum(mtp_module_flops(config, block) for block in config.mtp_blocks)
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, ())}  # (stages, layers) -> (max, ends)
    for stages in range(1, num_stages + 1):
        for end in range(stages, config.num_layers + 1):
            best[stages, end] = min(
                (max(best[stages - 1, start][0], sum(costs[start:end])), (*best[stages - 1, start][1], end))
                for start in range(stages - 1, end)
                if (stages - 1, start) in best
            )
    ends = best[num_stages, config.num_layers][1]
    specs = []
    for start, end in zip((0, *ends), ends, strict=False):
        last, share = end == config.num_layers, sum(costs[start:end]) / sum(costs)
        specs.append(StageSpec(range(start, end), start == 0, last, share, config.mtp_blocks if last else range(0)))
    return tuple(specs)
