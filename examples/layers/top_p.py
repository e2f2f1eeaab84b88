"""A variable number of experts: as many as it takes to reach the probability p (arXiv 2403.07652).

    python examples/layers/top_p.py
    python train.py --steps 40 --router examples/layers/top_p.py:TopP --set model.router_options.p=0.6

The id -1 means "no expert": nothing is sent for this choice, and its weight has no effect. The entropy loss, also from
the paper, keeps the router from spreading the probability over all experts.

T tokens, E experts, K the largest number of experts per token.
"""

import sys
from dataclasses import dataclass

from torch import Tensor

from moe_dualpipe.commands.train import main
from moe_dualpipe.models import ModelConfig, RouterLayer, attach
from moe_dualpipe.models.layers import Linear


@dataclass
class TopPOptions:
    p: float = 0.4
    """Total probability of a token's experts."""
    most: int = 4
    """Largest number of experts per token."""
    entropy_loss: float = 1e-4
    """Factor of the mean entropy of the probabilities."""


class TopP(RouterLayer):
    def __init__(self, config: ModelConfig, options: TopPOptions):
        super().__init__()
        self.options, self.most = options, min(options.most, config.num_experts)
        self.logits = Linear(config.hidden_size, config.num_experts, config.init_std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_probs_TE = self.logits(x.flatten(0, -2)).float().log_softmax(-1)
        weights_TK, ids_TK = log_probs_TE.exp().topk(self.most)
        before_TK = weights_TK.detach().cumsum(-1) - weights_TK.detach()  # 0 for the best, which is always used
        ids_TK = ids_TK.masked_fill(before_TK >= self.options.p, -1)
        entropy = -(log_probs_TE.exp() * log_probs_TE).sum(-1).mean()
        return attach(weights_TK, self.options.entropy_loss * entropy), ids_TK


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--router", f"{__file__}:TopP", *options, *sys.argv[1:]])
