"""Small random models of transformers, of every architecture that can be imported, with awkward sizes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

transformers.utils.logging.disable_progress_bar()

_COMMON: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "num_experts_per_tok": 2,
    "initializer_range": 0.3, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "attn_implementation": "sdpa", "experts_implementation": "eager",
}  # fmt: skip
_MLA = {
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 5, "kv_lora_rank": 6, "num_key_value_heads": 3,
    "moe_intermediate_size": 9, "intermediate_size": 13, "first_k_dense_replace": 1,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4,
    "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": {}, "linear": {"factor": 3.0}, "dynamic": {"factor": 2.5},
    "llama3": {
        "factor": 6.0, "original_max_position_embeddings": 40, "low_freq_factor": 0.8, "high_freq_factor": 5.0,
    },
    "yarn": {
        "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4, "beta_slow": 0.9, "truncate": False,
        "attention_factor": 0.7,
    },
}  # fmt: skip
"""A value of `rope_parameters` for each kind of rotary embedding, without rope_type and rope_theta."""


def rope(kind: str, **changes: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **ROPES[kind], **changes}


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {
        "num_local_experts": 4, "intermediate_size": 11, "num_key_value_heads": 1, "head_dim": 8,
    }),
    "olmoe": ("Olmoe", {"num_experts": 5, "intermediate_size": 11, "num_key_value_heads": 3, "rms_norm_eps": 1e-3}),
    "qwen2_moe": ("Qwen2Moe", {
        "num_experts": 5, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 14, "intermediate_size": 13,
        "num_key_value_heads": 1, "mlp_only_layers": [1], "tie_word_embeddings": True,
    }),
    "qwen3_moe": ("Qwen3Moe", {
        "num_experts": 6, "moe_intermediate_size": 7, "intermediate_size": 13,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    }),
    "qwen3_moe yarn": ("Qwen3Moe", {
        "num_experts": 6, "moe_intermediate_size": 7, "intermediate_size": 13, "num_key_value_heads": 3,
        "head_dim": 10, "norm_topk_prob": True, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    }),
    "deepseek_v2": ("DeepseekV2", {
        **_MLA, "q_lora_rank": 8, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7, "rms_norm_eps": 1e-3,
    }),
    "deepseek_v2 lite": ("DeepseekV2", {
        **_MLA, "q_lora_rank": None, "n_routed_experts": 5, "n_shared_experts": 1, "rope_parameters": _YARN,
    }),
    "deepseek_v3": ("DeepseekV3", {
        **_MLA, "q_lora_rank": 8, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "rope_parameters": _YARN, "rms_norm_eps": 1e-3,
    }),
    "deepseek_v3 without q latent": ("DeepseekV3", {
        **_MLA, "q_lora_rank": None, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
        "rope_interleave": False, "norm_topk_prob": False,
    }),
    "olmoe biased, dynamic": ("Olmoe", {
        "num_experts": 5, "intermediate_size": 11, "num_key_value_heads": 1, "attention_bias": True,
        "max_position_embeddings": 11, "rope_parameters": rope("dynamic"),
    }),
    "qwen2_moe without shared experts": ("Qwen2Moe", {
        "num_experts": 5, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 0, "num_key_value_heads": 3,
        "rope_parameters": rope("yarn"),
    }),
    "qwen3_moe biased": ("Qwen3Moe", {
        "num_experts": 6, "moe_intermediate_size": 7, "num_key_value_heads": 1, "head_dim": 10, "attention_bias": True,
        "rope_parameters": rope("llama3"),
    }),
    "deepseek_v2 biased": ("DeepseekV2", {
        **_MLA, "q_lora_rank": 8, "n_routed_experts": 5, "n_shared_experts": 0, "attention_bias": True,
        "rope_parameters": rope("yarn", mscale=0.7, mscale_all_dim=0.9),
    }),
    "deepseek_v3 biased": ("DeepseekV3", {
        **_MLA, "q_lora_rank": None, "n_routed_experts": 8, "n_shared_experts": 0, "n_group": 1, "topk_group": 1,
        "attention_bias": True, "max_position_embeddings": 32, "rope_parameters": rope("dynamic"),
    }),
    "glm4_moe without shared experts": ("Glm4Moe", {
        "moe_intermediate_size": 7, "intermediate_size": 13, "num_key_value_heads": 3, "head_dim": 12,
        "n_routed_experts": 6, "n_shared_experts": 0,
        "rope_parameters": rope("linear", partial_rotary_factor=0.5, rope_theta=500.0),
    }),
    "glm4_moe": ("Glm4Moe", {
        "moe_intermediate_size": 7, "intermediate_size": 13, "num_key_value_heads": 1, "head_dim": 8,
        "n_routed_experts": 6, "n_shared_experts": 1, "use_qk_norm": True, "attention_bias": True,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    }),
}  # fmt: skip


def random_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of transformers whose parameters are all different from their initial zeros and ones."""
    kind, options = CONFIGS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **options, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter += 0.3 * torch.randn_like(parameter)
    for module in model.modules():  # published in fp32
        if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
            module.e_score_correction_bias = bias.float()
    model.model.rotary_emb.__init__(config=model.config)  # its tables have changed, too
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def configure(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edit the dictionary of a folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    """Load a folder with transformers."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=dtype, experts_implementation="eager", attn_implementation="sdpa").eval()


def save_with_mtp(model: Any, folder: Path, depth: int = 1, seed: int = 3) -> MtpModel:
    """Save a model with random modules of multi-token prediction (MTP), by the published names. Returns these."""
    model.config.num_nextn_predict_layers = depth
    save(model, folder)
    torch.manual_seed(seed)
    mtp = MtpModel(model, depth).to(model.dtype).eval()
    tensors = load_file(folder / "model.safetensors")
    head = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    for k, module in enumerate(mtp.layers):
        prefix = f"model.layers.{model.config.num_hidden_layers + k}."
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.copy_((tensor.ndim == 1) + 0.3 * torch.randn(tensor.shape))
        for name, tensor in module.state_dict().items():
            tensors |= {f"{prefix}{one}": part.contiguous() for one, part in _as_published(name, tensor)}
        for name, original in head.items():  # a tied head is not saved
            tensors[f"{prefix}{name}"] = tensors.get(original, tensors[head["embed_tokens.weight"]]).clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return mtp


def _as_published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of transformers' `MtpLayer` by its published names."""
    name = name.replace("post_norm", "shared_head.norm") if name.startswith("post_norm") else name
    name = name.removeprefix("mtp_block.")
    if not name.startswith("mlp.experts."):
        yield name, tensor.float() if name.endswith("e_score_correction_bias") else tensor
        return
    for expert, matrix in enumerate(tensor):
        if name.endswith("gate_up_proj"):
            for part, rows in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                yield f"mlp.experts.{expert}.{part}.weight", rows
        else:
            yield f"mlp.experts.{expert}.down_proj.weight", matrix


@contextmanager
def exact(dtype: torch.dtype) -> Iterator[None]:
    """In this context, models of transformers in fp64 compute all in fp64, also what they compute in fp32 otherwise."""
    if dtype != torch.float64:
        yield
        return
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(torch, "float", torch.float64),
            mock.patch.object(torch, "float32", torch.float64),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(default)
