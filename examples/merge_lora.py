"""Merge trained LoRA adapters (layers/lora.py) into the experts that they adapt, and write a model for Hugging Face.

    python examples/layers/lora.py --weights FOLDER --weights-partial --out runs/lora
    python examples/merge_lora.py runs/lora merged

FOLDER is a published model. The merged model computes the same without adapters: its weights are
W + alpha / rank * B A. So tools without LoRA can serve it, and `train.py --weights merged` can train it further.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from layers.lora import LoRAExperts

from moe_dualpipe import build_model, save_pretrained
from moe_dualpipe.checkpoint import find_checkpoint, load_model, read_manifest, start_companions
from moe_dualpipe.data import find_tokenizer
from moe_dualpipe.models import TransformerStage


@torch.no_grad()
def merged(model: TransformerStage) -> TransformerStage:
    """A model with built-in experts that computes the same as `model`, whose experts are `LoRAExperts`."""
    weights = model.state_dict()
    for prefix, layer in model.named_modules():
        if isinstance(layer, LoRAExperts):
            for name in ("gate_up", "down"):
                low, high = (weights.pop(f"{prefix}.{name}_{kind}") for kind in "AB")
                weights[f"{prefix}.{name}"] = weights[f"{prefix}.{name}"] + layer.scale * high @ low
    plain = build_model(dataclasses.replace(model.config, experts="swiglu", expert_options=""))
    plain.load_state_dict(weights)
    return plain


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/merge_lora.py RUN NEW_FOLDER")
    run, folder = sys.argv[1:]
    try:
        checkpoint = find_checkpoint(run)
        if read_manifest(checkpoint).model.get("experts", "swiglu") == "swiglu":
            raise ValueError(f"{checkpoint} has no adapters: use moe-dualpipe export {run}")
        model = merged(load_model(checkpoint, experts=LoRAExperts))
        model.companions = start_companions(checkpoint)
        save_pretrained(model, Path(folder), tokenizer=find_tokenizer(checkpoint))
    except (ValueError, OSError) as error:
        sys.exit(f"merge_lora.py: error: {error}")
    print(f"{checkpoint} -> {folder}")


if __name__ == "__main__":
    main()
