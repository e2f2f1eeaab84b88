"""Sliding-window attention: each position attends to itself and the window before it (arXiv 2004.05150).

    python examples/layers/sliding_window.py
    python train.py --steps 40 --attention examples/layers/sliding_window.py:SlidingWindow \\
        --set model.attention_options.window=64
    torchrun --nproc-per-node 2 train.py --steps 40 --attention examples/layers/sliding_window.py:SlidingWindow --cp 2

`mask_B1SS` is the mask of `--document-mask`. `forward` has no parameter `cache`, so in generation the cache stores the
inputs of all positions, and `forward` runs on all of them for each new token. This is correct for any causal layer.

With `--cp`, a rank has two slices of each sequence (models/context_parallel.py). By default, the model gathers all keys
and values. `gather` replaces this by a transfer of the window before each slice. The model yields it as a `Comm`, so it
runs behind another micro-batch, like every transfer.

B sequences, S positions of this rank, D model dim, H heads, C head width. With --cp: L positions of a slice, W = window
- 1 positions before it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moe_dualpipe.commands.train import main
from moe_dualpipe.expert_parallel.exchange import AsyncResult
from moe_dualpipe.models import AttentionLayer, ModelConfig
from moe_dualpipe.models.layers import Linear
from moe_dualpipe.models.rotary import Rotary, rotate
from moe_dualpipe.overlap import Collective


@dataclass
class Window:
    window: int = 32
    """Number of positions that each position attends to, including itself."""


class SlidingWindow(AttentionLayer):
    context: Any

    def __init__(self, config: ModelConfig, options: Window):
        super().__init__()
        self.heads, self.head_dim, self.window = config.num_heads, config.head_dim, options.window
        self.rotary = Rotary(config.head_dim, config)
        self.qkv = Linear(config.hidden_size, 3 * self.heads * self.head_dim, config.init_std)
        self.out = Linear(self.heads * self.head_dim, config.hidden_size, config.residual_std)

    def forward(self, x_BSD: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        positions_S = torch.arange(x_BSD.shape[1], device=x_BSD.device)
        visible_SS = self.visible(positions_S[:, None] - positions_S)
        mask = visible_SS if mask_B1SS is None else visible_SS & mask_B1SS
        y_BHSC = F.scaled_dot_product_attention(*self.project(x_BSD), mask)
        return self.out(y_BHSC.transpose(1, 2).flatten(2))

    def visible(self, distances: Tensor) -> Tensor:
        return (distances >= 0) & (distances < self.window)

    def project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H, S, C]. With --cp, those of this rank's positions."""
        batch, length, _ = x_BSD.shape
        heads_BSHC = self.qkv(x_BSD).view(batch, length, 3 * self.heads, self.head_dim)
        q_BHSC, k_BHSC, v_BHSC = heads_BSHC.transpose(1, 2).chunk(3, dim=1)
        angles = self.rotary.table(x_BSD.new_empty(length, dtype=torch.float32), context=self.context)
        return rotate(q_BHSC, *angles), rotate(k_BHSC, *angles), v_BHSC

    # ---- With --cp ----

    @property
    def gather(self) -> Collective:
        return Collective(self.fetch_before, self.return_before, joint=True)

    def fetch_before(self, *keys: Tensor) -> AsyncResult:
        """Keys and values [B, H, 2 (W + L), C]: of both slices, each after the positions before it."""
        first, second = torch.stack(keys).chunk(2, dim=-2)
        before = self.window - 1
        if before > first.shape[-2]:
            least = 2 * before * self.context.size
            raise ValueError(f"window {self.window} is longer than a slice: use --seq-len {least} or more")

        def joined(before_first: Tensor, before_second: Tensor) -> tuple[Tensor, ...]:
            return torch.cat([before_first, first, before_second, second], dim=-2).unbind()

        # The slice after the first one is on the next rank, that after the second one on the previous rank.
        start = first.shape[-2] - before
        return self.exchange(second[..., start:, :], first[..., start:, :], joined)

    def return_before(self, *grads: Tensor) -> AsyncResult:
        """The transpose: gradients of positions before a slice return to their rank, which adds them to its own."""
        before = self.window - 1
        length = grads[0].shape[-2] // 2 - before
        before_first, first, before_second, second = torch.stack(grads).split([before, length] * 2, dim=-2)

        def summed(of_second: Tensor, of_first: Tensor) -> tuple[Tensor, ...]:
            own = torch.cat([first, second], dim=-2)
            own[..., length - before : length, :] += of_first
            own[..., 2 * length - before :, :] += of_second
            return own.unbind()

        return self.exchange(before_first, before_second, summed)

    def exchange(self, to_previous: Tensor, to_next: Tensor, finish: Callable[..., tuple[Tensor, ...]]) -> AsyncResult:
        """Send to both neighbors. `finish` gets what they sent: zeros before the first rank. Both slices of the last
        rank are neighbors, so it sends to itself."""
        rank, size = self.context.rank, self.context.size
        peers = {rank - 1: to_previous} if rank else {}
        peers |= {rank + 1: to_next} if rank < size - 1 else {}
        sizes = [to_next.numel() * (peer in peers) for peer in range(size)]
        sent = torch.cat([tensor.flatten() for tensor in peers.values()])
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, sizes, sizes, group=self.context.group, async_op=True)
        parts = dict(zip(peers, received.view(len(peers), *to_next.shape), strict=True))
        before, after = parts.get(rank - 1, torch.zeros_like(to_next)), parts.get(rank + 1, to_next)
        return AsyncResult([work], lambda _used_until_then=sent: finish(before, after))

    def attend(self, q_BHSC: Tensor, *keys: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        """The keys and values are those of `fetch_before`."""
        q, k, v = (tensor.unflatten(-2, (2, -1)) for tensor in (q_BHSC, *keys))
        length, before = q.shape[-2], self.window - 1
        keys_K = torch.arange(before + length, device=q.device)
        starts_2 = torch.tensor(self.context.slices, device=q.device) * length - before
        positions_2K = starts_2[:, None] + keys_K
        visible = self.visible(keys_K[before:, None] - keys_K) & (positions_2K >= 0)[:, None]
        if mask_B1SS is not None:
            rows_B12LS = mask_B1SS.unflatten(2, (2, -1))
            chosen_2LK = positions_2K.clamp(min=0)[:, None].expand(-1, length, -1)
            visible = visible & rows_B12LS.gather(-1, chosen_2LK.expand(len(rows_B12LS), 1, -1, -1, -1))
        y = F.scaled_dot_product_attention(q, k, v, visible)
        return self.out(y.flatten(2, 3).transpose(1, 2).flatten(2))


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--attention", f"{__file__}:SlidingWindow", *options, *sys.argv[1:]])
