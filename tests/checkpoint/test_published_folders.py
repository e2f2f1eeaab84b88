"""Folders of published models: damaged or contradictory, an error of one line; with weights in FP8, the same model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_dualpipe.checkpoint import open_model
from moe_dualpipe.checkpoint.huggingface import from_pretrained, save_pretrained
from moe_dualpipe.kernels.fp8 import quantize
from tests.support.mutations import check_message
from tests.support.published import change_tensors, configure, random_model, save, save_with_mtp

EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
LACKS, SURPLUS = "lacks tensors of the model that its config.json describes: ", "config.json does not have: "


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return save(random_model("mixtral"), tmp_path_factory.mktemp("published") / "saved")


# ---- Weights in fp8, as DeepSeek publishes them: one scale for each block of 128 x 128 numbers ----


BLOCK = 128
QUANTIZATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
SIZES = {
    "hidden_size": 136, "moe_intermediate_size": 131, "intermediate_size": 260, "num_hidden_layers": 2,
    "q_lora_rank": 129, "num_attention_heads": 5, "num_key_value_heads": 5, "qk_nope_head_dim": 30,
}  # fmt: skip
IN_FULL = ("embed_tokens.weight", "head.weight", "gate.weight", "norm.weight", "correction_bias")


@pytest.fixture(scope="module")
def original_fp8(tmp_path_factory):
    """A folder with fp8 weights and MTP, and its tensors in fp32."""
    folder, stored, expanded = tmp_path_factory.mktemp("fp8") / "saved", {}, {}
    save_with_mtp(random_model("deepseek_v3", dtype=torch.bfloat16, **SIZES), folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim == 1 or name.endswith(IN_FULL):
            stored[name] = expanded[name] = tensor
        else:
            matrix = quantize(tensor, BLOCK, BLOCK, False)
            stored[name], stored[f"{name}_scale_inv"] = matrix.stored, matrix.scales
            expanded[name] = matrix.read().contiguous()
    save_file(stored, folder / "model.safetensors")
    configure(folder, quantization_config=QUANTIZATION)
    assert max(min(t.shape) for name, t in stored.items() if name.endswith("_scale_inv")) == 2
    return folder, expanded


@pytest.fixture
def folder(original_fp8, tmp_path):
    return shutil.copytree(original_fp8[0], tmp_path / "saved")


def test_weights_in_fp8_are_expanded_and_exported_in_bf16(original_fp8, folder, tmp_path):
    models = {dtype: from_pretrained(folder, dtype) for dtype in (None, torch.float32)}
    assert models[None].embedding.weight.dtype == torch.bfloat16
    save_pretrained(models[None], tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == original_fp8[1].keys()
    assert all(torch.equal(tensor, original_fp8[1][name].to(tensor.dtype)) for name, tensor in written.items())
    save_file(original_fp8[1], folder / "model.safetensors")
    configure(folder, quantization_config=None)
    for dtype, model in models.items():
        expected = from_pretrained(folder, dtype or torch.bfloat16).state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), (dtype, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu], ids=str)
def test_scales_of_any_floats_are_read(folder, dtype):
    change_tensors(folder, lambda t: t.update({k: v.to(dtype) for k, v in t.items() if k.endswith("_scale_inv")}))
    found = from_pretrained(folder, torch.float32).state_dict()
    change_tensors(folder, lambda t: t.update({k: v.float() for k, v in t.items() if k.endswith("_scale_inv")}))
    expected = from_pretrained(folder, torch.float32).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


# ---- Refusals ----


def put(**tensors):
    return change(lambda _: tensors)


def change(edit):
    """Replace tensors of the folder by those that `edit` makes of them."""
    return lambda folder: change_tensors(folder, lambda found: found.update(edit(found)))


def pop(*names):
    return lambda folder: change_tensors(folder, lambda found: [found.pop(name) for name in names])


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
SCALE, ONE_EACH = (
    f"{DOWN}_scale_inv",
    "must be [2, 3], one scale for each block, of float32, bfloat16, float16, float8_e8m0fnu",
)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FAULTS = [
    (put(**{NORM: torch.zeros(24, 1)}), "norm.weight has shape [24, 1], but by config.json it must"),
    (put(**{EXPERT.format(3): torch.zeros(11, 24)}), "w2.weight has shape [11, 24], but by config.json it must"),
    (pop(EXPERT.format(1), EXPERT.format(2)), f"{LACKS}{EXPERT.format(1)} (and 1 like it)"),
    (put(**{EXPERT.format(4): torch.zeros(24, 11)}), f"{SURPLUS}{EXPERT.format(4)}"),
    (lambda folder: configure(folder, num_hidden_layers=2), f"{SURPLUS}model.layers.2."),
    (lambda folder: configure(folder, num_hidden_layers=4), f"{LACKS}model.layers.3."),
    (lambda folder: configure(folder, num_hidden_layers=5000), "its 5,000 layers of 4 experts and 3 heads do not fit"),
    (lambda folder: configure(folder, num_local_experts=10**9), "of 1,000,000,000 experts and 3 heads do not fit into"),
    (lambda folder: configure(folder, vocab_size=2**30), "do not fit into the "),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json: give the local folder of a published"),
    (lambda folder: (folder / "config.json").write_text("[1]"), "config.json: Expected `object`, got `array`"),
    (lambda folder: (folder / "tokenizer.json").write_bytes(b'{"a": '), "tokenizer.json: it is not JSON: Expecting"),
]  # fmt: skip
FP8_FAULTS = [
    (change(lambda t: {NORM: t[NORM].to(E4M3)}), f"{NORM} has dtype torch.float8_e4m3fn, which is not supported"),
    (change(lambda t: {DOWN: t[DOWN].view(torch.int8)}), f"{DOWN} has dtype torch.int8, which is not supported"),
    (change(lambda t: {DOWN: t[DOWN].view(E5M2)}), f"{DOWN} has dtype torch.float8_e5m2, which is not supported"),
    (put(**{SCALE: torch.ones(3, 2)}), f"{SCALE} {ONE_EACH}"), (put(**{SCALE: torch.ones(2, 3).double()}), ONE_EACH),
    (pop(SCALE), f"lacks scales of matrices in fp8: {SCALE}"),
    (put(**{f"{NORM}_scale_inv": torch.ones(1)}), f"{SURPLUS}{NORM}_scale_inv"),
    *(
        (lambda path, keys=keys: configure(path, quantization_config=QUANTIZATION | keys), "not supported: it needs")
        for keys in ({"quant_method": "gptq"}, {"fmt": "e5m2"}, {"weight_block_size": [64, 128]})
    ),
    (lambda folder: configure(folder, quantization_config="fp8"), "quantization_config 'fp8' is not supported"),
    (lambda folder: configure(folder, quantization_config=None), "with a quantization_config of 'fp8'"),
]  # fmt: skip


@pytest.mark.parametrize("number,damage,problem", [
    (i, *row) for i, rows in enumerate((FAULTS, FP8_FAULTS)) for row in rows
], ids=[problem[:40] for _, problem in (*FAULTS, *FP8_FAULTS)])  # fmt: skip
def test_a_folder_that_does_not_fit_together_is_refused(original, original_fp8, tmp_path, number, damage, problem):
    folder = shutil.copytree((original, original_fp8[0])[number], tmp_path / "damaged")
    damage(folder)
    with pytest.raises(ValueError) as error:
        from_pretrained(folder)
    check_message(error.value)
    assert str(folder) in str(error.value) and problem in str(error.value)


def test_a_published_model_has_no_custom_layers(original):
    with pytest.raises(ValueError, match=f"{original} has experts 'swiglu', not 'own:Experts': leave out --experts"):
        open_model(str(original), {"experts": "own:Experts"})
