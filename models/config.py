"""The configuration of a model, and the options with which a stage is built, as frozen values. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from moe_dualpipe.kernels.fp8 import Fp8Recipe
from moe_dualpipe.kernels.options import GroupScore, Kernels, RoutingOptions, validate_kernels
from moe_dualpipe.messages import LARGEST, WANTED, check_range, printable

from .custom_layers import Factory, LayerOptions, name_of, options_text

if TYPE_CHECKING:
    from .context_parallel import Context

Recompute = Literal["none", "norms", "attention", "full"]
"""What a block recomputes in backward instead of saving it; recompute.py describes each."""
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

LayerName = str | Factory
"""A layer by its name, or in Python as a class or function (custom_layers.py)."""

BUILT_IN: dict[str, tuple[str, ...]] = {
    "experts": ("swiglu",), "router": ("topk", "balanced"), "attention": ("gqa", "mla"), "block": ("prenorm",),
}  # fmt: skip
"""The names of the layers that this package has, by the field that selects one."""

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("vocab_size hidden_size num_heads num_kv_heads head_dim kv_rank rope_dim value_dim dense_size expert_size "
     "num_experts experts_per_token expert_groups top_groups", 1, LARGEST),
    ("q_rank num_dense_layers num_shared_experts", 0, LARGEST),
    ("num_layers", 1, 10_000),
    ("mtp_layers", 0, 10_000),
    ("routed_scale", 1e-6, 1e6),
    ("rotary_fraction", 1e-6, 1.0),
    ("yarn_factor", 1.0, 1e6),
    ("yarn_positions", 1, LARGEST),
    ("yarn_beta_fast yarn_beta_slow", 1e-6, 1e6),
    ("yarn_mscale yarn_mscale_all_dim yarn_attention_factor", 0.0, 1e3),
    ("sequence_loss z_loss mtp_weight", 0.0, 1e6),
    ("rope_theta", 1.0, 1e12),
    ("norm_eps latent_norm_eps", 0.0, 1.0),
    ("init_std", 1e-6, 1e3),
)  # fmt: skip
"""Names of fields, with their smallest and largest valid values."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only Mixture-of-Experts transformer. Raises ValueError for invalid or conflicting values."""

    vocab_size: int = 256
    """Number of token ids; 256 for bytes."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of transformer blocks, dense and Mixture-of-Experts."""
    num_dense_layers: int = 1
    """Number of blocks, from the first, with a dense MLP instead of experts."""
    dense_layers: tuple[int, ...] = ()
    """Other blocks with a dense MLP, counted from 0."""
    attention: LayerName = "gqa"
    """Attention. gqa: grouped-query attention. mla: multi-head latent attention, as in DeepSeek-V2 and V3.
    Or your own: FILE.py:CLASS or MODULE:CLASS (docs/custom_layers.md)."""
    attention_options: LayerOptions = ""
    """Options of your own attention, such as window=128."""
    num_heads: int = 4
    """Number of query heads."""
    num_kv_heads: int = 2
    """gqa: number of key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int = 32
    """Width of one head. gqa: must be even, for the rotary embedding. mla: width of the part that is not rotated."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """gqa: RMSNorm of queries and keys before rotation, over each head (head) or over all heads together (full)."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values. mla: to their latents."""
    out_bias: bool = False
    """Add a bias to the output of attention."""
    rotary_fraction: float = 1.0
    """gqa: fraction of the channels of each head that are rotated: the first ones."""
    q_rank: int = 0
    """mla: width of the latent of queries. 0: queries are projected from the hidden state."""
    kv_rank: int = 64
    """mla: width of the latent of keys and values, which the cache stores."""
    rope_dim: int = 16
    """mla: width of the rotated part of queries and keys; must be even. All heads share the rotated key."""
    value_dim: int = 32
    """mla: width of the values of one head."""
    latent_norm_eps: float = 1e-6
    """mla: epsilon of the RMSNorm of latents."""
    dense_size: int = 384
    """Inner width of a dense MLP."""
    expert_size: int = 128
    """Inner width of one expert."""
    num_experts: int = 8
    """Routed experts in each Mixture-of-Experts block."""
    experts_per_token: int = 2
    """Number of routed experts for each token (top-k)."""
    num_shared_experts: int = 1
    """Number of shared experts, which process every token."""
    shared_gate: bool = False
    """Multiply the output of the shared experts by the sigmoid of a linear function of the token."""
    router: LayerName = "topk"
    """Router. topk: the experts with the highest scores. balanced: all experts equally often, for measurements.
    Or your own: FILE.py:CLASS or MODULE:CLASS."""
    router_options: LayerOptions = ""
    """Options of your own router."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to scores."""
    router_dtype: Literal["model", "float32"] = "model"
    """The dtype in which router logits are computed; "model": the dtype of the model. Scores are always float32."""
    expert_groups: int = 1
    """Number of groups of consecutive experts. A token's experts come from its best top_groups groups."""
    top_groups: int = 1
    """Number of groups that a token's experts come from."""
    group_score: GroupScore = "best_two"
    """Score of a group: the sum of its two best scores, as in DeepSeek-V3, or its best score, as in DeepSeek-V2."""
    normalize_weights: bool = True
    """Scale the routing weights of a token to sum to routed_scale."""
    routed_scale: float = 1.0
    """Factor on the routing weights."""
    router_bias: bool = False
    """Balance experts with a bias per expert, which affects only the choice; it moves by bias_rate each step."""
    sequence_loss: float = 0.0
    """Factor of the sequence-wise loss that balances experts. 0: off."""
    z_loss: float = 0.0
    """Factor of the loss that keeps router logits small. 0: off."""
    experts: LayerName = "swiglu"
    """Expert layer. swiglu: SwiGLU experts. Or your own: FILE.py:CLASS or MODULE:CLASS."""
    expert_options: LayerOptions = ""
    """Options of your own expert layer, such as rank=8."""
    block: LayerName = "prenorm"
    """Transformer block. prenorm: attention, then an MLP or experts, each after a norm.
    Or your own: FILE.py:CLASS or MODULE:CLASS."""
    block_options: LayerOptions = ""
    """Options of your own block."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding."""
    rope_scaling: Literal["yarn", "llama3", "linear", "dynamic"] = "yarn"
    """How rotations are slowed for contexts longer than in pre-training (rotary.py)."""
    yarn_factor: float = 1.0
    """Length of the context divided by yarn_positions. 1: rotations are not slowed."""
    yarn_positions: int = 4096
    """Context length of pre-training."""
    yarn_beta_fast: float = 32.0
    """yarn, llama3: channels with more rotations than this in pre-training keep their frequency."""
    yarn_beta_slow: float = 1.0
    """yarn, llama3: channels with fewer rotations than this have their frequency divided by yarn_factor."""
    yarn_truncate: bool = True
    """YaRN: round the indices of these channels outward."""
    yarn_attention_factor: float = 0.0
    """YaRN: factor on rotated queries and keys. 0: it grows with yarn_factor, by yarn_mscale."""
    yarn_mscale: float = 0.0
    """YaRN: factor on the growth of queries and keys with yarn_factor. 0: 1, unless yarn_mscale_all_dim is set."""
    yarn_mscale_all_dim: float = 0.0
    """YaRN, mla: how much all attention scores grow with yarn_factor. 0: not at all."""
    tied_embeddings: bool = False
    """Use the weight of the embedding as the weight of the head."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights; divided by sqrt(2 layers) for projections into the residual stream."""
    mtp_layers: int = 0
    """Multi-token prediction (MTP): number of tokens after the next one to predict in training, with one block each."""
    mtp_weight: float = 0.3
    """Factor of the mean MTP loss."""

    def __post_init__(self) -> None:
        for field in fields(self):
            kinds, value = {int: (int,), float: (int, float), bool: (bool,)}.get(field.type), getattr(self, field.name)
            if kinds and type(value) not in kinds:
                raise ValueError(f"{field.name} must be {WANTED[kinds[-1]]}: got {printable(repr(value), 60)}")
        for names, low, high in _RANGES:
            for name in names.split():
                check_range(name, getattr(self, name), low, high)
        for name, choices in (
            ("qk_norm", "none, head or full"), ("router_score", "softmax or sigmoid"),
            ("router_dtype", "model or float32"), ("group_score", "best_two or best"),
            ("rope_scaling", "yarn, llama3, linear or dynamic"),
        ):  # fmt: skip
            if getattr(self, name) not in choices.replace(" or", ",").split(", "):
                raise ValueError(f"{name} must be {choices}: got {getattr(self, name)!r}")
        self._name_layers()
        self._check_attention()
        self._check_dense_layers()
        if self.yarn_factor > 1 and self.rope_theta == 1:
            raise ValueError("yarn_factor needs a rope_theta above 1: got 1")
        if self.rope_scaling == "dynamic" and (self.rope_dim if self.attention == "mla" else self.rotary_dim) < 4:
            raise ValueError("rope_scaling dynamic needs at least 4 rotated channels: use another one, or wider heads")
        if self.yarn_beta_fast < self.yarn_beta_slow:
            betas = f"{self.yarn_beta_fast} and {self.yarn_beta_slow}"
            raise ValueError(f"yarn_beta_fast must be at least yarn_beta_slow: got {betas}")
        if self.shared_gate and not self.num_shared_experts:
            raise ValueError("shared_gate needs shared experts: use num_shared_experts of at least 1, or no gate")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts: got {self.experts_per_token} of {self.num_experts}"
            )
        routing = RoutingOptions(self.experts_per_token, self.router_score, self.expert_groups, self.top_groups)
        routing.check(self.num_experts)

    def _name_layers(self) -> None:
        """Replace classes by their names, and options by their text."""
        for field, built_in in BUILT_IN.items():
            name = name_of(getattr(self, field))
            if name not in built_in and not all(name.rpartition(":")):
                choices = f"{', '.join(built_in)}, FILE.py:CLASS or MODULE:CLASS"
                raise ValueError(f"{field} must be one of {choices}: got {printable(name, 60)!r}")
            options = options_text(getattr(self, options_field(field)))
            if options and name in built_in:
                raise ValueError(f"{options_field(field)} need your own {field}: got {options!r} with {name}")
            object.__setattr__(self, field, name)
            object.__setattr__(self, options_field(field), options)

    def _check_attention(self) -> None:
        if self.attention == "mla":
            if self.qk_norm != "none":
                raise ValueError(f"qk_norm is only for gqa attention: got {self.qk_norm!r} with mla; use none")
            if self.rope_dim % 2:
                raise ValueError(f"rope_dim must be even: got {self.rope_dim}; use {self.rope_dim + 1}")
        if self.attention != "gqa":
            return
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads: got {self.num_heads}, {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even: got {self.head_dim}")
        if not self.rotary_dim or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_fraction must select an even number of channels: got {self.rotary_fraction} of {self.head_dim}"
            )

    def _check_dense_layers(self) -> None:
        given = self.dense_layers
        if not isinstance(given, Sequence) or any(type(layer) is not int for layer in given):
            raise ValueError(f"dense_layers must be a list of whole numbers: got {printable(repr(given), 60)}")
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        for layer in self.dense_layers:
            if not 0 <= layer < self.num_layers:
                raise ValueError(f"dense_layers must be from 0 to {self.num_layers - 1}: got {layer}")

    @property
    def rotary_dim(self) -> int:
        """The number of rotated channels of a head of gqa."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def last_stage_embeds(self) -> bool:
        """Whether the last pipeline stage needs the embedding, too: for the head, or for multi-token prediction."""
        return self.tied_embeddings or self.mtp_layers > 0

    @property
    def own_layers(self) -> tuple[str, ...]:
        """The fields that select a custom layer, such as "experts"."""
        return tuple(field for field, built_in in BUILT_IN.items() if getattr(self, field) not in built_in)

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of projections into the residual stream: there are two in each layer."""
        return self.init_std / (2 * self.num_layers) ** 0.5

    @property
    def mtp_blocks(self) -> range:
        """The blocks of multi-token prediction, which follow the last layer."""
        return range(self.num_layers, self.num_layers + self.mtp_layers)

    def is_dense(self, layer: int) -> bool:
        layer = min(layer, self.num_layers - 1)  # MTP blocks are like the last layer
        return layer < self.num_dense_layers or layer in self.dense_layers

    def routed_blocks(self) -> list[int]:
        """The blocks with experts, in order, those of multi-token prediction included."""
        return [block for block in range(self.mtp_blocks.stop) if not self.is_dense(block)]


