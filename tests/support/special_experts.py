"""Expert layers with dropout, frozen weights or running statistics, to train as custom expert layers.

M rows, D model dim, F inner width, R rank, E experts on this rank.
"""

from torch.nn import functional as F

from moe_dualpipe.models.experts import SwiGLUExperts


def named(layer):
    """The name of an expert layer of this file, for `ModelConfig.experts`."""
    return f"{layer.__module__}:{layer.__name__}"


class DropoutExperts(SwiGLUExperts):
    def forward(self, x_ND, order, weights_NK):
        return F.dropout(super().forward(x_ND, order, weights_NK), 0.5, self.training)
