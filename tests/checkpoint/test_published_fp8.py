"""Weights in fp8, as DeepSeek publishes them: one scale for each block of 128 x 128 numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_dualpipe.checkpoint.huggingface import from_pretrained, save_pretrained
from tests.support.published import random_model, save_with_mtp

BLOCK, LARGEST = 128, 448.0
QUANTIZATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
SIZES = {
    "hidden_size": 136, "moe_intermediate_size": 131, "intermediate_size": 260, "num_hidden_layers": 2,
    "q_lora_rank": 129, "num_attention_heads": 5, "num_key_value_heads": 5, "qk_nope_head_dim": 30,
}  # fmt: skip
IN_FULL = ("embed_tokens.weight", "head.weight", "gate.weight", "norm.weight", "correction_bias")


def quantize(weight):
    """Quantize to fp8 in plain loops: weights [..., rows, columns], and the scale of each block."""
    *_, rows, columns = weight.shape
    scales = torch.empty(*weight.shape[:-2], -(-rows // BLOCK), -(-columns // BLOCK))
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    expanded = torch.empty(weight.shape)
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            block = ..., slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[..., i, j] = weight[block].abs().amax((-2, -1)).float() / LARGEST
            scale = scales[..., i, j, None, None]
            quantized[block] = (weight[block].float() / scale).to(torch.float8_e4m3fn)
            expanded[block] = quantized[block].float() * scale
    return quantized, scales, expanded


def quantized_tensors(tensors):
    """What DeepSeek would publish, and the same weights in fp32."""
    stored, expanded = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or name.endswith(IN_FULL):
            stored[name] = expanded[name] = tensor
        else:
            stored[name], stored[f"{name}_scale_inv"], expanded[name] = quantize(tensor)
    return stored, expanded


def stack_experts(tensors):
    """The experts of each layer as one tensor, as transformers holds them."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for prefix in {name.split(".mlp.experts.")[0] for name in tensors.keys() - stacked.keys()}:
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.mlp.experts.{e}.{name}.weight"] for e in range(8)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        stacked[f"{prefix}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        stacked[f"{prefix}.mlp.experts.down_proj"] = down
    return stacked


def make_folder(tmp_path, stacked=False):
    """A folder with fp8 weights, and its tensors in fp32."""
    folder = tmp_path / "saved"
    save_with_mtp(random_model("deepseek_v3", dtype=torch.bfloat16, **SIZES), folder)
    tensors = load_file(folder / "model.safetensors")
    stored, expanded = quantized_tensors(stack_experts(tensors) if stacked else tensors)
    save_file(stored, folder / "model.safetensors")
    configure(folder, quantization_config=QUANTIZATION)
    return folder, expanded


def configure(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
def test_weights_in_fp8_are_expanded(stacked, tmp_path):
    folder, expanded = make_folder(tmp_path, stacked)
    scales = [t for name, t in load_file(folder / "model.safetensors").items() if name.endswith("_scale_inv")]
    assert max(min(scale.shape[-2:]) for scale in scales) == 2
    models = {dtype: from_pretrained(folder, dtype) for dtype in (None, torch.float32)}
    assert models[None].embedding.weight.dtype == torch.bfloat16
    save_file(expanded, folder / "model.safetensors")
    configure(folder, quantization_config=None)
    for dtype, model in models.items():
        expected = from_pretrained(folder, dtype or torch.bfloat16).state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), (dtype, name)


def test_an_export_is_not_quantized(tmp_path):
    folder, expanded = make_folder(tmp_path)
    save_pretrained(from_pretrained(folder), tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == expanded.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, expanded[name].to(tensor.dtype)), name


def test_copies_in_fp8_are_compared_by_value(tmp_path):
    folder, _ = make_folder(tmp_path)
    names = "model.embed_tokens.weight", "model.layers.2.embed_tokens.weight"

    def in_fp8(tensors):
        for name in names:
            tensors[name], tensors[f"{name}_scale_inv"], _ = quantize(tensors[name])

    change(folder, in_fp8)
    model = from_pretrained(folder)
    assert model.embedding.weight.dtype == torch.bfloat16
    change(folder, lambda tensors: tensors[f"{names[1]}_scale_inv"].mul_(2))
    with pytest.raises(ValueError, match=f"{names[1]} differs from {names[0]}"):
        from_pretrained(folder)


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FAULTS = {
    "vector": (lambda t: t.update({NORM: t[NORM].to(E4M3)}), f"{NORM} has dtype .*e4m3fn, which is not for vectors"),
    "whole numbers": (lambda t: t.update({DOWN: t[DOWN].view(torch.int8)}), f"{DOWN} has dtype torch.int8, which"),
    "e5m2": (lambda t: t.update({DOWN: t[DOWN].view(E5M2)}), f"{DOWN} has dtype torch.float8_e5m2, which is not supp"),
    "no scale": (lambda t: t.pop(f"{DOWN}_scale_inv"), rf"{DOWN}_scale_inv must be float32 \[2, 3\], one scale"),
    "shape": (lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(3, 2)}), r"must be float32 \[2, 3\], one scale"),
    "dtype": (lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(2, 3).bfloat16()}), "must be float32"),
    "without a weight": (lambda t: t.update({f"{NORM}_scale_inv": torch.ones(1)}), f"does not have: {NORM}_scale_inv"),
    "gptq": ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported: only 'fp8'"),
    "blocks": ({"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\] is not supported"),
    "format": ({"fmt": "e5m2"}, "fmt 'e5m2' is not supported"), "text": ("fp8", "must be an object: got 'fp8'"),
    "unquantized": (None, "needs a quantization_config of 'fp8'"),
}  # fmt: skip
"""A change of the tensors or of the quantization, and the message."""


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_fp8_and_other_quantizations_are_refused(fault, tmp_path):
    folder, _ = make_folder(tmp_path)
    edit, message = FAULTS[fault]
    if callable(edit):
        change(folder, edit)
    else:
        configure(folder, quantization_config=QUANTIZATION | edit if isinstance(edit, dict) else edit)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)
