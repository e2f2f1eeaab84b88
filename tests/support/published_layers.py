"""Layers of published models, from Hugging Face transformers, in the forms that this package takes."""

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn
from transformers import AutoConfig


@dataclass
class Published:
    model: str = "llama"


def part(config, model, *names, **arguments):
    """A part of a transformers model with this package's sizes, and the model's rotary embedding if it has one."""
    sizes = {
        "hidden_size": config.hidden_size, "intermediate_size": config.expert_size, "pad_token_id": 0,
        "moe_intermediate_size": config.expert_size, "num_hidden_layers": 1, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4 if model == "deepseek_v3" else 2, "head_dim": 6,
    }  # fmt: skip
    latent = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 6, "qk_nope_head_dim": 6, "v_head_dim": 6,
              "n_group": 1, "topk_group": 1, "qk_head_dim": 12}  # fmt: skip
    of_model = AutoConfig.for_model(model, **sizes, **latent if model == "deepseek_v3" else {})
    of_model.num_experts = of_model.num_local_experts = config.num_experts
    of_model._attn_implementation = "eager"
    code = import_module(f"transformers.models.{model}.modeling_{model}")
    prefix = next(name for name in vars(code) if name.endswith("PreTrainedModel") and name[:4] != "PreT")[:-15]
    found = next(getattr(code, prefix + name) for name in names if hasattr(code, prefix + name))
    made = found(of_model, **arguments)
    for parameter in made.parameters():  # constructors leave stacked weights uninitialized
        nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    return made, getattr(code, prefix + "RotaryEmbedding", lambda _: None)(of_model)


def expert(config, options: Published):
    return part(config, options.model, "MLP")[0]


class Router(nn.Module):
    def __init__(self, config, options: Published):
        super().__init__()
        self.inner, _ = part(config, options.model, "TopKRouter", "TopkRouter")

    def forward(self, x):
        _, weights, ids = self.inner(x.flatten(0, -2).contiguous())
        return weights.to(torch.promote_types(weights.dtype, torch.float32)), ids


class Attention(nn.Module):
    parts = ("Attention",)

    def __init__(self, config, options: Published):
        super().__init__()
        self.inner, self.rotary = part(config, options.model, *self.parts, layer_idx=0)

    def forward(self, x_BSD):
        length = x_BSD.shape[1]
        positions = torch.arange(length, device=x_BSD.device)[None]
        mask = torch.full((1, 1, length, length), torch.finfo(x_BSD.dtype).min, dtype=x_BSD.dtype).triu(1)
        assert self.rotary is not None
        rotated = self.rotary(x_BSD, positions)
        y = self.inner(hidden_states=x_BSD, position_embeddings=rotated, attention_mask=mask.to(x_BSD.device))
        return y[0] if isinstance(y, tuple) else y


def attention(config, options: Published):
    return Attention(config, options)


class Block(Attention):
    parts = ("DecoderLayer",)


def block(config, layer, expert_parallel, stage_options, options: Published):  # noqa: ARG001
    return Block(config, options)
