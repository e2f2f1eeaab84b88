"""Sliding-window attention: each position attends to itself and the window before it (arXiv 2004.05150).

    python examples/layers/sliding_window.py
    python train.py --steps 40 --attention examples/layers/sliding_window.py:SlidingWindow \\
        --set model.attention_options.window=64

`mask_B1SS` is the mask of `--document-mask`. `forward` has no parameter `cache`, so in generation the cache stores the
inputs of all positions, and `forward` runs on all of them for each new token. This is correct for any causal layer.

B sequences, S positions, D model dim, H heads, C head width.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_dualpipe.commands.train import main
from moe_dualpipe.models import AttentionLayer, ModelConfig
from moe_dualpipe.models.layers import Linear
from moe_dualpipe.models.rotary import Rotary, rotate


@dataclass
class Window:
    window: int = 32
    """Number of positions that each position attends to, including itself."""


class SlidingWindow(AttentionLayer):
    def __init__(self, config: ModelConfig, options: Window):
        super().__init__()
        self.heads, self.head_dim, self.window = config.num_heads, config.head_dim, options.window
        self.rotary = Rotary(config.head_dim, config)
        self.qkv = Linear(config.hidden_size, 3 * self.heads * self.head_dim, config.init_std)
        self.out = Linear(self.heads * self.head_dim, config.hidden_size, config.residual_std)

    def forward(self, x_BSD: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        batch, length, _ = x_BSD.shape
        heads_BSHC = self.qkv(x_BSD).view(batch, length, 3 * self.heads, self.head_dim)
        q_BHSC, k_BHSC, v_BHSC = heads_BSHC.transpose(1, 2).chunk(3, dim=1)
        cos_SC, sin_SC = self.rotary.table(x_BSD.new_empty(length, dtype=torch.float32))
        visible_SS = x_BSD.new_ones(length, length, dtype=torch.bool).tril().triu(1 - self.window)
        mask = visible_SS if mask_B1SS is None else visible_SS & mask_B1SS
        y_BHSC = F.scaled_dot_product_attention(
            rotate(q_BHSC, cos_SC, sin_SC), rotate(k_BHSC, cos_SC, sin_SC), v_BHSC, mask
        )
        return self.out(y_BHSC.transpose(1, 2).flatten(2))


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--attention", f"{__file__}:SlidingWindow", *options, *sys.argv[1:]])
