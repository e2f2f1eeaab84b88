"""Every choice of the model, in one frozen value."""

from dataclasses import dataclass
from typing import Literal

from moe_dualpipe.kernels.routing import RoutingOptions


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only Mixture-of-Experts transformer. Raises ValueError when the choices contradict each other."""

    vocab_size: int = 256
    """Number of token ids; 256 for bytes."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Transformer blocks, dense and Mixture-of-Experts together."""
    num_dense_layers: int = 1
    """How many of the first blocks have a dense MLP instead of experts."""
    attention: Literal["gqa", "mla"] = "gqa"
    """Grouped-query attention, or multi-head latent attention, as in DeepSeek-V2 and V3."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads, each shared by num_heads / num_kv_heads query heads; mla has none of its own."""
    head_dim: int = 32
    """Width of one head; even in gqa, because of the rotary embedding. In mla of the part without positions."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """gqa: RMSNorm of queries and keys before their rotation, each head by itself, or all heads together (full)."""
    q_rank: int = 0
    """mla: width of the latent that queries are made of; 0: they are made of the hidden state itself."""
    kv_rank: int = 64
    """mla: width of the latent that keys and values are made of, which is all that a cache keeps of them."""
    rope_dim: int = 16
    """mla: width of the rotated part of queries and keys, one key for all heads; even."""
    value_dim: int = 32
    """mla: width of one head's values."""
    dense_size: int = 384
    """Inner width of a dense MLP."""
    expert_size: int = 128
    """Inner width of one expert."""
    num_experts: int = 8
    """Routed experts in each Mixture-of-Experts block."""
    experts_per_token: int = 2
    """Routed experts that each token is sent to (top-k)."""
    num_shared_experts: int = 1
    """Experts that every token goes through besides."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    expert_groups: int = 1
    """Groups of consecutive experts; a token chooses among the experts of its best top_groups groups."""
    top_groups: int = 1
    """How many groups that is."""
    normalize_weights: bool = True
    """Scale a token's routing weights to sum to routed_scale."""
    routed_scale: float = 1.0
    """Factor on the routing weights."""
    router_bias: bool = False
    """Balance the experts by a bias on the scores to choose by, which moves after each step (--bias-rate)."""
    sequence_loss: float = 0.0
    """Factor of a loss that balances the experts within each sequence. 0: none."""
    z_loss: float = 0.0
    """Factor of a loss that keeps the router's logits small. 0: none."""
    experts: str = "swiglu"
    """The expert layer: "swiglu", or your own as "module:Class" (see examples/custom_experts.py)."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections into the residual stream get less, by sqrt(2 layers)."""

    mtp_layers: int = 0
    """How many tokens beyond the next are predicted in training (MTP), each by one more block; docs/model.md."""
    mtp_weight: float = 0.3
    """Factor on the mean loss of those predictions."""

    def __post_init__(self) -> None:
        for name in (
            *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "dense_size"),
            *("expert_size", "num_experts", "experts_per_token", "kv_rank", "rope_dim", "value_dim"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: got {getattr(self, name)}")
        self._check_attention()
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts: got {self.experts_per_token} of {self.num_experts}"
            )
        if self.router_score not in ("softmax", "sigmoid"):
            raise ValueError(f"router_score must be softmax or sigmoid: got {self.router_score!r}")
        RoutingOptions(
            self.experts_per_token, self.router_score, self.expert_groups, self.top_groups
        ).check(self.num_experts)  # fmt: skip
        for name in ("sequence_loss", "z_loss", "mtp_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} cannot be negative: got {getattr(self, name)}; 0 is for none")
        for name in ("init_std", "norm_eps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} cannot be negative: got {getattr(self, name)}")
        if self.num_dense_layers < 0 or self.num_shared_experts < 0:
            raise ValueError("num_dense_layers and num_shared_experts cannot be negative")
        if self.mtp_layers < 0:
            raise ValueError(f"mtp_layers cannot be negative: got {self.mtp_layers}; 0 is for none")
        if self.experts != "swiglu" and not all(self.experts.partition(":")):
            raise ValueError(f'experts must be "swiglu" or "module:Class": got {self.experts!r}')

    def _check_attention(self) -> None:
        if self.attention not in ("gqa", "mla"):
            raise ValueError(f"attention must be gqa or mla: got {self.attention!r}")
        if self.q_rank < 0:
            raise ValueError(f"q_rank cannot be negative: got {self.q_rank}; 0 is for queries without a latent")
        if self.qk_norm not in ("none", "head", "full"):
            raise ValueError(f"qk_norm must be none, head or full: got {self.qk_norm!r}")
        if self.attention == "mla":
            if self.qk_norm != "none":
                raise ValueError(f"mla normalises its latents, and no heads: got qk_norm {self.qk_norm!r}; use none")
            if self.rope_dim % 2:
                raise ValueError(
                    f"rope_dim must be even, as channels turn in pairs: got {self.rope_dim}; use {self.rope_dim + 1}"
                )
            return
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads: got {self.num_heads}, {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even: got {self.head_dim}")

    @property
    def kept(self) -> tuple[int, int, int]:
        """What a key/value cache keeps of a position in a layer: how many tensors, of how many heads, and how wide."""
        if self.attention == "mla":
            return 1, 1, self.kv_rank + self.rope_dim
        return 2, self.num_kv_heads, self.head_dim

    @property
    def residual_std(self) -> float:
        """Initial scale of the projections that write into the residual stream: two in each layer."""
        return self.init_std / (2 * self.num_layers) ** 0.5

    @property
    def mtp_blocks(self) -> range:
        """The blocks beyond the last layer, which predict further ahead."""
        return range(self.num_layers, self.num_layers + self.mtp_layers)

    def is_dense(self, layer: int) -> bool:
        return min(layer, self.num_layers - 1) < self.num_dense_layers  # blocks beyond the last are like the last
