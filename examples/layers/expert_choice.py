"""Expert choice (arXiv 2202.09368): each expert chooses its tokens, so all experts get the same number.

    python examples/layers/expert_choice.py
    python train.py --steps 40 --router examples/layers/expert_choice.py:ExpertChoice

It is not causal: whether an expert chooses a token also depends on later tokens of the sequence. So the training loss
can use the future, and generation differs from training, because later tokens do not exist yet. `moe-dualpipe check
router` warns about this. Use expert choice where the whole sequence is known, as in an encoder.

S positions of a sequence, T tokens, E experts, C tokens of a sequence for each expert.
"""

import sys

import torch
from torch import Tensor

from moe_dualpipe.commands.train import main
from moe_dualpipe.models import ModelConfig, RouterLayer
from moe_dualpipe.models.layers import Linear


class ExpertChoice(RouterLayer):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.logits = Linear(config.hidden_size, config.num_experts, config.init_std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns E columns: column e has the id e, or -1 if expert e did not choose the token."""
        scores_SE = self.logits(x).float().softmax(-1)
        tokens, experts = x.shape[-2], self.config.num_experts
        capacity = min(tokens, max(1, round(tokens * self.config.experts_per_token / experts)))
        chosen_CE = scores_SE.topk(capacity, dim=-2).indices
        ids_SE = torch.full_like(scores_SE, -1, dtype=torch.int64)
        ids_SE.scatter_(-2, chosen_CE, torch.arange(experts, device=x.device).expand_as(chosen_CE))
        return scores_SE.flatten(0, -2), ids_SE.flatten(0, -2)


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--router", f"{__file__}:ExpertChoice", *options, *sys.argv[1:]])
