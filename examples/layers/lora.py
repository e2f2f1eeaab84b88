"""LoRA (arXiv 2106.09685): fine-tune a trained model through low-rank matrices beside its frozen SwiGLU experts.

    python train.py --steps 40 --out runs/base
    python examples/layers/lora.py --weights runs/base --weights-partial --set model.expert_options.rank=16

The frozen matrices have the names of the built-in experts, so `--weights` loads them. The checkpoint lacks the
low-rank matrices, which `--weights-partial` allows. A starts from random numbers and B from 0, so the first loss equals
that of the base model. Attention and router are not frozen.

M rows, D model dim, F inner width, R rank, E experts on this rank.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_dualpipe.commands.train import main
from moe_dualpipe.kernels.experts import swiglu
from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.models.experts import SwiGLUExperts


@dataclass
class LoRAOptions:
    rank: int = 8
    """Number of rows of A and columns of B."""
    alpha: float = 16.0
    """Scale of the update: W + alpha / rank * B A."""


class LoRAExperts(SwiGLUExperts):
    takes_order = False

    def __init__(self, config: ModelConfig, num_local_experts: int, options: LoRAOptions):
        super().__init__(config, num_local_experts)
        self.scale, rank = options.alpha / options.rank, options.rank
        for name in ("gate_up", "down"):
            weight = self.get_parameter(name).requires_grad_(False)
            _, outputs, inputs = weight.shape
            self.register_parameter(f"{name}_A", nn.Parameter(torch.empty(num_local_experts, rank, inputs)))
            self.register_parameter(f"{name}_B", nn.Parameter(torch.zeros(num_local_experts, outputs, rank)))

    @torch.no_grad()
    def reset_expert(self, e: int) -> None:
        super().reset_expert(e)
        for name in ("gate_up_A", "down_A"):
            self.get_parameter(name)[e].normal_(std=self.std)

    def forward(self, x_MD: Tensor, expert_offsets: Tensor) -> Tensor:
        def product(x: Tensor, name: str) -> Tensor:
            options = {"weight_grads": self.weight_grads, "kernels": self.kernels}
            base = grouped_linear(x, self.get_parameter(name), expert_offsets, **options)
            low = grouped_linear(x, self.get_parameter(f"{name}_A"), expert_offsets, **options)
            return base + self.scale * grouped_linear(low, self.get_parameter(f"{name}_B"), expert_offsets, **options)

        return product(swiglu(product(x_MD, "gate_up")), "down")


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--experts", f"{__file__}:LoRAExperts", *options, *sys.argv[1:]])
