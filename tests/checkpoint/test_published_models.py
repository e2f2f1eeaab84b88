"""Imported models equal those of transformers, and exported models equal the imported ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from moe_dualpipe.checkpoint.huggingface import PublishedModel, from_pretrained, save_pretrained
from tests.support.published import CONFIGS, exact, random_model, save, transformers_model

TOKENS_BS = torch.randint(37, (2, 19), generator=torch.Generator().manual_seed(0))
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
"""The largest difference relative to the norm of the expected tensor, for each dtype."""


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, name: str = "") -> None:
    difference = (ours - theirs).norm() / theirs.norm()
    assert difference < BOUNDS[theirs.dtype], (name, difference)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_equal_those_of_transformers(name, dtype, tmp_path):
    with exact(dtype):
        theirs = random_model(name, dtype=dtype)
        their_logits = theirs(TOKENS_BS).logits
    ours = from_pretrained(save(theirs, tmp_path / "saved"))
    logits = [their_logits, ours.logits(ours(TOKENS_BS))]
    for each in logits:
        F.cross_entropy(each.flatten(0, 1), TOKENS_BS.roll(-1, 1).flatten()).backward()
    assert_near(logits[1], logits[0])
    with torch.no_grad():  # their gradients by our names: those of a model whose weights they are
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    expected = dict(from_pretrained(save(theirs, tmp_path / "gradients")).named_parameters())
    for name_here, parameter in ours.named_parameters():
        for grad, theirs_grad in zip(parts(parameter.grad), parts(expected[name_here].detach()), strict=True):
            if theirs_grad.any():  # an expert without tokens has no gradient
                assert_near(grad, theirs_grad, name_here)


def parts(grad: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the experts of a layer one by one."""
    return [*grad] if grad.ndim == 3 else [grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.quick(
    "qwen2_moe-torch.float32",
    "deepseek_v3-torch.float32",
    "mixtral-torch.bfloat16",
    "olmoe-torch.float16",
    "qwen3_moe biased-torch.bfloat16",
    "qwen2_moe without shared experts-torch.bfloat16",
    "glm4_moe without shared experts-torch.bfloat16",
    "deepseek_v2 biased-torch.bfloat16",
)
def test_an_export_has_the_same_tensors_as_the_import(name, dtype, tmp_path):
    theirs = random_model(name, dtype=dtype)
    save(theirs, tmp_path / "saved")
    save_pretrained(from_pretrained(tmp_path / "saved"), tmp_path / "again")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("saved", "again"))
    published, again = (PublishedModel(tmp_path / folder) for folder in ("saved", "again"))
    assert again.config == published.config
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype, key
        assert torch.equal(after[key], tensor) or key in published.layout.unused(), key
    models = [transformers_model(tmp_path / "again", dtype).double(), theirs.double()]
    with torch.no_grad(), exact(torch.float64):
        assert_near(*(model(TOKENS_BS).logits for model in models))


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path):
    save(random_model("deepseek_v3"), tmp_path / "saved")
    expected, path = from_pretrained(tmp_path / "saved"), tmp_path / "saved" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "kimi_k2", "eos_token_id": 7}))
    model = from_pretrained(tmp_path / "saved")
    assert model.config == expected.config
    assert torch.equal(model.logits(model(TOKENS_BS)), expected.logits(expected(TOKENS_BS)))
    save_pretrained(model, tmp_path / "again")  # by the name that transformers knows
    assert transformers_model(tmp_path / "again", torch.float32).config.eos_token_id == 7


def test_buffers_that_no_file_has_start_from_0(tmp_path: Path):
    save(random_model("glm4_moe"), tmp_path / "saved")
    torch.use_deterministic_algorithms(True)  # fills new memory with large numbers
    try:
        model = from_pretrained(tmp_path / "saved")
    finally:
        torch.use_deterministic_algorithms(False)
    found = [buffer for name, buffer in model.named_buffers() if name not in model.state_dict()]
    assert found and not any(buffer.any() for buffer in found)
