"""Read the shape of a model: a preset, a published model by its name, or a config.json of Hugging Face.

A family that this project can train is read as for its weights (checkpoint/huggingface). In other families, each size
may have any of its usual names (`_KEYS`). Norms and biases are counted as two norms of a block: together, they are less
than 0.1% of the parameters.

models.json has the published models that are not presets, in the same form as a config.json.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...checkpoint.huggingface import read_config
from ...checkpoint.huggingface.architectures import ALIASES, ARCHITECTURES
from ...data import strict_json
from ...messages import printable, quoted, unknown_name
from ...models import PRESETS
from ...models.costs import shape_of
from ...models.shape import AttentionShape, LayerShape, ModelShape

_KEYS = {
    "hidden": "hidden_size n_embd d_model model_dim",
    "num_layers": "num_hidden_layers n_layer n_layers num_layers",
    "vocab": "vocab_size padded_vocab_size",
    "heads": "num_attention_heads n_head n_heads num_heads",
    "kv_heads": "num_key_value_heads num_kv_heads kv_n_heads num_query_groups multi_query_group_num",
    "head_dim": "head_dim attention_head_dim kv_channels",
    "dense_size": "intermediate_size_mlp dense_intermediate_size intermediate_size n_inner ffn_hidden_size ffn_dim",
    "experts": "n_routed_experts num_local_experts num_experts moe_num_experts num_routed_experts n_experts",
    "top_k": "num_experts_per_tok experts_per_token num_experts_per_token moe_topk moe_top_k moe_k top_k",
    "expert_size": "moe_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size intermediate_size ffn_hidden_size",
    "shared": "n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert",
    "shared_size": "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
    "window": "sliding_window attention_chunk_size",
    "mtp": "num_nextn_predict_layers num_mtp_modules",
    "positions": "n_positions max_position_embeddings",
    "every": "decoder_sparse_step interleave_moe_layer_step moe_layer_interval",
    "first_dense": "first_k_dense_replace moe_layer_start_index num_dense_layers",
}
"""The names of each size in configurations. The first one present counts."""

_UNGATED = {
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2",
    "nemotron", "arcee", "apertus", "biogpt", "codegen", "jais2", "nanochat", "persimmon",
}  # fmt: skip
"""Architectures whose MLP has two matrices."""
_LEARNED = {"gpt2", "gpt_neo", "gpt_bigcode", "opt"}
"""Architectures with a table of positions."""
_TIED = {
    "gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "gemma", "gemma2", "gemma3", "gemma3_text",
    "cohere", "cohere2", "starcoder2",
}  # fmt: skip
"""Architectures whose embeddings are tied unless the configuration says otherwise."""
_WINDOW_PATTERN = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}
"""One layer in this many attends to all positions, unless the configuration says otherwise."""
_EXPERT_BIAS = {"gpt_oss"}
"""Architectures whose experts have biases."""
_UNKNOWN_LAYERS = {
    "hybrid_override_pattern": "Mamba layers", "mamba_d_state": "Mamba layers", "ssm_cfg": "Mamba layers",
    "rwkv_version": "RWKV layers", "is_encoder_decoder": "an encoder", "linear_num_value_heads": "linear attention",
    "zero_expert_num": "experts that compute nothing", "hidden_size_per_layer_input": "inputs to each layer",
    "linear_attn_config": "linear attention", "index_topk": "sparse attention", "lru_width": "recurrent layers",
    "conv_L_cache": "convolutions", "cross_attention_layers": "cross-attention", "jetmoe": "experts in attention",
    "kv_lora_rank": "latent attention", "doge": "masks that depend on the values",
}  # fmt: skip
"""Keys of models, or architectures, with layers that a shape cannot describe."""


def read_shape(name_or_path: str | Path) -> ModelShape:
    """The shape of a preset, a published model, or the model of a config.json or of a folder with one.

    Raises ValueError for an unknown name, with the nearest one, and for a configuration that lacks a size.
    """
    name, path = str(name_or_path), Path(name_or_path)
    if (known := name.lower()) in PRESETS:
        return shape_of(PRESETS[known], known)
    if known in published_models():
        return shape_of_config(published_models()[known], known)
    file = path / "config.json" if path.is_dir() else path
    if not name or not file.is_file():
        hint = "give a config.json, or a local folder with one (hf download)"
        if (name and path.is_dir()) or path.suffix == ".json" or "/" in name:
            raise ValueError(f"cannot read {printable(file)}: there is no such file; {hint}")
        raise ValueError(f"{unknown_name('model', name, [*PRESETS, *published_models()])}; or {hint}")
    config = strict_json.read_named(file)
    try:
        if not isinstance(config, dict):
            raise ValueError("it must be a JSON object, like every config.json")
        return shape_of_config(config, file.resolve().parent.name if file.name == "config.json" else file.stem)
    except ValueError as error:
        raise ValueError(f"cannot read {printable(file)}: {error}") from None


@cache
def published_models() -> dict[str, dict[str, Any]]:
    """The configurations in models.json, by name."""
    return strict_json.read_file(Path(__file__).parent / "models.json")


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that the keys of a config.json describe. Raises ValueError for a size that is missing or not known."""
    keys = dict(config)
    for part in ("text_config", "llm_config", "language_config", "attn_config", "ffn_config"):
        inner = value if isinstance(value := config.get(part), Mapping) else {}
        kind = part == "text_config" and inner.get("model_type")
        keys |= {**inner, "model_type": kind or keys.get("model_type")}
    kind = keys.get("model_type")
    if kind in (*ARCHITECTURES, *ALIASES):
        return shape_of(read_config(config), name)
    for key, layers in _UNKNOWN_LAYERS.items():
        if keys.get(key) or kind == key:
            raise ValueError(f"{key} says that the model has {layers}, which the planner does not support")
    hidden, num_layers = _size(keys, "hidden"), _size(keys, "num_layers", most=10_000)
    routed = _expert_layers(keys, num_layers) if _size(keys, "experts", 0) > 1 else set()
    inner = 4 * hidden if kind in _UNGATED else None
    layers = []
    for index, window in enumerate(_windows(keys, num_layers)):
        sizes: dict[str, Any] = (
            _expert_sizes(keys) if index in routed else {"dense_size": _size(keys, "dense_size", inner)}
        )
        layers.append(
            LayerShape(_attention(keys, hidden, window), gated=kind not in _UNGATED, other=2 * hidden, **sizes)
        )
    tied = keys.get("tie_word_embeddings")
    tied = kind in _TIED if tied is None else bool(tied)
    positions = _size(keys, "positions") if kind in _LEARNED else 0
    return ModelShape(name, hidden, _size(keys, "vocab"), tuple(layers), tied, _size(keys, "mtp", 0), positions, hidden)


