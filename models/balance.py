"""Losses that keep a router's choices balanced and its logits small.

Experts that are chosen often learn more and are chosen more often, until the others are idle. The sequence-wise loss
makes a sequence's favourite experts a little less likely; the z-loss keeps the logits from growing. Both are means of
whole sequences, so their gradients do not depend on how a batch is divided. The better part of balancing is no loss:
the bias of router.py, which does not pull at the weights.

B sequences, S positions, E experts, K experts per token.
"""

import torch
from torch import Tensor

from .config import ModelConfig
from .layers import at_least_fp32


def loss_factors(config: ModelConfig) -> dict[str, float]:
    """The losses that are on, and the factor of each, by their names in the configuration."""
    return {name: factor for name in ("sequence_loss", "z_loss") if (factor := getattr(config, name))}


def router_losses(config: ModelConfig, logits_BSE: Tensor, ids_BSK: Tensor) -> dict[str, Tensor]:
    """The losses that are on, without their factors, each in fp32 at least."""
    logits_BSE, losses = at_least_fp32(logits_BSE), {}
    if config.sequence_loss:
        losses["sequence_loss"] = sequence_loss(shares(logits_BSE, config), best(logits_BSE, ids_BSK, config))
    if config.z_loss:
        losses["z_loss"] = z_loss(logits_BSE)
    return losses


def sequence_loss(shares_BSE: Tensor, ids_BSK: Tensor) -> Tensor:
    """The mean over sequences of sum_E f_E P_E (arXiv 2412.19437, equations 17 to 20): 1 if all is even, E/K at most.

    P_E is the mean of an expert's share of the scores, f_E how often it is among a token's best, over the mean of that.

    Example: shares [[[0.8, 0.2], [0.6, 0.4]]], ids [[[0], [0]]]: f = [2, 0], P = [0.7, 0.3], so the loss is 1.4.
    """
    _, length, num_experts = shares_BSE.shape
    chosen_BC = ids_BSK.flatten(1)
    counts_BE = torch.zeros_like(shares_BSE[:, 0]).scatter_add_(
        1, chosen_BC, torch.ones_like(chosen_BC, dtype=shares_BSE.dtype)
    )
    often_BE = counts_BE * (num_experts / (ids_BSK.shape[2] * length))
    return (often_BE * shares_BSE.mean(1)).sum(1).mean()


def z_loss(logits_BSE: Tensor) -> Tensor:
    """The mean over tokens of logsumexp(logits)^2 (arXiv 2202.08906, equation 5).

    Example: two logits of zero: log(2)^2 = 0.48.
    """
    return logits_BSE.logsumexp(-1).square().mean()


def shares(logits_BSE: Tensor, config: ModelConfig) -> Tensor:
    """Scores that sum to 1 for each token."""
    if config.router_score == "softmax":
        return logits_BSE.softmax(-1)
    scores_BSE = logits_BSE.sigmoid()
    return scores_BSE / (scores_BSE.sum(-1, keepdim=True) + 1e-20)  # all may have underflowed, as in kernels/routing.py


def best(logits_BSE: Tensor, ids_BSK: Tensor, config: ModelConfig) -> Tensor:
    """The experts with a token's best scores: those chosen, `ids_BSK`, unless a bias or groups had a say in it."""
    if config.router_bias or config.top_groups < config.expert_groups:
        return logits_BSE.detach().topk(config.experts_per_token, dim=-1).indices
    return ids_BSK