def options_field(field: str) -> str:
    """The field with the options of a layer: "experts" -> "expert_options"."""
    return f"{field.removesuffix('s')}_options"


LORA_TARGETS = "attention", "experts", "dense", "shared", "router"


@dataclass(frozen=True, slots=True)
class LoRA:
    """Low-rank adapters (lora.py): small matrices that are trained beside the frozen weights of a model."""

    rank: int = 0
    """Rank of the adapters (LoRA): train two small matrices beside each matrix, and freeze everything else. 0: off."""
    alpha: float | None = None
    """Adapters are scaled by alpha / rank. None: twice the rank."""
    dropout: float = 0.0
    """Probability that an input of an adapter is zero in training."""
    targets: tuple[str, ...] = ()
    """Layers with adapters: attention, experts, dense, shared (experts), router.
    Empty: all kinds that the model has, except routers."""
    adapter: str | None = None
    """Start from the adapter in this folder, in PEFT's format. It says rank, alpha and targets."""
    export: Literal["merged", "adapter"] = "merged"
    """What --export writes: the model with its adapters merged into the weights, or only the adapters, for PEFT."""

    @property
    def scale(self) -> float:
        return (2.0 * self.rank if self.alpha is None else self.alpha) / self.rank


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How a stage is initialized and computed. Raises ValueError for invalid values."""

    seed: int = 0
    """Seed of the initial weights."""
    recompute: Recompute = "none"
    """What a block recomputes in backward instead of saving it (recompute.py)."""
    kernels: Kernels = "auto"
    """Triton kernels or plain torch (kernels/backend.py)."""
    fused_loss: bool = False
    """Compute head and loss together in blocks of tokens, without storing all logits (kernels/cross_entropy.py)."""
    num_sms: int | None = None
    """Maximum number of multiprocessors for the products of the experts in Triton, which leaves the others to
    communication. None: all."""
    compiled: bool = False
    """Fuse norms, sums, rotations and activations with torch.compile, in training only (kernels/fuse.py)."""
    context: "Context | None" = None
    """The ranks that share each sequence (context_parallel.py). None: this rank has all positions."""
    lora: LoRA | None = None
    """Low-rank adapters to train, beside frozen weights (lora.py). None: train the weights."""
    fp8: Fp8Recipe | None = None
    """How the experts round the operands of their products to 8 bits (kernels/fp8.py). None: not at all."""

    def __post_init__(self) -> None:
        if self.num_sms is not None and self.num_sms < 1:
            raise ValueError(f"num_sms must be at least 1, or None for all: got {self.num_sms}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}: got {self.recompute!r}")
        validate_kernels(self.kernels)


DEFAULT_OPTIONS = StageOptions()
