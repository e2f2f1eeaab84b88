"""One nn.Module per expert: a class of a single expert, and a function that returns an nn.ModuleList.

    python examples/layers/module_list.py
    python train.py --steps 40 --experts examples/layers/module_list.py:linear_experts

The model calls each module with the rows of its expert. Each expert is saved separately, and its initial weights do not
depend on the number of ranks. On a GPU, this needs one host sync per layer, to read the number of rows of each expert.
"""

import sys

from torch import Tensor, nn
from torch.nn import functional as F

from moe_dualpipe.commands.train import main
from moe_dualpipe.models import ModelConfig


class GELUExpert(nn.Module):
    """One expert: rows [m, D] -> rows [m, D]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.expert_size)
        self.down = nn.Linear(config.expert_size, config.hidden_size)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(rows)))


def linear_experts(config: ModelConfig, num_local_experts: int) -> nn.ModuleList:
    """All experts of a rank, each a single matrix."""
    return nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(num_local_experts))


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--experts", f"{__file__}:GELUExpert", *options, *sys.argv[1:]])
