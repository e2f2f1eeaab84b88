"""One transformer block: attention, then a dense MLP or experts, each on a normalised copy of the residual stream."""

from torch import Tensor, nn

from moe_dualpipe.expert_parallel import ExpertParallel

from .attention import Attention
from .config import ModelConfig
from .layers import SwiGLU
from .moe import MoE


class Block(nn.Module):
    """Block number `layer` of the model; `seed` fixes the initial weights of its experts."""

    def __init__(self, config: ModelConfig, layer: int, expert_parallel: ExpertParallel, seed: int):
        super().__init__()
        out_std = config.residual_std
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, out_std)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        if config.is_dense(layer):
            self.mlp = SwiGLU(config.hidden_size, config.dense_size, config.init_std, out_std)
        else:
            self.mlp = MoE(config, expert_parallel, seed, f"layers.{layer}")

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return h_BSD + self.mlp(self.mlp_norm(h_BSD))
