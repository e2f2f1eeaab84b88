"""Read the shape of a model: a preset, a published model by its name, or any config.json of Hugging Face.

A family that this project can train is read as for its weights (checkpoint/huggingface). Other published
configurations name the same sizes in many ways. The table `_KEYS` has the names of each size, so that models
of unknown architectures can be read too, as long as their names are known. Short tables list what configurations leave
out, because it follows from `model_type`: MLPs that are not gated, tied embeddings, which layers have windows.

models.json has the published models that are not presets, in the same form as a config.json.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ...checkpoint.huggingface import read_config
from ...checkpoint.huggingface.architectures import ALIASES, ARCHITECTURES
from ...data import strict_json
from ...messages import printable, quoted, unknown_name
from ...models import PRESETS
from ...models.costs import shape_of
from ...models.shape import Attention, Layer, ModelShape

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
    "first_dense": "first_k_dense_replace moe_layer_start_index num_dense_layers",
}
"""The names of each size in configurations. The first that is there counts."""

_UNGATED = {
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2",
    "nemotron", "arcee", "apertus", "biogpt", "codegen", "jais2", "nanochat", "persimmon",
}  # fmt: skip
"""Architectures whose MLP has two matrices."""
_BIASED = {"gpt2", "gpt_neo", "gpt_neox", "gpt_bigcode", "opt", "bloom", "phi", "starcoder2", "biogpt", "persimmon"}
"""Architectures with biases in all projections, and LayerNorm, whose parameters are two rows."""
_QKV_BIASED = {"qwen2"}
"""Architectures with biases of queries, keys and values, unless `attention_bias` says so."""
_LEARNED = {"gpt2", "gpt_neo", "gpt_bigcode", "opt"}
"""Architectures with a table of positions."""
_TIED = {
    "gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "gemma", "gemma2", "gemma3", "gemma3_text",
    "cohere", "cohere2", "starcoder2",
}  # fmt: skip
"""Architectures whose embeddings are tied unless the configuration says otherwise."""
_WINDOW_PATTERN = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}
"""Every how many layers one attends to all positions, unless the configuration says so."""
_MORE_NORMS = {"gemma2": 4, "gemma3": 4, "gemma3_text": 4}
"""Norms of a block, if not two."""
_HEAD_NORMS = {"qwen3", "gemma3", "gemma3_text", "hunyuan_v1_dense", "hunyuan_v1_moe"}
_JOINT_NORMS = {"olmo2", "olmo3", "flex_olmo", "minimax_m2"}
"""Architectures that normalize the queries and keys of each head, and of all heads together."""
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
    keys = _Keys(config)
    kind = keys.text("model_type")
    if kind in (*ARCHITECTURES, *ALIASES):
        return shape_of(read_config(config), name)
    for key, layers in _UNKNOWN_LAYERS.items():
        if keys.found(key) or kind == key:
            raise ValueError(f"{key} says that the model has {layers}, which the planner does not support")
    hidden, num_layers = keys.size("hidden"), keys.size("num_layers", most=10_000)
    windows = _windows(keys, num_layers)
    experts = _expert_layers(keys, num_layers) if keys.size("experts", 0) > 1 else set()
    attention = {window: _attention(keys, hidden, window) for window in {*windows}}
    layers = []
    for index in range(num_layers):
        sizes: dict[str, Any] = _expert_sizes(keys) if index in experts else {"dense_size": _dense_size(keys, hidden)}
        layer = Layer(attention[windows[index]], gated=kind not in _UNGATED, **sizes)
        layers.append(replace(layer, other=_other_parameters(keys, layer, hidden)))
    tied = keys.flag("tie_word_embeddings", kind in _TIED)
    positions = keys.size("positions") if kind in _LEARNED else 0
    final = hidden * (1 + (kind in _BIASED))
    return ModelShape(name, hidden, keys.size("vocab"), tuple(layers), tied, keys.size("mtp", 0), positions, final)


def _other_parameters(keys: "_Keys", layer: Layer, hidden: int) -> int:
    """Parameters of a block outside of matrices."""
    kind = keys.text("model_type")
    other = hidden * _MORE_NORMS.get(kind, 2) + _query_norms(kind, layer.attention)
    if kind in _BIASED:
        return 2 * other + sum(product.outputs for product in layer.products(hidden))
    if keys.flag("attention_bias") or keys.flag("qkv_bias") or kind in _QKV_BIASED:
        other += sum(p.outputs for p in layer.attention_products(hidden) if p.name == "qkv")
    return other


class _Keys:
    """The keys of a configuration, those of the objects in it included: `text_config`, `attn_config`, `ffn_config`."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = dict(config)
        for part in ("text_config", "llm_config", "language_config", "attn_config", "ffn_config"):
            if isinstance(inner := config.get(part), Mapping):
                kind = inner.get("model_type") if part == "text_config" else None
                self.config |= {**inner, "model_type": kind or self.config.get("model_type")}

    def found(self, key: str) -> Any:
        """The value of one key; None if it is missing, null, false or empty."""
        return self.config.get(key) or None

    def text(self, key: str) -> str:
        value = self.config.get(key)
        return value if isinstance(value, str) else ""

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def numbers(self, key: str) -> list[Any]:
        """The list of numbers or names under `key`; [] if there is none. Raises ValueError for other entries."""
        value = self.config.get(key)
        found = value if isinstance(value, list) else []
        if not all(isinstance(one, int | str) for one in found):
            raise ValueError(f"{key} must be a list of numbers or names: got {quoted(value, 60)}")
        return found

    def size(self, what: str, default: int | None = None, most: int = 2**31) -> int:
        """A size by any of its names. Raises ValueError if it is missing and has no default.

        A size of 0 is allowed if 0 is the default.
        """
        names = _KEYS[what].split()
        for name in names:
            value = self.config.get(name)
            if isinstance(value, list) and all(type(one) is int for one in value):
                value = max(value, default=None)  # one per layer
            if value is None or isinstance(value, bool):
                continue
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(f"{name} must be a whole number of at most {most:,}: got {quoted(value, 60)}")
            if not value and default != 0:
                raise ValueError(f"{name} must be at least 1: got 0")
            return value
        if default is None:
            also = f" (also called {', '.join(names[1:])})" if names[1:] else ""
            raise ValueError(f"it has no {names[0]}{also}")
        return default


