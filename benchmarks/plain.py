"""The plainest PyTorch program of the same model, to compare times with: no module, no engine, a loop over the experts.

T tokens, B sequences, S positions, H heads, C head width, K experts per token.
"""

from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from moe_dualpipe.models import ModelConfig

Weights = Mapping[str, Tensor]


def plain_loss(weights: Weights, config: ModelConfig, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
    """The mean cross-entropy of the model with these weights, by the names of `TransformerStage`.

    For grouped-query attention, softmax routers without a bias, and gated shared experts or none.
    """
    x_BSD = F.embedding(tokens_BS, weights["embedding.weight"])
    cos_SC, sin_SC = _rotary(config, tokens_BS.shape[1])
    for layer in range(config.num_layers):
        of_layer = f"layers.{layer}."
        w = {name.removeprefix(of_layer): weight for name, weight in weights.items() if name.startswith(of_layer)}
        x_BSD = x_BSD + _attention(w, config, _norm(x_BSD, w["attention_norm.weight"], config), cos_SC, sin_SC)
        normed = _norm(x_BSD, w["mlp_norm.weight"], config)
        if config.is_dense(layer):
            x_BSD = x_BSD + _swiglu(normed, w["mlp.gate_up.weight"], w["mlp.down.weight"])
        else:
            x_BSD = x_BSD + _experts(w, config, normed.flatten(0, 1)).view_as(x_BSD)
    logits_BSV = F.linear(_norm(x_BSD, weights["norm.weight"], config), weights["head.weight"])
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


def _norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, config.norm_eps)


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _attention(w: Weights, config: ModelConfig, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    keys = config.num_kv_heads * config.head_dim
    q, k, v = F.linear(x_BSD, w["attention.qkv.weight"]).split([config.num_heads * config.head_dim, keys, keys], dim=-1)
    if config.qk_norm == "full":
        q, k = _norm(q, w["attention.q_norm.weight"], config), _norm(k, w["attention.k_norm.weight"], config)
    q, k, v = (rearrange(t, "b s (h c) -> b h s c", c=config.head_dim) for t in (q, k, v))
    q, k = (t * cos_SC + _half_turned(t) * sin_SC for t in (q, k))
    y_BHSC = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(rearrange(y_BHSC, "b h s c -> b s (h c)"), w["attention.out.weight"])


def _rotary(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles_SC = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return angles_SC.cos(), angles_SC.sin()


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _experts(w: Weights, config: ModelConfig, x_TD: Tensor) -> Tensor:
    scores_TE = F.linear(x_TD, w["mlp.router.logits.weight"]).softmax(-1)
    weights_TK, ids_TK = scores_TE.topk(config.experts_per_token)
    if config.normalize_weights:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    y_TD = torch.zeros_like(x_TD)
    for e, (gate_up, down) in enumerate(zip(w["mlp.experts.gate_up"], w["mlp.experts.down"], strict=True)):
        token, choice = torch.where(ids_TK == e)
        rows = _swiglu(x_TD[token], gate_up, down) * weights_TK[token, choice, None]
        y_TD = y_TD.index_add(0, token, rows)
    if config.num_shared_experts:
        gate_T1 = F.linear(x_TD, w["mlp.shared_gate.weight"]).sigmoid()
        y_TD = y_TD + gate_T1 * _swiglu(x_TD, w["mlp.shared.gate_up.weight"], w["mlp.shared.down.weight"])
    return y_TD
