"""Configurations of routers."""

import dataclasses

import torch

from moe_dualpipe.models import ModelConfig
from moe_dualpipe.models.router import Router

CONFIG = ModelConfig(
    vocab_size=19, hidden_size=8, num_layers=3, num_dense_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
    dense_size=12, expert_size=6, num_experts=8, experts_per_token=3, init_std=0.4, sequence_loss=0.7, z_loss=0.03,
)  # fmt: skip


D, E, K = 8, 8, 3


KINDS = [
    {},
    {"router_score": "sigmoid", "normalize_weights": False},
    {"router_bias": True, "routed_scale": 2.5},
    {"router_score": "sigmoid", "expert_groups": 4, "top_groups": 2, "router_bias": True},
    {"expert_groups": 4, "top_groups": 2, "normalize_weights": False},
    {"expert_groups": 8, "top_groups": 5, "router_bias": True, "experts_per_token": 1},
]


def with_choices(**choices) -> ModelConfig:
    return dataclasses.replace(CONFIG, **choices)


def made(router: Router) -> Router:
    """Return `router` in fp64. Its bias, if any, becomes about as large as the scores."""
    if router.bias_E is not None:
        router.bias_E.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(8))
    return router.double()
