"""The published architectures that this model can express: the keys of their config.json, and the names of tensors.

Each architecture is an `Architecture` in a table. config.py uses it to read and write config.json, tensors.py to map
the names of tensors. So a new architecture of the same kind is one more entry of the table.

Sources: config.json and model code of the published models, and the model code of transformers 5.23.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

REQUIRED = object()
"""The default of a key that config.json must have."""


@dataclass(frozen=True, slots=True)
class JsonKey:
    """A key of config.json, the option of `ModelConfig` with the same meaning, and its default in transformers.

    also: another name of the key, which other versions of transformers write. null: whether null means the default.
    values: the value of the key for each value of the option; () if they are the same.
    """

    key: str
    option: str
    default: Any = REQUIRED
    also: str = ""
    null: bool = False
    values: tuple[tuple[Any, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture is written in config.json and named in safetensors files.

    options: options of `ModelConfig` that all its models have. keys: keys with a direct counterpart. fixed: keys of
    which this model supports one value, which is also the default.
    """

    model_type: str
    class_name: str
    options: Mapping[str, Any]
    keys: tuple[JsonKey, ...]
    fixed: Mapping[str, Any]
    lists_dense: bool = False
    """Whether any layers may be dense (mlp_only_layers, decoder_sparse_step)."""
    shared: Literal["none", "counted", "sized"] = "none"
    """Shared experts: none, their number (n_shared_experts), or their total width, with a gate."""
    greedy: bool = False
    """Whether topk_method says if groups of experts count."""
    interleaved: bool = False
    """Whether a rotation pairs channels (2i, 2i + 1), as DeepSeek does, unless rope_interleave is false."""
    mlp: str = "mlp"
    """The name of the part of a layer with the experts."""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The names of the gate, up and down projections of an expert."""
    shared_name: str = "shared_experts"
    rope_theta: float = 10_000.0
    """The default in transformers."""


_COMMON = (
    JsonKey("vocab_size", "vocab_size"), JsonKey("hidden_size", "hidden_size"),
    JsonKey("num_hidden_layers", "num_layers"),
    JsonKey("num_attention_heads", "num_heads"), JsonKey("num_experts_per_tok", "experts_per_token"),
    JsonKey("initializer_range", "init_std", 0.02), JsonKey("tie_word_embeddings", "tied_embeddings", False),
)  # fmt: skip
_EXPERTS = JsonKey("num_experts", "num_experts", also="num_local_experts")
_ROUTED = JsonKey("n_routed_experts", "num_experts", also="num_local_experts")
_NORMALIZE = JsonKey("norm_topk_prob", "normalize_weights", False)
_SIZES = JsonKey("moe_intermediate_size", "expert_size"), JsonKey("intermediate_size", "dense_size")
_EPSILON_6, _EPSILON_5 = (JsonKey("rms_norm_eps", "norm_eps", default) for default in (1e-6, 1e-5))
_LATENT = (
    JsonKey("qk_nope_head_dim", "head_dim"), JsonKey("qk_rope_head_dim", "rope_dim"),
    JsonKey("v_head_dim", "value_dim"), JsonKey("kv_lora_rank", "kv_rank"),
)  # fmt: skip
_MLA = {"attention": "mla", "router_dtype": "float32"}
_BIASES = JsonKey("attention_bias", "qkv_bias", False), JsonKey("attention_bias", "out_bias", False)
_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0, "is_causal": True}
_DEEPSEEK = {**_FIXED, "moe_layer_freq": 1}
_FIRST_DENSE = JsonKey("first_k_dense_replace", "num_dense_layers", 0, null=True)
_SHARED = JsonKey("n_shared_experts", "num_shared_experts")
_MTP = JsonKey("num_nextn_predict_layers", "mtp_layers", 0, null=True)
QK_NORMS = ((False, "none"), (True, "head"), (True, "full"))
"""What use_qk_norm says: only the architecture tells which norm it is."""
_Q_RANK = JsonKey("q_lora_rank", "q_rank", 0, null=True)
_SIGMOID = {"router_score": "sigmoid", "router_bias": True, "router_dtype": "float32", "group_score": "best_two"}

_ALL = (
    Architecture(
        "mixtral", "MixtralForCausalLM", {"num_shared_experts": 0, "num_dense_layers": 0},
        (*_COMMON, _EPSILON_5, JsonKey("num_local_experts", "num_experts", also="num_experts"),
         JsonKey("intermediate_size", "expert_size")),
        {**_FIXED, "sliding_window": None, "router_jitter_noise": 0.0}, mlp="block_sparse_moe",
        matrices=("w1", "w3", "w2"), rope_theta=1e6,
    ),
    Architecture(
        "olmoe", "OlmoeForCausalLM", {"num_shared_experts": 0, "num_dense_layers": 0, "qk_norm": "full"},
        (*_COMMON, *_BIASES, _EPSILON_5, _NORMALIZE, _EXPERTS, JsonKey("intermediate_size", "expert_size")),
        {**_FIXED, "clip_qkv": None},
    ),
    Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", {},
        (*_COMMON, *_SIZES, _EPSILON_6, _NORMALIZE, _EXPERTS,
         JsonKey("qkv_bias", "qkv_bias", True)),
        {**_FIXED, "use_sliding_window": False}, lists_dense=True, shared="sized", shared_name="shared_expert",
    ),
    Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", {"num_shared_experts": 0, "qk_norm": "head"},
        (*_COMMON, *_BIASES, *_SIZES, _EPSILON_6, _NORMALIZE, _EXPERTS),
        {**_FIXED, "use_sliding_window": False}, lists_dense=True,
    ),
    Architecture(
        "deepseek_v2", "DeepseekV2ForCausalLM", {**_MLA, "normalize_weights": False},
        (*_COMMON, *_BIASES, *_SIZES, *_LATENT, _Q_RANK, _EPSILON_6, _FIRST_DENSE, _SHARED,
         JsonKey("n_routed_experts", "num_experts", also="num_experts"),
         JsonKey("routed_scaling_factor", "routed_scale", 1.0)),
        # transformers ignores norm_topk_prob, but DeepSeek's own code does not: they agree only on False.
        # And it ignores rope_interleave: rotations are always interleaved.
        {**_DEEPSEEK, "norm_topk_prob": False, "scoring_func": "softmax", "mlp_bias": False, "rope_interleave": True},
        shared="counted", greedy=True, interleaved=True,
    ),
    Architecture(
        "deepseek_v3", "DeepseekV3ForCausalLM", {**_MLA, **_SIGMOID},
        (*_COMMON, *_BIASES, *_SIZES, *_LATENT, _Q_RANK, _EPSILON_6, _FIRST_DENSE, _SHARED, _MTP, _ROUTED,
         JsonKey("norm_topk_prob", "normalize_weights", True), JsonKey("routed_scaling_factor", "routed_scale", 2.5),
         JsonKey("n_group", "expert_groups"), JsonKey("topk_group", "top_groups")),
        {**_DEEPSEEK, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}, shared="counted", interleaved=True,
    ),
    Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", _SIGMOID,
        (*_COMMON, *_SIZES, _EPSILON_5, _FIRST_DENSE, _SHARED, _MTP, _ROUTED,
         JsonKey("norm_topk_prob", "normalize_weights", True), JsonKey("routed_scaling_factor", "routed_scale", 1.0),
         JsonKey("n_group", "expert_groups", 1), JsonKey("topk_group", "top_groups", 1),
         JsonKey("attention_bias", "qkv_bias", False), JsonKey("partial_rotary_factor", "rotary_fraction", 0.5),
         JsonKey("use_qk_norm", "qk_norm", False, values=QK_NORMS)),
        _FIXED, shared="counted",
    ),
)  # fmt: skip
ARCHITECTURES: Mapping[str, Architecture] = {one.model_type: one for one in _ALL}
"""The architectures by `model_type`. A model is exported as the first one that fits."""
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Other values of `model_type`, of models that are the same as those of an architecture in the table."""