def _attention(keys: _Keys, hidden: int, window: int) -> Attention:
    heads = keys.size("heads")
    width = keys.size("head_dim", 0) or hidden // heads
    if not width:
        raise ValueError(f"it has no head_dim, and hidden_size {hidden} is less than {heads} attention heads")
    shared = keys.flag("multi_query") and not keys.flag("new_decoder_architecture")  # one head of keys for all queries
    kv_heads = 1 if shared else keys.size("kv_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads are not a multiple of {kv_heads} heads of keys and values")
    return Attention("gqa", heads, kv_heads, width, width, window=window)


def _query_norms(kind: str, attention: Attention) -> int:
    """Parameters of the norms of queries and keys."""
    if kind in _JOINT_NORMS:
        return (attention.heads + attention.kv_heads) * attention.qk_dim
    return 2 * attention.qk_dim * (kind in _HEAD_NORMS)


def _windows(keys: _Keys, num_layers: int) -> list[int]:
    """The window of each layer. Chunks of positions count as windows of their length, which is an upper bound."""
    window, kinds = keys.size("window", 0), keys.numbers("layer_types")
    if unknown := {*kinds} - {"full_attention", "sliding_attention", "chunked_attention", "attention"}:
        raise ValueError(f"layer_types has {quoted(min(map(str, unknown)), 60)}, which the planner does not support")
    if not all(keys.numbers("attn_type_list")):
        raise ValueError("attn_type_list has linear attention (0), which the planner does not support")
    if not window or not keys.flag("use_sliding_window", True):
        return [0] * num_layers
    if kinds and len(kinds) == num_layers:
        return [window * (kind in ("sliding_attention", "chunked_attention")) for kind in kinds]
    if without_rope := keys.numbers("no_rope_layers"):  # these attend to all positions, the others in chunks
        return [window * bool(flag) for flag in without_rope] + [window] * (num_layers - len(without_rope))
    pattern = keys.config.get("sliding_window_pattern") or _WINDOW_PATTERN.get(keys.text("model_type"))
    if type(pattern) is int:
        return [window * ((index + 1) % pattern != 0) for index in range(num_layers)]
    return [window] * num_layers


def _expert_layers(keys: _Keys, num_layers: int) -> set[int]:
    """The layers with experts."""
    if listed := keys.numbers("moe_layers"):
        return {*listed}
    if len(kinds := keys.numbers("mlp_layer_types")) == num_layers:
        return {index for index, kind in enumerate(kinds) if kind != "dense"}
    if len(frequency := keys.numbers("moe_layer_freq")) == num_layers:
        return {index for index, routed in enumerate(frequency) if routed}
    dense, first = {*keys.numbers("mlp_only_layers")}, keys.size("first_dense", 0)
    end = keys.config.get("moe_layer_end_index")
    end = num_layers - 1 if type(end) is not int or end < 0 else end
    names = "moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"
    every = next((step for name in names if type(step := keys.config.get(name)) is int and step > 0), 1)
    return {index for index in range(first, end + 1) if (index + 1) % every == 0 and index not in dense}


def _dense_size(keys: _Keys, hidden: int) -> int:
    default = 4 * hidden if keys.text("model_type") in _UNGATED else None
    return keys.size("dense_size", default)


def _expert_sizes(keys: _Keys) -> dict[str, Any]:
    size, shared = keys.size("expert_size"), keys.size("shared", 0)
    if keys.text("model_type").startswith("llama4"):
        shared = 1
    shared_size = keys.size("shared_size", 0) or shared * size
    experts, top_k = keys.size("experts"), keys.size("top_k")
    if not 1 <= top_k <= experts:
        raise ValueError(f"a token must use 1 to {experts} experts: got {top_k}")
    return {"experts": experts, "top_k": top_k, "expert_size": size, "shared_size": shared_size}
