"""Convert between config.json of a published model and `ModelConfig`.

A key that the model cannot express is refused by name: if it were ignored, the loaded model would compute something
else. What is written is read again and compared, so one table serves both directions.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...messages import WANTED, printable, quoted
from ...models import ModelConfig
from ...models.config import BUILT_IN
from ...models.custom_layers import same_layer
from .architectures import ALIASES, ARCHITECTURES, QK_NORMS, REQUIRED, Architecture, JsonKey

_ONLY = {
    "gqa": {"num_kv_heads", "qk_norm", "rotary_fraction"},
    "mla": {"q_rank", "kv_rank", "rope_dim", "value_dim", "latent_norm_eps"},
}
"""Options that only one kind of attention has."""
_OF_TRAINING = {"init_std", "sequence_loss", "z_loss", "mtp_weight", "router_dtype"}
"""Options that the config.json of a published model lacks, or that do not change what its weights mean."""
_LENGTHS, _SHARED_SIZE = "max_position_embeddings", "shared_expert_intermediate_size"
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
_DERIVED = {"num_key_value_heads", "head_dim", "qk_head_dim", _SHARED_SIZE}
"""Keys of config.json that must have the value that would be written, if they are there."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture that config.json names. Raises ValueError if it is not supported."""
    kind = config.get("model_type")
    name = ALIASES.get(str(kind), kind)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        supported = ", ".join([*ARCHITECTURES, *ALIASES])
        raise ValueError(f"model_type {quoted(kind, 60)} is not supported: supported are {supported}")
    return ARCHITECTURES[name]


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json describes. Raises ValueError for what this model cannot express."""
    architecture, config = architecture_of(config), ReadKeys(config)
    options = {**architecture.options}
    for key in architecture.keys:
        options[key.option] = _value(config, key)
    for key, only in architecture.fixed.items():
        if (value := config.get(key, only)) != only:
            raise ValueError(f"{key} {quoted(value, 60)} is not supported: only {quoted(only, 60)}")
    if architecture.options.get("attention") != "mla":
        options["num_kv_heads"] = _number(config, "num_key_value_heads", options["num_heads"])
        options["head_dim"] = _number(config, "head_dim", options["hidden_size"] // max(options["num_heads"], 1))
    if architecture.interleaved:
        is_interleaved(config)
    options |= _read_rope(config, architecture)
    if architecture.lists_dense:
        options |= _read_dense(config, options["num_layers"])
    if architecture.shared == "sized":
        total = _number(config, _SHARED_SIZE)
        options |= {"num_shared_experts": total // max(options["expert_size"], 1), "shared_gate": total > 0}
    if architecture.greedy:
        options |= _read_groups(config, architecture)
    _refuse_windows(config, architecture, options["num_layers"])
    model = ModelConfig(**options)
    written = write_config(model, architecture)
    for key in _DERIVED & written.keys():
        if (value := config.get(key)) not in (None, written[key]):
            raise ValueError(f"{key} {quoted(value, 60)} contradicts other sizes: only {written[key]} is supported")
    config.refuse_others(model)
    return model


def _value(config: Mapping[str, Any], key: JsonKey) -> Any:
    """The option that a key of config.json means."""
    value = config.get(key.key, config.get(key.also, key.default) if key.also else key.default)
    if key.also in config and config.get(key.also) != value:
        raise ValueError(f"{key.key} {quoted(value, 60)} contradicts {key.also} {quoted(config[key.also], 60)}")
    value = key.default if value is None and key.null else value
    if value is REQUIRED or value is None:
        raise ValueError(f"it has no {key.key}")
    if key.values:
        meant = [option for published, option in key.values if published is value]
        if not meant:
            raise ValueError(f"{key.key} {quoted(value, 60)} is not supported")
        return meant[0]
    kind = type(_DEFAULTS[key.option])
    negative = kind is int and type(value) is int and value < 0
    if negative or (type(value) is not kind and not (kind is float and type(value) is int)):
        raise ValueError(f"{key.key} must be {WANTED[kind]}: got {quoted(value, 60)}")
    return value


def find_architecture(model: ModelConfig) -> Architecture:
    """The first architecture that can express the model. Raises ValueError if none can."""
    if model.own_layers:
        field = model.own_layers[0]
        raise ValueError(
            f"published architectures have no layers of your own: this model has {field} "
            f"{quoted(getattr(model, field), 60)}; other runs start from the weights of this one with --weights"
        )
    found = {name: misfits(model, architecture) for name, architecture in ARCHITECTURES.items()}
    if fits := [name for name in found if not found[name]]:
        return ARCHITECTURES[fits[0]]
    nearest = min(found, key=lambda name: len(found[name]))
    raise ValueError(
        f"no published architecture can express this model; the nearest, {nearest}, cannot express "
        f"{'; '.join(found[nearest])}"
    )


def misfits(model: ModelConfig, architecture: Architecture) -> list[str]:
    """The options of `model` that `architecture` cannot express, one message each."""
    try:
        found = different_options(read_config(write_config(model, architecture)), model)
    except ValueError as error:  # the sizes of one kind of attention may not fit the other
        found = [(name, only, getattr(model, name)) for name, only in architecture.options.items()]
        found = [(name, only, got) for name, only, got in found if got != only and name not in _OF_TRAINING]
        if not found:
            return [str(error)]
    return [f"{name} {quoted(got, 60)}, only {quoted(only, 60)}" for name, only, got in found]


def different_options(saved: ModelConfig, model: ModelConfig) -> list[tuple[str, Any, Any]]:
    """The options that differ and change what the weights mean: the name, and the value in each model."""
    was, now = (dataclasses.asdict(canonical(one)) for one in (saved, model))
    return [
        (name, was[name], now[name])
        for name in now
        if name not in _OF_TRAINING
        and was[name] != now[name]
        and not (name in BUILT_IN and same_layer(was[name], now[name]))
    ]


def canonical(model: ModelConfig) -> ModelConfig:
    """An equivalent model: equivalent models get the same options, and options without effect their defaults."""
    dense = [layer for layer in range(model.num_layers) if model.is_dense(layer)]
    first = next((i for i, layer in enumerate([*dense, -1]) if layer != i), 0)
    unused = set().union(*(names for kind, names in _ONLY.items() if kind != model.attention))
    unused |= {"expert_groups", "top_groups", "group_score"} if model.expert_groups == model.top_groups else set()
    unused |= {"dense_size"} if not dense else set()
    kind = _rope_kind(model)
    unused |= {name for name in _DEFAULTS if name.startswith("yarn_")} - {option for _, option, _ in _ROPES[kind]}
    unused |= {"rope_scaling"} if kind == "default" else set()
    return dataclasses.replace(
        model, **{name: _DEFAULTS[name] for name in unused}, num_dense_layers=first, dense_layers=tuple(dense[first:])
    )


# ---- Parts of config.json that need more than one key ----


def _number(config: Mapping[str, Any], key: str, default: Any = REQUIRED) -> int:
    """A whole number, checked like that of the option num_experts."""
    return _value(config, JsonKey(key, "num_experts", default, null=True))


def is_interleaved(config: Mapping[str, Any]) -> bool:
    """Whether a rotation pairs channels (2i, 2i + 1), in an architecture that supports both orders."""
    value = config.get("rope_interleave", True)
    if not isinstance(value, bool | None):  # transformers does not load it, either
        raise ValueError(f"rope_interleave must be true or false: got {quoted(value, 60)}")
    return bool(value)


def published_balance(config: Mapping[str, Any]) -> float:
    """The factor of the auxiliary loss that balanced the experts of a published model; 0 if config.json names none."""
    given = config.get("router_aux_loss_coef", config.get("aux_loss_alpha"))
    return float(given) if type(given) in (int, float) and 0 < given < 1 else 0.0


def _refuse_windows(config: Mapping[str, Any], architecture: Architecture, layers: int) -> None:
    if "use_sliding_window" in architecture.fixed:
        config.get("sliding_window")  # has no effect, because use_sliding_window is false
    kinds = config.get("layer_types")
    others = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else [kinds]
    if kinds is not None and others:
        raise ValueError(f"layer_types with {quoted(others[0], 60)} is not supported: only 'full_attention'")
    if isinstance(kinds, list) and len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")


_FACTOR, _POSITIONS = ("factor", "yarn_factor", REQUIRED), "original_max_position_embeddings"
_ROPES: Mapping[str, tuple[tuple[str, str, Any], ...]] = {
    "default": (),
    "linear": (_FACTOR,),
    "dynamic": (_FACTOR, (_LENGTHS, "yarn_positions", REQUIRED)),
    "llama3": (
        _FACTOR, (_POSITIONS, "yarn_positions", REQUIRED), ("high_freq_factor", "yarn_beta_fast", REQUIRED),
        ("low_freq_factor", "yarn_beta_slow", REQUIRED),
    ),
    "yarn": (
        _FACTOR, (_POSITIONS, "yarn_positions", REQUIRED), ("beta_fast", "yarn_beta_fast", 32.0),
        ("beta_slow", "yarn_beta_slow", 1.0), ("mscale", "yarn_mscale", 0.0),
        ("mscale_all_dim", "yarn_mscale_all_dim", 0.0), ("attention_factor", "yarn_attention_factor", 0.0),
        ("truncate", "yarn_truncate", True),
    ),
}  # fmt: skip
"""The keys of each kind of rotary embedding: the key, the option of `ModelConfig`, and the default."""


def _read_rope(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; older versions and published models `rope_theta` and `rope_scaling`."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    rope = old or new or {}
    if not isinstance(rope, Mapping) or new not in (None, {}, rope):
        raise ValueError(f"rope_parameters and rope_scaling must be one object: got {quoted((new, old), 100)}")
    theta, fraction = (_of_both(rope, config, key) for key in ("rope_theta", "partial_rotary_factor"))
    if theta is None and "rope_theta" in rope:
        raise ValueError("its rotary embedding has no rope_theta")
    options = {"rope_theta": architecture.rope_theta if theta is None else theta}
    if any(key.option == "rotary_fraction" for key in architecture.keys):
        options |= {"rotary_fraction": fraction} if fraction is not None else {}
    elif fraction not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {quoted(fraction, 60)} is not supported for {architecture.model_type}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if "type" in rope and rope["type"] != kind:
        raise ValueError(f"rope_type {quoted(kind, 60)} contradicts type {quoted(rope['type'], 60)}")
    if not isinstance(kind, str) or kind not in _ROPES:
        raise ValueError(f"the rotary embedding {quoted(kind, 60)} is not supported: only {', '.join(_ROPES)}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(key for key, _, _ in _ROPES[kind])}
    if unknown := sorted(key for key in rope if key not in known - {_LENGTHS} and rope[key] is not None):
        raise ValueError(f"{printable(unknown[0], 60)} of the rotary embedding {kind!r} is not supported")
    for key, option, default in _ROPES[kind]:
        value = _of_both(rope, config, key) if key in (_LENGTHS, _POSITIONS) else rope.get(key)
        if value is None and (default is REQUIRED or (key == "truncate" and key in rope)):
            raise ValueError(f"its rotary embedding {kind!r} has no {key}")
        if key == "attention_factor" and value == 0:
            raise ValueError("attention_factor 0 of the rotary embedding 'yarn' is not supported: it must be above 0")
        options[option] = default if value is None else value
    return options | ({} if kind == "default" else {"rope_scaling": kind})


def _rope_kind(model: ModelConfig) -> str:
    """The kind of rotary embedding; "default" if no rotation is slowed or scaled."""
    active = model.yarn_factor != 1 or model.rope_scaling == "dynamic"
    active |= model.rope_scaling == "yarn" and model.yarn_attention_factor > 0
    return model.rope_scaling if active else "default"


def _of_both(rope: Mapping[str, Any], config: Mapping[str, Any], key: str) -> Any:
    """The value of a key that may be in `rope`, in config.json itself, or in both."""
    inner, outer = rope.get(key), config.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"{key} {quoted(outer, 60)} contradicts that of rope_parameters, {quoted(inner, 60)}")
    return outer if inner is None else inner


def _read_dense(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    listed, step = config.get("mlp_only_layers") or [], _number(config, "decoder_sparse_step", 1)
    if not isinstance(listed, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in listed):
        raise ValueError(f"mlp_only_layers must be a list of layers from 0 to {layers - 1}: got {quoted(listed, 60)}")
    if layers > 10_000:  # refused later: this would be a long list
        return {}
    dense = {layer for layer in range(layers) if step == 0 or (layer + 1) % step} | {*listed}
    return {"num_dense_layers": 0, "dense_layers": tuple(sorted(dense))}


def _read_groups(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {quoted(method, 60)} is not supported for {architecture.model_type}")
    default = 0 if method == "greedy" else REQUIRED  # then they have no effect
    groups, top = (_number(config, key, default) for key in ("n_group", "topk_group"))
    return {} if method == "greedy" else {"expert_groups": groups, "top_groups": top, "group_score": "best"}


def write_config(model: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """config.json of `model`, without options that the architecture cannot express (`misfits`)."""
    model = dataclasses.replace(canonical(model), dense_size=model.dense_size)  # has no effect without dense layers
    config: dict[str, Any] = {"architectures": [architecture.class_name], "model_type": architecture.model_type}
    for key in architecture.keys:
        value = getattr(model, key.option)
        config[key.key] = next((published for published, option in key.values if option == value), value)
    config |= architecture.fixed
    if model.attention == "mla":
        config |= {"q_lora_rank": model.q_rank or None, "num_key_value_heads": model.num_heads}
        config |= {"head_dim": model.rope_dim, "qk_head_dim": model.head_dim + model.rope_dim}
    else:
        config |= {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
    config |= {"rope_theta": model.rope_theta, "rope_scaling": None, _LENGTHS: model.yarn_positions}
    if (kind := _rope_kind(model)) != "default":
        values = [(key, getattr(model, option), default) for key, option, default in _ROPES[kind]]
        rope = {key: value for key, value, default in values if value != default or key.startswith("beta")}
        length = rope.pop(_LENGTHS, round(model.yarn_positions * model.yarn_factor))
        config |= {"rope_scaling": {"type": kind, "rope_type": kind, **rope}, _LENGTHS: length}
    if architecture.lists_dense:
        listed = [*range(model.num_dense_layers), *model.dense_layers]
        config |= {"mlp_only_layers": listed, "decoder_sparse_step": 1}
    if architecture.shared == "sized":
        config[_SHARED_SIZE] = model.num_shared_experts * model.expert_size
    if architecture.greedy:
        method = "group_limited_greedy" if model.top_groups < model.expert_groups else "greedy"
        config |= {"n_group": model.expert_groups, "topk_group": model.top_groups, "topk_method": method}
    return config


# ---- Keys that nothing reads ----
#
# Other programs write many keys, and new versions of an architecture add more. A key such as `embedding_multiplier`,
# whose name contains a word for a part of the model, is refused unless its value means "off", or what the
# model computes: `use_qk_norm` of Qwen3-Coder says what its architecture always does.


_PARTS = """
act activation alibi attention attn bias cap capping clip compression conv dense dim dropout embedding expert experts
factor gate group groups head heads hidden index interleave jitter kv layer layers lora mask mlp moe mscale mtp
multiplier mup nextn noise norm position qk qkv quantization rank residual rope rotary routed router scale scaling score
scoring shared sink sinks size sliding softcap softcapping sparse swiglu theta topk v window yarn
"""
_OF_OTHERS = """
output_attentions output_hidden_states output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux ep_size
chunk_size_feed_forward cross_attention_hidden_size add_cross_attention pruned_heads num_beam_groups
attn_implementation experts_implementation max_position_embeddings max_window_layers no_repeat_ngram_size
encoder_no_repeat_ngram_size quantization_config
"""
_WORDS = frozenset(_PARTS.split())
"""Words for what a model computes."""
_HARMLESS = frozenset(_OF_OTHERS.split())
"""Keys with such a word that do not change what the model computes, or that are read elsewhere."""
_FACTORS = {"factor", "multiplier", "scale", "scaling"}
_DTYPES = (("fp32", "float32"), ("torch.float32", "float32"))
_MEANINGS = (
    *(key for architecture in ARCHITECTURES.values() for key in architecture.keys),
    JsonKey("scoring_func", "router_score"), JsonKey("qk_norm", "qk_norm", values=QK_NORMS),
    *(JsonKey(key, "router_dtype", values=_DTYPES) for key in ("router_dtype", "moe_router_dtype")),
)  # fmt: skip
"""Keys with the same meaning in every architecture, though only some read them."""
_EVERY_LAYER = {"decoder_sparse_step", "moe_layer_freq"}
"""1 means that every layer that is not called dense has experts."""


class ReadKeys(dict[str, Any]):
    """The contents of config.json. Remembers which keys were read."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def refuse_others(self, model: ModelConfig) -> None:
        """Raise ValueError for a key that was not read and could say something else than what `model` computes."""
        for key, value in self.items():
            name = key.strip("_")
            words, same = {*name.lower().split("_")}, restates(key, value, model)
            if key in self.read or name in _HARMLESS or not words & _WORDS or same:
                continue
            if is_off(words, value) and not (value is False and same is False):
                continue
            what = f"{printable(key, 60)} {quoted(value, 60)}"
            raise ValueError(f"{what} is unknown for this architecture, and could change what the model computes")


def restates(key: str, value: Any, model: ModelConfig) -> bool | None:
    """Whether a key of another architecture has the value of `model`; None for a key of none."""
    if key in _EVERY_LAYER:
        return value == 1 and value is not True
    known = [(one.values, getattr(model, one.option)) for one in _MEANINGS if key in (one.key, one.also)]
    return all(value == option or (value, option) in values for values, option in known) if known else None


def is_off(words: set[str], value: Any) -> bool:
    """Whether a value changes nothing: null, false and empty, 1 for a factor, and 0 for anything else."""
    if value is None or value is False or value in ("", [], {}):
        return True
    return isinstance(value, int | float) and value is not True and value == (1 if words & _FACTORS else 0)
