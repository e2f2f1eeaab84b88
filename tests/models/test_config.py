"""Invalid configurations raise ValueError."""

import math

import pytest

from tests.support.models import with_choices


@pytest.mark.parametrize("choices,problem", [
    ({"num_heads": 3}, "num_heads must be a multiple of num_kv_heads: got 3, 2"),
    ({"head_dim": 5}, "head_dim must be even: got 5"),
    ({"attention": "mha"}, "attention must be one of gqa, mla, FILE.py:CLASS or MODULE:CLASS: got 'mha'"),
    ({"attention": "mla", "rope_dim": 5}, "rope_dim must be even: got 5; use 6"),
    ({"qk_norm": "both"}, "qk_norm must be none, head or full: got 'both'"),
    ({"attention": "mla", "qk_norm": "head"}, "qk_norm is only for gqa attention: got 'head' with mla; use none"),
    ({"q_rank": -1}, "q_rank must be at least 0: got -1"),
    ({"kv_rank": 0}, "kv_rank must be at least 1: got 0"),
    ({"experts_per_token": 9}, "experts_per_token must be at most num_experts: got 9 of 5"),
    ({"num_layers": 0}, "num_layers must be at least 1: got 0"),
    ({"num_shared_experts": -1}, "num_shared_experts must be at least 0: got -1"),
    ({"num_dense_layers": -1}, "num_dense_layers must be at least 0: got -1"),
    ({"router_score": "relu"}, "router_score must be softmax or sigmoid: got 'relu'"),
    ({"experts": "mine"}, "experts must be one of swiglu, FILE.py:CLASS or MODULE:CLASS: got 'mine'"),
    ({"router": 3}, "a layer must be a class, a function, or the name of one: got 3"),
    ({"expert_options": "rank=8"}, "expert_options need your own experts: got 'rank=8' with swiglu"),
    ({"yarn_beta_fast": 0.5}, r"yarn_beta_fast must be at least yarn_beta_slow: got 0\.5 and 1\.0"),
    ({"mtp_layers": -1}, "mtp_layers must be at least 0: got -1"),
    ({"mtp_weight": math.nan}, "mtp_weight must be at least 0: got nan"),
    ({"z_loss": -0.5}, "z_loss must be at least 0: got -0.5"),
    ({"sequence_loss": math.nan}, "sequence_loss must be at least 0: got nan"),
    ({"block": "a:B", "block_options": "rank"}, "an option of a layer must be key=value: got 'rank'"),
])  # fmt: skip
def test_invalid_values_are_refused(choices, problem):
    with pytest.raises(ValueError, match=problem):
        with_choices(**choices)