def _size(keys: Mapping[str, Any], what: str, default: int | None = None, most: int = 2**31) -> int:
    """A size by any of its names. Raises ValueError if it is missing and has no default. 0 is allowed if 0 is the
    default."""
    names = _KEYS[what].split()
    for name in names:
        value = keys.get(name)
        if isinstance(value, list) and all(type(one) is int for one in value):
            value = max(value, default=None)  # one per layer
        if value is None or isinstance(value, bool):
            continue
        if type(value) is not int or not (default != 0) <= value <= most:
            raise ValueError(f"{name} must be a whole number from 1 to {most:,}: got {quoted(value, 60)}")
        return value
    if default is None:
        also = f" (also called {', '.join(names[1:])})" if names[1:] else ""
        raise ValueError(f"it has no {names[0]}{also}")
    return default


def _list(keys: Mapping[str, Any], key: str, entries: int | None = None) -> list[Any]:
    """The list of numbers or names under `key`; [] if there is none. Raises ValueError for other entries.

    entries: how many it must have.
    """
    found = value if isinstance(value := keys.get(key), list) else []
    if not all(isinstance(one, int | str) for one in found):
        raise ValueError(f"{key} must be a list of numbers or names: got {quoted(value, 60)}")
    if found and entries not in (None, len(found)):
        raise ValueError(f"{key} has {len(found)} entries for {entries} layers")
    return found


def _attention(keys: Mapping[str, Any], hidden: int, window: int) -> AttentionShape:
    heads = _size(keys, "heads")
    width = _size(keys, "head_dim", 0) or hidden // heads
    if not width:
        raise ValueError(f"it has no head_dim, and hidden_size {hidden} is less than {heads} attention heads")
    shared = keys.get("multi_query") and not keys.get("new_decoder_architecture")
    kv_heads = 1 if shared else _size(keys, "kv_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads are not a multiple of {kv_heads} heads of keys and values")
    return AttentionShape("gqa", heads, kv_heads, width, width, window=window)


def _windows(keys: Mapping[str, Any], num_layers: int) -> list[int]:
    """The window of each layer. Chunks of positions count as windows of their length, which is an upper bound."""
    window, kinds = _size(keys, "window", 0), _list(keys, "layer_types", num_layers)
    if unknown := {*kinds} - {"full_attention", "sliding_attention", "chunked_attention", "attention"}:
        raise ValueError(f"layer_types has {quoted(min(map(str, unknown)), 60)}, which the planner does not support")
    if keys.get("use_sliding_window") is False:
        window = 0
    pattern = keys.get("sliding_window_pattern") or _WINDOW_PATTERN.get(keys.get("model_type") or "")
    if kinds:
        return [window * (kind in ("sliding_attention", "chunked_attention")) for kind in kinds]
    return [window * (type(pattern) is not int or (index + 1) % pattern != 0) for index in range(num_layers)]


def _expert_layers(keys: Mapping[str, Any], num_layers: int) -> set[int]:
    if listed := _list(keys, "moe_layers"):
        return {*listed}
    if kinds := _list(keys, "mlp_layer_types", num_layers) or _list(keys, "moe_layer_freq", num_layers):
        return {index for index, kind in enumerate(kinds) if kind not in (0, "dense")}
    first, every, dense = _size(keys, "first_dense", 0), _size(keys, "every", 1), _list(keys, "mlp_only_layers")
    return {index for index in range(first, num_layers) if (index + 1) % every == 0 and index not in dense}


def _expert_sizes(keys: Mapping[str, Any]) -> dict[str, Any]:
    size, experts, top_k = (_size(keys, name) for name in ("expert_size", "experts", "top_k"))
    every = str(keys.get("model_type")).startswith("llama4")  # has one shared expert that no key mentions
    shared = _size(keys, "shared_size", 0) or _size(keys, "shared", 1 if every else 0) * size
    if not 1 <= top_k <= experts:
        raise ValueError(f"a token must use 1 to {experts} experts: got {top_k}")
    biased = keys.get("model_type") in _EXPERT_BIAS
    return {"experts": experts, "top_k": top_k, "expert_size": size, "shared_size": shared, "expert_bias": biased}
