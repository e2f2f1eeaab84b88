"""Auxiliary losses: add a term to the loss on any stage (`attach`), and the two losses of a router.

A router, or a multi-token prediction module, adds a term to the loss. Sending the term to the last stage would enlarge
every message between stages. It is not necessary: the loss is a sum, so its gradient with respect to each term is 1, on
every stage. `attach` starts that gradient in the backward of a tensor that the loss depends on.

Experts that are chosen often learn more and are chosen more often, until the others are idle. The sequence-wise loss
lowers the scores of the experts that a sequence prefers; the z-loss keeps the logits small. Both are means over
sequences of a mean over positions, so their gradients do not depend on how a batch is divided. Padding does not count:
its positions have weight 0. A bias (router.py), which has no gradient, also balances experts.

B sequences, S positions, E experts, K experts per token.
"""

from typing import Any

import torch
from torch import Tensor

from moe_dualpipe.kernels.linear import at_least_fp32

from .config import ModelConfig
from .context_parallel import Context


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *losses: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [(loss.dtype, loss.device) for loss in losses]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[0], *(torch.ones((), dtype=dtype, device=device) for dtype, device in ctx.dtypes)


def attach(x: Tensor, *losses: Tensor) -> Tensor:
    """Return `x`; its backward also runs the backward of the scalar `losses`, as if they were added to the loss.

    `backward()` must start from the loss itself, with gradient 1. If you scale the loss, scale these losses too.
    Scaling the gradients after backward scales all of them alike. The idea is from Megatron-LM's auxiliary loss scaler.

    Example: y = attach(x, 3 * w); (2 * y).backward() gives x.grad = 2 and w.grad = 3.
    """
    return _Attach.apply(x, *losses) if losses else x  # type: ignore[return-value]


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """`loss * weight`. With weight 0, a loss without labels is 0, not nan."""
    if isinstance(weight, Tensor):  # for a graph, which has no branches
        return torch.where(weight > 0, loss, 0.0) * weight
    return loss if weight == 1 else loss * weight if weight else loss.nan_to_num() * 0


def loss_factors(config: ModelConfig) -> dict[str, float]:
    """The factors of the enabled router losses, by their names in the configuration."""
    return {name: factor for name in ("sequence_loss", "z_loss") if (factor := getattr(config, name))}


def router_losses(
    config: ModelConfig,
    logits_BSE: Tensor,
    ids_BSK: Tensor,
    weights_BS: Tensor | None = None,
    context: Context | None = None,
    documents_BS: Tensor | None = None,
) -> dict[str, Tensor]:
    """The enabled router losses, without their factors, in fp32 at least.

    weights_BS: the weight of each position in the mean of its sequence, 0 for padding. None: 1/S. context: the ranks
    that share the sequences; the mean of their losses is that of the whole sequences. Collective over them.
    documents_BS: as for `sequence_loss`.
    """
    logits_BSE, losses = at_least_fp32(logits_BSE), {}
    if config.sequence_loss:
        if config.router_bias or config.top_groups < config.expert_groups:  # the K chosen experts are not the K best
            ids_BSK = logits_BSE.detach().topk(config.experts_per_token, dim=-1).indices
        if weights_BS is not None:
            ids_BSK = ids_BSK.masked_fill(weights_BS[..., None] == 0, -1)
        shares_BSE = shares(logits_BSE, config)
        losses["sequence_loss"] = sequence_loss(shares_BSE, ids_BSK, weights_BS, context, documents_BS)
    if config.z_loss:
        losses["z_loss"] = z_loss(logits_BSE, weights_BS)
    return losses


def sequence_loss(
    shares_BSE: Tensor, ids_BSK: Tensor, weights_BS: Tensor | None = None, context: Context | None = None,
    documents_BS: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The mean over sequences of sum_E f_E P_E (arXiv 2412.19437, equations 17 to 20).

    P_E is the mean share of expert E in the scores. f_E is the number of tokens with expert E among their K best,
    divided by the mean of this number over experts. The loss is 1 if all experts are used equally, and at most E/K.
    Ids of -1, no expert, are not counted. documents_BS: the number of the document of each position, below the length
    of a sequence, with `weights_BS`: the mean is over documents, in place of sequences.

    Example: shares [[[0.8, 0.2], [0.6, 0.4]]], ids [[[0], [0]]]: f = [2, 0], P = [0.7, 0.3], so the loss is 1.4.
    """
    size, length, experts = shares_BSE.shape
    numbers_BS1, documents = torch.zeros_like(ids_BSK[..., :1]), 1
    if documents_BS is not None:
        numbers_BS1 = documents_BS.clamp(min=0)[..., None].long()
        documents = length * (context.size if context else 1)  # the most of a sequence, known without a host sync
    chosen_BC = (numbers_BS1 * experts + ids_BSK.clamp(min=0)).flatten(1)
    counts_BC = shares_BSE.new_zeros(size, documents * experts)
    counts_BC.scatter_add_(1, chosen_BC, (ids_BSK >= 0).flatten(1).to(shares_BSE.dtype))
    if context is not None:  # P is a sum over positions, so only f needs those of other ranks
        counts_BC = context.sum(counts_BC)
    counts_BNE = counts_BC.unflatten(1, (documents, experts))
    frequencies_BNE = counts_BNE * (experts / counts_BNE.sum(2, keepdim=True).clamp(min=1))
    if documents_BS is not None:  # of the document of each position
        frequencies_BNE = frequencies_BNE.gather(1, numbers_BS1.expand_as(shares_BSE))
    return _mean((frequencies_BNE * shares_BSE).sum(2), weights_BS).mean()


def z_loss(logits_BSE: Tensor, weights_BS: Tensor | None = None) -> Tensor:
    """The mean over tokens of logsumexp(logits)^2 (arXiv 2202.08906, equation 5). Logits [0, 0] -> log(2)^2 = 0.48."""
    squares_BS = logits_BSE.logsumexp(-1).square()
    return squares_BS.mean() if weights_BS is None else _mean(squares_BS, weights_BS).mean()


def _mean(x: Tensor, weights_BS: Tensor | None) -> Tensor:
    """The mean over positions, the second dimension of `x`."""
    return x.mean(1) if weights_BS is None else torch.einsum("bs...,bs->b...", x, weights_BS.to(x.dtype))


def shares(logits_BSE: Tensor, config: ModelConfig) -> Tensor:
    """Scores, normalized to sum to 1 for each token."""
    if config.router_score == "softmax":
        return logits_BSE.softmax(-1)
    scores_BSE = logits_BSE.sigmoid()
    return scores_BSE / (scores_BSE.sum(-1, keepdim=True) + 1e-20)  # in case all underflow, as in kernels/routing.py
