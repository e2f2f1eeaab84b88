"""Low-rank adapters: at the start they change nothing, and trained they equal merged weights, in any layout."""

import re
from dataclasses import replace

import pytest
import torch

from moe_dualpipe.checkpoint import global_weights
from moe_dualpipe.checkpoint.huggingface.peft import kind_of
from moe_dualpipe.checkpoint.weights import adapter_pairs
from moe_dualpipe.kernels.fp8 import RECIPES
from moe_dualpipe.models import RECOMPUTE, StageOptions, build_model
from moe_dualpipe.models.adapters import squared_norms
from moe_dualpipe.models.config import LORA_TARGETS, LoRA
from moe_dualpipe.models.costs import shape_of
from tests.pipeline.test_padding import short_batch
from tests.support.custom_experts import Stacked
from tests.support.updates import MODEL, check_layout

MLA = replace(MODEL, attention="mla", kv_rank=16, q_rank=12, rope_dim=4, value_dim=12, num_kv_heads=2)
ALL = LoRA(3, alpha=5.0, targets=LORA_TARGETS)


def model_of(config, lora=ALL, dtype=torch.float64, **options):
    model = build_model(config, options=StageOptions(seed=1, lora=lora, **options)).to(dtype)
    shift_adapters(model.named_parameters())
    return model


def shift_adapters(parameters):
    """Give B values that are not zero, the same for every expert."""
    with torch.no_grad():
        for name, parameter in parameters:
            if re.search(r"\.lora\.(B|\w+_B)\b", name):
                matrix = torch.linspace(-0.4, 0.5, parameter[0].numel() if parameter.ndim == 3 else parameter.numel())
                parameter.copy_(matrix.view(parameter.shape[-2:]).to(parameter.dtype))


def merged(model, **options):
    """The model without adapters whose weights have the updates added."""
    plain = build_model(model.config, options=StageOptions(seed=1, **options)).to(torch.float64)
    stored, weights = global_weights(model), global_weights(plain)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(stored[name])
        for name, pairs in adapter_pairs(stored).items():
            weights[name] += 5.0 / 3 * torch.cat([stored[b] @ stored[a] for a, b in pairs])
    return plain


@pytest.mark.parametrize("fp8", [None, RECIPES["ue8m0"]], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_at_the_start_the_outputs_are_those_of_the_base(dtype, fp8):
    tokens, _ = short_batch()
    base, adapted = (build_model(MODEL, options=StageOptions(lora=lora, fp8=fp8)).to(dtype) for lora in (None, ALL))
    assert torch.equal(base(tokens), adapted(tokens))


@pytest.mark.parametrize("config", [MODEL, MLA], ids=["gqa", "mla"])
def test_adapters_equal_merged_weights(config):
    """Also their gradients: dA = s B^T dW and dB = s dW A^T, where dW is that of the merged weight."""
    inputs, labels = short_batch()
    model = model_of(config)
    plain = merged(model)
    losses = [each.loss(each(inputs), labels) for each in (model, plain)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for loss in losses:
        loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name, _ in model.named_parameters() if ".lora." in name
    }
    with torch.no_grad():
        for each in (model, plain):
            for parameter in each.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    values = global_weights(model)
    for parameters in (model, plain):
        for parameter in parameters.parameters():
            parameter.data = parameter.grad  # type: ignore[assignment]
    grads, merged_grads = global_weights(model), global_weights(plain)
    values = {name: value.clone() for name, value in values.items()}
    for name, pairs in adapter_pairs(values).items():
        rows = merged_grads[name].split([len(values[b]) for _, b in pairs])
        for (a, b), dw in zip(pairs, rows, strict=True):
            torch.testing.assert_close(grads[a], 5 / 3 * values[b].T @ dw, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(grads[b], 5 / 3 * dw @ values[a].T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recomputation_changes_no_bit_also_with_dropout(recompute):
    inputs, labels = short_batch()
    grads = []
    for kind in ("none", recompute):
        model = model_of(MODEL, replace(ALL, dropout=0.3), recompute=kind)
        torch.manual_seed(4)
        model.loss(model(inputs), labels).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_without_gradients_of_the_model_dropout_is_off():
    inputs, _ = short_batch()
    model = model_of(MODEL, replace(ALL, dropout=0.3))
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    torch.testing.assert_close(model(inputs), merged(model)(inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "pp", "dp", "ep", "cp"), [
    ("dualpipe", 2, 1, 1, 1), ("dualpipev", 1, 2, 2, 1), ("1f1b_overlap", 2, 2, 2, 1), ("1f1b", 1, 1, 1, 2),
])  # fmt: skip
@pytest.mark.quick("dualpipev-1-2-2-1", "1f1b-1-1-1-2")
def test_an_update_in_any_layout_equals_that_of_one_process(name, pp, dp, ep, cp):
    check_layout(MODEL, short_batch(), name, pp, dp, ep, cp, lora=ALL, prepare=shift_adapters)


@pytest.mark.parametrize("config", [MODEL, MLA, replace(MLA, q_rank=0)], ids=["gqa", "mla", "mla without q latent"])
@pytest.mark.parametrize("targets", [LORA_TARGETS, ("attention",), ("experts", "router"), ("dense", "shared")], ids=str)
def test_the_parameters_of_adapters_are_counted(config, targets):
    model, shape = model_of(config, LoRA(3, targets=targets)), shape_of(config)
    for number, block in model.layers.items():
        counts = {True: 0, False: 0}
        for name, parameter in block.named_parameters():
            if ".lora." in name:
                counts[".experts." in name] += parameter.numel()
        found = shape.block(int(number)).adapter_parameters(shape.hidden, 3, targets)
        assert found == (counts[True], counts[False])


@pytest.mark.parametrize(("changes", "target", "message"), [
    ({"num_dense_layers": 4}, "experts", "lora.targets=experts: this model has no routed experts"),
    ({"num_dense_layers": 0}, "dense", "lora.targets=dense: this model has no dense layers"),
    ({"num_shared_experts": 0}, "shared", "lora.targets=shared: this model has no shared experts"),
    ({"experts": Stacked}, "experts", "lora.targets=experts: custom experts cannot have adapters"),
])  # fmt: skip
def test_a_target_that_trains_nothing_is_refused(changes, target, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_model(replace(MODEL, **changes), options=StageOptions(lora=LoRA(2, targets=(target,))))


@pytest.mark.parametrize("config", [MODEL, MLA], ids=["gqa", "mla"])
def test_the_norms_of_updates_are_those_of_what_merging_adds(config):
    model = model_of(config)
    before, after = global_weights(model), global_weights(merged(model))
    expected = dict.fromkeys(LORA_TARGETS, 0.0)
    for name, weight in after.items():
        if kind := kind_of(name) if name.startswith("layers.") else "":
            expected[kind] += (weight - before[name]).square().sum().item()
    found = squared_norms([model])[:, 0].tolist()
    assert found == pytest.approx([*expected.values()], rel=1e-9) and all(found)
