"""A small model with awkward sizes, and the same with other options."""

import dataclasses

from moe_dualpipe.models import ModelConfig

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=6, dense_size=20,
    expert_size=8, num_experts=5, experts_per_token=2, init_std=0.3,
)  # fmt: skip


def with_choices(**choices) -> ModelConfig:
    return dataclasses.replace(CONFIG, **choices)
