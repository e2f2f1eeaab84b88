"""Imported models equal those of transformers, and exported models the imported ones, also with MTP modules.

Modules of multi-token prediction (MTP) are stored as the layers after the last one.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from moe_dualpipe.checkpoint import check_weights, global_weights, load_weights
from moe_dualpipe.checkpoint.huggingface import ARCHITECTURES, PublishedModel, from_pretrained, save_pretrained
from tests.support.published import (
    CONFIGS,
    change_tensors,
    configure,
    exact,
    random_model,
    save,
    save_with_mtp,
    transformers_model,
)

TOKENS_BS = torch.randint(37, (2, 19), generator=torch.Generator().manual_seed(0))
NAMES = "deepseek_v3", "deepseek_v3 without q latent", "glm4_moe"
"""Those with modules of MTP."""
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
"""The largest difference relative to the norm of the expected tensor, for each dtype."""


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, name: str = "") -> None:
    difference = (ours - theirs).norm() / theirs.norm()
    assert difference < BOUNDS[theirs.dtype], (name, difference)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.quick(*(f"{name}-torch.float64" for name in CONFIGS), "deepseek_v3-torch.float32")
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


@pytest.mark.parametrize("name,dtype,depth,tied", [
    *((name, dtype, 0, None) for name in CONFIGS for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *((name, torch.bfloat16, 1, False) for name in NAMES), ("deepseek_v3", torch.bfloat16, 2, False),
    ("deepseek_v3", torch.bfloat16, 1, True), ("glm4_moe", torch.bfloat16, 2, True),
], ids=str)  # fmt: skip
@pytest.mark.quick(
    "qwen2_moe-torch.float32-0-None", "deepseek_v3-torch.float32-0-None", "mixtral-torch.bfloat16-0-None",
    "olmoe-torch.float16-0-None", "qwen3_moe biased-torch.bfloat16-0-None",
    "qwen2_moe without shared experts-torch.bfloat16-0-None", "glm4_moe without shared experts-torch.bfloat16-0-None",
    "deepseek_v2 biased-torch.bfloat16-0-None", *(f"{name}-torch.bfloat16-1-False" for name in NAMES),
    "deepseek_v3-torch.bfloat16-2-False", "deepseek_v3-torch.bfloat16-1-True", "glm4_moe-torch.bfloat16-2-True",
)  # fmt: skip
def test_an_export_has_the_same_tensors_as_the_import(name, dtype, depth, tied, tmp_path):
    """depth: of MTP modules. tied: whether the head is the embedding; None: as in the architecture."""
    theirs = random_model(name, dtype=dtype, **({} if tied is None else {"tie_word_embeddings": tied}))
    save_with_mtp(theirs, tmp_path / "saved", depth) if depth else save(theirs, tmp_path / "saved")
    save_pretrained(from_pretrained(tmp_path / "saved"), tmp_path / "again")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("saved", "again"))
    published, again = (PublishedModel(tmp_path / folder) for folder in ("saved", "again"))
    assert again.config == published.config and again.config.mtp_layers == depth
    assert tied is None or again.config.tied_embeddings == tied
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype, key
        assert torch.equal(after[key], tensor) or key in published.layout.unused(), key
    models = [transformers_model(tmp_path / folder, dtype).double() for folder in ("again", "saved")]
    with torch.no_grad(), exact(torch.float64):
        assert_near(*(model(TOKENS_BS).logits for model in models))


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path):
    save(random_model("deepseek_v3"), tmp_path / "saved")
    expected = from_pretrained(tmp_path / "saved")
    configure(tmp_path / "saved", model_type="kimi_k2", eos_token_id=7)
    model = from_pretrained(tmp_path / "saved")
    assert model.config == expected.config
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


TOKENS_BL = torch.randint(37, (2, 12), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_equal_those_of_transformers(name, tmp_path):
    inputs_BS, labels_BS = TOKENS_BL[:, :-1], TOKENS_BL[:, 1:]
    positions_BS = torch.arange(1, inputs_BS.shape[1])[None].expand(2, -1)
    with exact(torch.float64):
        theirs = random_model(name, dtype=torch.float64)
        mtp = save_with_mtp(theirs, tmp_path / "saved")
        result = theirs(inputs_BS, output_hidden_states=True)
        h_BSD = mtp.forward_layer(0, result.hidden_states[-1][:, :-1], positions_BS, None, labels_BS[:, :-1])
        logits_BSV = theirs.lm_head(h_BSD)
        expected = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS[:, 1:].flatten())
    ours = from_pretrained(tmp_path / "saved")
    assert ours.config.mtp_layers == 1
    loss = ours.loss(ours(inputs_BS), labels_BS)
    loss.backward()
    torch.testing.assert_close(ours.mtp.take_loss(), expected.detach(), rtol=1e-12, atol=0)
    main = F.cross_entropy(result.logits.flatten(0, 1), labels_BS.flatten())
    torch.testing.assert_close(loss, main, rtol=1e-12, atol=0)
    (main + ours.config.mtp_weight * expected).backward()
    ours, theirs, mtp = (dict(model.named_parameters()) for model in (ours, theirs, mtp))
    joined = torch.cat(mtp["layers.0.eh_proj.weight"].grad.chunk(2, 1)[::-1], 1)
    pairs = {
        "mtp.0.token_norm.weight": mtp["layers.0.enorm.weight"].grad,
        "mtp.0.hidden_norm.weight": mtp["layers.0.hnorm.weight"].grad,
        "mtp.0.norm.weight": mtp["layers.0.post_norm.weight"].grad,
        "mtp.0.join.weight": joined,
        "mtp.0.block.mlp.experts.gate_up": mtp["layers.0.mtp_block.mlp.experts.gate_up_proj"].grad,
        "embedding.weight": theirs["model.embed_tokens.weight"].grad,
        "head.weight": theirs["lm_head.weight"].grad,
    }
    for key, grad in pairs.items():
        torch.testing.assert_close(ours[key].grad, grad, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("kind,copy,original", [
    ("deepseek_v3", "model.layers.3.embed_tokens.weight", "model.embed_tokens.weight"),
    ("deepseek_v3", "model.layers.3.shared_head.head.weight", "lm_head.weight"),
    ("qwen2_moe", "lm_head.weight", "model.embed_tokens.weight"),
])  # fmt: skip
def test_the_rank_that_loads_a_tensor_refuses_copies_that_differ(kind, copy, original, tmp_path):
    folder = tmp_path / "saved"
    (save_with_mtp if kind == "deepseek_v3" else save)(random_model(kind), folder)
    weights = global_weights(from_pretrained(folder))
    held = "embedding.weight" if "embed" in original else "head.weight"
    change_tensors(folder, lambda tensors: tensors.update({copy: tensors[original] + 1}))
    with pytest.raises(ValueError, match=f"{copy} differs from {original}"):
        load_weights(folder, {f"model.{held}": weights[held]})
    load_weights(folder, {f"model.{name}": tensor for name, tensor in weights.items() if name != held})
    change_tensors(folder, lambda tensors: tensors.pop(copy))  # it may be missing
    load_weights(folder, {f"model.{held}": weights[held]})


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_a_small_folder_whose_mtp_was_not_saved_loads(kind, layers, tmp_path):
    model = random_model(kind, num_hidden_layers=layers, vocab_size=7, hidden_size=96, intermediate_size=3)
    configure(save(model, tmp_path / "saved"), num_nextn_predict_layers=1)
    found = from_pretrained(tmp_path / "saved")
    assert (found.config.num_layers, found.config.mtp_layers) == (layers, 0)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_experts_that_transformers_saved_as_one_tensor_load(kind, tmp_path):
    model = random_model(kind)
    one, other = (save(model, tmp_path / str(original), save_original_format=original) for original in (True, False))
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(other / "model.safetensors"))
    expected, found = (from_pretrained(folder).state_dict() for folder in (one, other))
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in found)
    change_tensors(other, lambda t: t.update({k: v[:-1] for k, v in t.items() if k.endswith("experts.down_proj")}))
    with pytest.raises(ValueError, match=r"lacks tensors of the model"):
        from_pretrained(other)


def test_a_folder_without_mtp_tensors_loads_without_mtp_but_not_with_some(tmp_path):
    save_with_mtp(random_model("deepseek_v3"), folder := tmp_path / "saved")
    model = from_pretrained(folder)
    assert check_weights(folder, replace(model.config, mtp_layers=0)) == []
    with pytest.raises(ValueError, match="mtp_layers was 1, now 2"):
        check_weights(folder, replace(model.config, mtp_layers=2))
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.3.hnorm.weight"))
    with pytest.raises(ValueError, match=r"lacks tensors of the model .*model\.layers\.3\.hnorm\.weight"):
        from_pretrained(folder)
    change_tensors(
        folder, lambda tensors: [tensors.pop(key) for key in [*tensors] if key.startswith("model.layers.3.")]
    )
    without = from_pretrained(folder)
    assert without.config == replace(model.config, mtp_layers=0)
    assert torch.equal(without(TOKENS_BL), model.logits(model(TOKENS_BL)))
