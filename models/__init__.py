"""A decoder-only Mixture-of-Experts transformer, built as pipeline stages.

`build_model(preset("tiny"))` is a whole model. `TransformerStage(config, spec)` is one stage; `split` returns specs.
"""

from .attention import filled_cache
from .attention_layer import AttentionLayer
from .auxiliary_losses import attach
from .block import BlockLayer, check_layers
from .config import RECOMPUTE, ModelConfig, StageOptions
from .experts import ExpertLayer
from .kv_cache import KVCache
from .layers import elementwise_matrices, stacked_matrices
from .moe import MoE, expert_loads
from .partition import StageSpec, split
from .per_expert import expert_function
from .presets import PRESETS, preset
from .router import RouterLayer
from .sdpa import attention_kernels
from .transformer import TransformerStage, build_model, next_token_loss, share_embedding

__all__ = [
    "PRESETS",
    "RECOMPUTE",
    "AttentionLayer",
    "BlockLayer",
    "ExpertLayer",
    "KVCache",
    "MoE",
    "ModelConfig",
    "RouterLayer",
    "StageOptions",
    "StageSpec",
    "TransformerStage",
    "attach",
    "attention_kernels",
    "build_model",
    "check_layers",
    "elementwise_matrices",
    "expert_function",
    "expert_loads",
    "filled_cache",
    "next_token_loss",
    "preset",
    "share_embedding",
    "split",
    "stacked_matrices",
]  # fmt: skip
