"""Named model sizes."""

import difflib

from .config import ModelConfig

PRESETS: dict[str, ModelConfig] = {
    # Learns Python source, byte by byte, on two CPU cores within two minutes.
    "tiny": ModelConfig(),
    # The same shape, larger: for one GPU.
    "small": ModelConfig(
        hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64,
        dense_size=3072, expert_size=512, num_experts=32, experts_per_token=4,
    ),
    # DeepSeek's published models, as their config.json has them, without what V3 predicts tokens further ahead with
    # (MTP), and without YaRN, the stretching of positions for contexts beyond the 4,096 tokens of pre-training.
    # 15.7 B parameters, 2.4 B active (arXiv 2405.04434).
    "deepseek-v2-lite": ModelConfig(
        vocab_size=102400, hidden_size=2048, num_layers=27, num_dense_layers=1, attention="mla", num_heads=16,
        head_dim=128, kv_rank=512, rope_dim=64, value_dim=128, dense_size=10944, expert_size=1408, num_experts=64,
        experts_per_token=6, num_shared_experts=2, normalize_weights=False,
    ),
    # 671 B parameters, 37 B active (arXiv 2412.19437).
    "deepseek-v3": ModelConfig(
        vocab_size=129280, hidden_size=7168, num_layers=61, num_dense_layers=3, attention="mla", num_heads=128,
        head_dim=128, q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128, dense_size=18432, expert_size=2048,
        num_experts=256, experts_per_token=8, num_shared_experts=1, router_score="sigmoid", expert_groups=8,
        top_groups=4, routed_scale=2.5,
    ),
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """The model called `name`. Raises ValueError, with the nearest name, if there is none."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown preset {name!r}; did you mean {near!r}? There are: {', '.join(PRESETS)}")
    return PRESETS[name]
