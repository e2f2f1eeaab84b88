"""The sizes of a model of this project that its costs depend on.

FLOPs of your own layers are counted from their parameters: two per token for each element of a matrix.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.expert_parallel.parameters import expert_ids

from .attention import ATTENTION, attention_costs
from .config import DEFAULT_OPTIONS, ModelConfig
from .shape import AttentionShape, LayerShape, ModelShape


def shape_of(config: ModelConfig, name: str = "model") -> ModelShape:
    """The shape of a model of this project. Custom experts and routers count like built-in ones.

    Raises ValueError for custom attention and blocks, whose sizes are unknown.
    """
    if unknown := {*config.own_layers} & {"attention", "block"}:
        raise ValueError(f"sizes are known only for built-in layers: got your own {min(unknown)}")
    layers = tuple(_layer(config, layer, *_attention(config)) for layer in range(config.num_layers))
    return ModelShape(
        name, config.hidden_size, config.vocab_size, layers, config.tied_embeddings, config.mtp_layers,
        other=config.hidden_size,
    )  # fmt: skip


def flops_shape(config: ModelConfig) -> ModelShape:
    """Like `shape_of`, but only its FLOPs are valid, including those of your own layers."""
    if not {*config.own_layers} - {"router"}:
        return shape_of(config)
    none = AttentionShape("gqa", 0, 0, 0, 0)
    layers = tuple(OwnLayer(none, config=config, index=layer) for layer in range(config.num_layers))
    return ModelShape("model", config.hidden_size, config.vocab_size, layers, mtp=config.mtp_layers)


def train_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of a forward and a backward per token, with your own layers: `ModelShape.train_flops`.

    models/shape.py says which FLOPs count. Causal attention gives a lower utilization than counting all scores would.
    """
    return flops_shape(config).train_flops(seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLayer(LayerShape):
    """The FLOPs of a block with layers of your own."""

    config: ModelConfig
    index: int

    def flops(self, hidden: int) -> int:
        if (found := layer_flops_of_parameters(self.config, self.index)) is not None:
            return found
        built_in = _layer(self.config, self.index, self.attention, 0)
        return attention_costs(self.config).weight_flops(self.config) + built_in.flops(hidden)

    def score_flops(self, seq_len: int) -> int:
        return attention_costs(self.config).score_flops(self.config, seq_len)


def _layer(config: ModelConfig, layer: int, attention: AttentionShape, other: int) -> LayerShape:
    """other: parameters of attention outside of matrices."""
    other += 2 * config.hidden_size
    if config.is_dense(layer):
        return LayerShape(attention, config.dense_size, other=other)
    return LayerShape(
        attention, 0, True, config.num_experts, config.experts_per_token, config.expert_size,
        config.num_shared_experts * config.expert_size, config.shared_gate, other, config.expert_groups,
        config.top_groups,
    )  # fmt: skip


def _attention(config: ModelConfig) -> tuple[AttentionShape, int]:
    """Attention, and its parameters outside of matrices."""
    attention, out = ATTENTION[str(config.attention)].shape(config), config.hidden_size * config.out_bias
    if config.attention == "mla":
        latents = config.q_rank + config.kv_rank
        return attention, latents + (latents + config.rope_dim) * config.qkv_bias + out
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    norms = {"none": 0, "head": 2 * width, "full": (heads + kv_heads) * width}[config.qk_norm]
    return attention, norms + (heads + 2 * kv_heads) * width * config.qkv_bias + out


@lru_cache(maxsize=1024)
def layer_flops_of_parameters(config: ModelConfig, layer: int) -> int | None:
    """FLOPs of the matrix products of a block, per token, forward, if each matrix is used once for a token.

    A token uses `experts_per_token` of the routed experts. Builds the block on the meta device, which allocates no
    memory. Returns None if that fails, for example because a constructor reads values.
    """
    from .block import block_class

    try:
        with torch.device("meta"):
            block = block_class(config).build(config, layer, Local(config.num_experts), DEFAULT_OPTIONS)
    except Exception:  # the layer may still work on a device; if not, building it there says why
        return None
    of_experts = expert_ids(block)
    dense = experts = 0
    for name, parameter in block.named_parameters():
        if name in of_experts:
            experts += parameter.numel()
        elif parameter.ndim > 1:
            dense += parameter.numel()
    return max(1, 2 * (dense + experts * config.experts_per_token // config.num_experts))
