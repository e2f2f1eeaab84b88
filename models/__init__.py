"""A decoder-only Mixture-of-Experts transformer, built as pipeline stages."""

from .attention import KVCache
from .config import ModelConfig
from .moe import MoE, expert_loads
from .mtp import share_embedding
from .presets import PRESETS, preset
from .recompute import RECOMPUTE
from .stacked import stacked_matrices
from .transformer import StageSpec, TransformerStage, build_model, next_token_loss, split

__all__ = [
    "PRESETS",
    "RECOMPUTE",
    "KVCache",
    "MoE",
    "ModelConfig",
    "StageSpec",
    "TransformerStage",
    "build_model",
    "expert_loads",
    "next_token_loss",
    "preset",
    "share_embedding",
    "split",
    "stacked_matrices",
]
