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
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """The model called `name`. Raises ValueError, with the nearest name, if there is none."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown preset {name!r}; did you mean {near!r}? There are: {', '.join(PRESETS)}")
    return PRESETS[name]
