"""Routers with one mistake each. `TopK`, `WithALoss` and `Hash` are correct."""

import torch
from torch import nn

from moe_dualpipe.models import attach


class TopK(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.k = config.experts_per_token
        self.score = nn.Linear(config.hidden_size, config.num_experts)

    def forward(self, x):
        return self.scores(x.flatten(0, -2)).topk(self.k)

    def scores(self, x_TD):
        logits_TE = self.score(x_TD)
        return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)).softmax(-1)


class WithALoss(TopK):
    """Correct: the backward of the weights also runs that of the loss."""

    def forward(self, x):
        weights, ids = super().forward(x)
        return attach(weights, self.score(x).square().mean()), ids


class OnlyIds(TopK):
    def forward(self, x):
        return super().forward(x)[1]


class WeightsInBf16(TopK):
    def scores(self, x_TD):
        return self.score(x_TD).softmax(-1)


class IdsInInt32(TopK):
    def forward(self, x):
        weights, ids = super().forward(x)
        return weights, ids.int()


class KeepsTheSequences(TopK):
    def forward(self, x):
        return self.scores(x).topk(self.k)


class NeedsTwoDimensions(TopK):
    def forward(self, x):
        return self.scores(x.flatten(0, 1)).topk(self.k)


class CountsFromOne(TopK):
    def forward(self, x):
        weights, ids = super().forward(x)
        return weights, ids + 1


class ChoosesTwice(TopK):
    def forward(self, x):
        weights, ids = super().forward(x)
        return weights, ids[:, :1].expand(-1, self.k)


class HidesSkips(TopK):
    skips_choices = False

    def forward(self, x):
        weights, ids = super().forward(x)
        return weights, ids.masked_fill(weights < 0.3, -1)


class SkipsWithInfinity(TopK):
    """Its weights of id -1 are infinite."""

    def forward(self, x):
        weights, ids = super().forward(x)
        skipped = weights < 0.3
        return weights.masked_fill(skipped, torch.inf), ids.masked_fill(skipped, -1)


class SkipsWithConstants(TopK):
    """Correct: its weights of id -1 are finite. They depend on all tokens and have no gradient, without any effect."""

    def forward(self, x):
        weights, ids = super().forward(x)
        skipped = weights < 0.3
        return torch.where(skipped, weights.detach().mean(), weights), ids.masked_fill(skipped, -1)


class DividesByZero(TopK):
    def forward(self, x):
        weights, ids = super().forward(x)
        weights = weights * (weights > 0.3)
        return weights / weights.sum(-1, keepdim=True), ids


class DrawsExperts(TopK):
    def forward(self, x):
        scores_TE = self.scores(x.flatten(0, -2))
        ids = torch.multinomial(scores_TE, self.k)
        return scores_TE.gather(1, ids), ids


class BalancesInForward(TopK):
    """The bias moves with each call, so it depends on how often and in what order forward runs."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("bias_E", torch.zeros(config.num_experts))

    def scores(self, x_TD):
        scores_TE = super().scores(x_TD)
        with torch.no_grad():
            self.bias_E += 0.1 * (scores_TE.mean(0) - scores_TE.mean())
        return scores_TE - self.bias_E


class FixedWeights(TopK):
    def forward(self, x):
        weights, ids = super().forward(x)
        return weights.detach() + 0 * x.flatten(0, -2)[:, :1], ids


class Straight(TopK):
    """The gradient of a softmax with temperature 1, but the values of one with temperature 2."""

    def scores(self, x_TD):
        logits_TE = self.score(x_TD)
        soft, hard = logits_TE.softmax(-1), (logits_TE / 2).softmax(-1)
        return (soft + (hard - soft).detach()).to(torch.promote_types(soft.dtype, torch.float32))


class KeepsAPlainTensor(TopK):
    def __init__(self, config):
        super().__init__(config)
        self.offsets = torch.rand(config.num_experts)

    def scores(self, x_TD):
        return super().scores(x_TD) + self.offsets.to(x_TD.device)


class ExpertChoice(TopK):
    """Each expert takes the tokens that like it best: a token's experts depend on the others. A warning, not wrong."""

    def forward(self, x):
        scores_TE = self.scores(x.flatten(0, -2))
        number = max(1, len(scores_TE) * self.k // scores_TE.shape[1])
        kept_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, scores_TE.topk(number, dim=0).indices, True)
        ids_TE = torch.arange(scores_TE.shape[1], device=x.device).expand_as(scores_TE)
        return scores_TE, ids_TE.masked_fill(~kept_TE, -1)


class Hash(nn.Module):
    """Without parameters and gradients: correct."""

    def __init__(self, config):
        super().__init__()
        self.experts, self.k = config.num_experts, config.experts_per_token

    def forward(self, x):
        first_T = (x.flatten(0, -2)[:, 0].float().abs() * 1000).long()
        ids = (first_T[:, None] + torch.arange(self.k, device=x.device)) % self.experts
        return torch.full(ids.shape, 1 / self.k, device=x.device), ids
