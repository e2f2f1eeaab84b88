"""A block in which attention and experts read the same input (arXiv 2204.02311, section 2). Attention hides dispatch.

    python examples/layers/parallel_block.py
    torchrun --nproc-per-node 2 train.py --pp 1 --ep 2 --block examples/layers/parallel_block.py:ParallelBlock

A block is a generator of segments. `moe.exchange` yields those of the experts. After its first Comm, the dispatch, the
block yields the attention, which needs no data from other ranks and so runs during the dispatch. In backward, the
attention runs during the transfer of the combine's gradients.

B sequences, S positions, D model dim, T tokens.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_dualpipe.commands.train import main
from moe_dualpipe.expert_parallel import ExpertParallel
from moe_dualpipe.models import BlockLayer, KVCache, ModelConfig, MoE, StageOptions
from moe_dualpipe.models.attention import Attention
from moe_dualpipe.overlap import Comm, Compute, Segments


class ParallelBlock(BlockLayer):
    """x + attention(norm x) + experts(norm x)"""

    def __init__(self, config: ModelConfig, layer: int, expert_parallel: ExpertParallel, stage_options: StageOptions):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, layer)
        self.moe = MoE(config, expert_parallel, layer, stage_options)

    def segments(
        self, x_BSD: Tensor, mask_B1SS: Tensor | None = None, cache: KVCache | None = None,
        rows_B: Tensor | None = None,
    ) -> Segments:  # fmt: skip
        rows_TD, *decision = yield Compute("route", partial(self.route, rows_B=rows_B), x_BSD)
        attend = partial(self.attend, mask_B1SS=mask_B1SS, cache=cache)
        exchange = self.moe.exchange(rows_TD, *decision)
        reply: Any = None
        h_BSD: Tensor | None = None
        while True:
            try:
                segment = exchange.send(reply)
            except StopIteration as stop:  # its value: the outputs of routed and of shared experts
                assert h_BSD is not None
                return (yield Compute("add", self.add, h_BSD, *stop.value))
            reply = yield segment
            if h_BSD is None and isinstance(segment, Comm):  # the dispatch has started
                h_BSD = yield Compute("attn", attend, x_BSD, rows_TD)

    def route(self, x_BSD: Tensor, rows_B: Tensor | None) -> tuple[Tensor, ...]:
        return self.moe.route(self.norm(x_BSD), rows_B)

    def attend(self, x_BSD: Tensor, rows_TD: Tensor, **context: Any) -> Tensor:
        return x_BSD + self.attention(rows_TD.view_as(x_BSD), **context)

    def add(self, h_BSD: Tensor, *outputs_TD: Tensor) -> Tensor:
        return h_BSD + torch.stack(outputs_TD).sum(0).view_as(h_BSD)


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--block", f"{__file__}:ParallelBlock", *options, *sys.argv[1:]])
