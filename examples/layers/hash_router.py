"""A router without parameters: a fixed hash of the token chooses the experts (arXiv 2106.04426).

    python examples/layers/hash_router.py
    python train.py --steps 40 --router examples/layers/hash_router.py:HashRouter

The paper hashes the ids of tokens. A router sees hidden states, so this one hashes the signs of random projections:
similar states get the same experts. The projections are a buffer, which is saved with the model and equal on all ranks.
The routing weights are constant, so the router has no gradient.

T tokens, D model dim, K experts per token.
"""

import sys

import torch
from torch import Tensor

from moe_dualpipe.commands.train import main
from moe_dualpipe.models import ModelConfig, RouterLayer


class HashRouter(RouterLayer):
    projections: Tensor
    skips_choices = False  # every token has K experts

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_experts, self.k = config.num_experts, config.experts_per_token
        self.register_buffer("projections", torch.randn(config.hidden_size, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        bits = (x.detach().flatten(0, -2) @ self.projections > 0).long()
        code_T1 = (bits * 2 ** torch.arange(16, device=x.device)).sum(-1, keepdim=True)
        code_T1 = code_T1 * 40503 >> 4  # Knuth's multiplicative hash: all bits count
        ids_TK = (code_T1 + torch.arange(self.k, device=x.device)) % self.num_experts
        return torch.full(ids_TK.shape, 1 / self.k, device=x.device), ids_TK


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--router", f"{__file__}:HashRouter", *options, *sys.argv[1:]])
