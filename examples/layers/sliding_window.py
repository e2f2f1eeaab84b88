"""Sliding-window attention: each position attends to itself and the window before it (arXiv 2004.05150).

    python examples/layers/sliding_window.py
    python train.py --steps 40 --attention examples/layers/sliding_window.py:SlidingWindow \\
        --set model.attention_options.window=64
    torchrun --nproc-per-node 2 train.py --steps 40 --attention examples/layers/sliding_window.py:SlidingWindow --cp 2

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
        return self.attend(*self.project(x_BSD), mask_B1SS)

    def project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H, S, C]. With --cp, those of this rank's positions."""
        batch, length, _ = x_BSD.shape
        heads_BSHC = self.qkv(x_BSD).view(batch, length, 3 * self.heads, self.head_dim)
        q_BHSC, k_BHSC, v_BHSC = heads_BSHC.transpose(1, 2).chunk(3, dim=1)
        angles = self.rotary.table(x_BSD.new_empty(length, dtype=torch.float32), context=self.context)
        return rotate(q_BHSC, *angles), rotate(k_BHSC, *angles), v_BHSC

    def attend(self, q_BHSC: Tensor, k_BHLC: Tensor, v_BHLC: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        """With --cp, the model has gathered the keys and values of all L positions."""
        keys_L = torch.arange(k_BHLC.shape[2], device=k_BHLC.device)
        queries_S = keys_L if self.context is None else self.context.cut(keys_L, 0)
        distances_SL = queries_S[:, None] - keys_L
        visible_SL = (distances_SL >= 0) & (distances_SL < self.window)
        mask = visible_SL if mask_B1SS is None else visible_SL & mask_B1SS
        y_BHSC = F.scaled_dot_product_attention(q_BHSC, k_BHLC, v_BHLC, mask)
        return self.out(y_BHSC.transpose(1, 2).flatten(2))


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--attention", f"{__file__}:SlidingWindow", *options, *sys.argv[1:]])
