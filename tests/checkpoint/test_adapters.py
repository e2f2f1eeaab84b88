"""Adapters out and in: PEFT loads what a run exports, merged weights compute the same, and adapters of PEFT load."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_dualpipe import join_world
from moe_dualpipe.checkpoint import load_model, save_checkpoint
from moe_dualpipe.checkpoint.huggingface import from_pretrained, plan_adapter_export, plan_checkpoint_export
from moe_dualpipe.checkpoint.huggingface.companions import companion_files, fp8_file, read_companions
from moe_dualpipe.checkpoint.huggingface.peft import PeftAdapter
from moe_dualpipe.checkpoint.load import load_adapter
from moe_dualpipe.checkpoint.weights import SavedAdapters, global_weights
from moe_dualpipe.models import StageOptions, build_model
from moe_dualpipe.models.config import LORA_TARGETS, LoRA
from moe_dualpipe.models.lora import adapted_weight
from tests.support.published import CONFIGS, exact, random_model, save, transformers_model

TOKENS_BS = torch.randint(37, (2, 19), generator=torch.Generator().manual_seed(0))
ONE_OF_EACH = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe")


def saved_run(folder: Path, name: str, targets=(), dtype=torch.float64):
    """A published model, and a checkpoint of a run that has trained adapters beside its weights."""
    with exact(dtype):
        theirs = random_model(name, dtype=dtype)
    base = save(theirs, folder / "base")
    lora = LoRA(3, alpha=5.0, targets=targets)
    model = from_pretrained(base, options=StageOptions(lora=lora))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".lora." in parameter_name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))  # also exact in fp32
    state = {f"model.{key}": tensor for key, tensor in global_weights(model).items()}
    files = companion_files(read_companions(base)) | SavedAdapters(lora, str(base)).file()
    return base, model, saved(folder / "run", state, model.config, files)


def adapted_by_peft(base: Path, adapter: Path) -> Any:
    import peft  # takes seconds, also in processes that run no test of this file

    return peft.PeftModel.from_pretrained(transformers_model(base, torch.float64), adapter)


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    """The logits of transformers' model with an adapter that PEFT has loaded."""
    model = adapted_by_peft(base, adapter)
    with torch.no_grad(), exact(torch.float64):
        return model(TOKENS_BS).logits


def saved(run: Path, *contents) -> Path:
    with join_world():
        return save_checkpoint(run, 7, *contents)


@pytest.mark.parametrize("name,targets", [
    *((name, ()) for name in CONFIGS),
    *(("deepseek_v2", targets) for targets in (("router",), ("experts",), ("dense", "shared"))),
], ids=str)  # fmt: skip
@pytest.mark.quick(
    *(f"{name}-()" for name in ONE_OF_EACH), "deepseek_v2-('router',)", "deepseek_v2-('experts',)",
    "deepseek_v2-('dense', 'shared')",
)  # fmt: skip
def test_peft_computes_the_same_with_an_exported_adapter(name, targets, tmp_path):
    """targets: alone; (): all that PEFT knows by default."""
    base, model, checkpoint = saved_run(tmp_path, name, targets)
    plan_adapter_export(checkpoint).write(tmp_path / "adapter")
    expected = model.logits(model(TOKENS_BS))
    assert (peft_logits(base, tmp_path / "adapter") - expected).norm() < 1e-6 * expected.norm()
    of_base = transformers_model(base, torch.float64)(TOKENS_BS).logits
    assert targets or (of_base - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.quick("qwen2_moe", "deepseek_v2")
def test_merged_weights_compute_the_same(name, tmp_path):
    base, model, checkpoint = saved_run(tmp_path, name)
    plan = plan_checkpoint_export(checkpoint, torch.float32)
    plan.write(tmp_path / "merged")
    assert re.fullmatch(r"merging rounds away 0.00% of what the adapters have learned", plan.describe_loss())
    expected = model.logits(model(TOKENS_BS))
    for logits in (
        transformers_model(tmp_path / "merged", torch.float64)(TOKENS_BS).logits,
        load_model(checkpoint).double()(TOKENS_BS),
    ):
        assert (logits - expected).norm() < 1e-5 * expected.norm()
    assert load_file(tmp_path / "merged/model.safetensors").keys() == load_file(base / "model.safetensors").keys()


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.quick("mixtral", "qwen2_moe", "deepseek_v3")
def test_an_adapter_of_peft_loads(name, tmp_path):
    base, model, checkpoint = saved_run(tmp_path, name, LORA_TARGETS if name == "deepseek_v3" else ())
    plan_adapter_export(checkpoint).write(tmp_path / "first")
    adapted_by_peft(base, tmp_path / "first").save_pretrained(tmp_path / "peft")
    found = PeftAdapter(tmp_path / "peft", model.config, read_companions(base))
    again = from_pretrained(base, options=StageOptions(lora=found.lora))
    state = {f"model.{key}": tensor for key, tensor in global_weights(again).items()}
    result = load_adapter(tmp_path / "peft", state, model.config, read_companions(base))
    assert result.loaded and not result.missing and not result.ignored
    expected = model.logits(model(TOKENS_BS))
    assert (again.logits(again(TOKENS_BS)) - expected).norm() < 1e-6 * expected.norm()


def test_merging_into_fp8_says_what_it_rounds_away(tmp_path):
    _, model, _ = saved_run(tmp_path, "qwen3_moe", dtype=torch.float32)
    files = SavedAdapters(LoRA(3, alpha=5.0), None).file() | fp8_file("ue8m0")
    state = {f"model.{key}": tensor for key, tensor in global_weights(model).items()}
    checkpoint = saved(tmp_path / "fp8", state, model.config, files)
    plan = plan_checkpoint_export(checkpoint)
    plan.write(tmp_path / "merged")
    share = float(re.fullmatch(r"merging rounds away (.+)% of what .*", plan.describe_loss())[1])
    exact_weights = {name: tensor.double() for name, tensor in global_weights(load_model(checkpoint)).items()}
    written = global_weights(from_pretrained(tmp_path / "merged", torch.float64))
    base = global_weights(build_model(model.config, options=StageOptions()))
    adapted = {adapted_weight(name)[0] for name in global_weights(model) if ".lora." in name}
    stored = global_weights(model)
    lost = sum((written[name] - exact_weights[name]).square().sum() for name in adapted)
    learned = sum((exact_weights[name] - stored[name].double()).square().sum() for name in adapted)
    assert base.keys() == written.keys()
    assert share == pytest.approx(100 * float(lost / learned) ** 0.5, abs=0.01)
    assert share > 1


CHANGES = {
    "adapter_config.json": {
        "use_dora": (True, "use_dora True is not supported, only plain LoRA"),
        "peft_type": ("LOHA", "a bias, or another type than LORA is not supported"),
        "r": ("8", "r and lora_alpha must be numbers: got '8'"),
        "rank_pattern": ({"q_proj": 4}, "rank_pattern {'q_proj': 4} is not supported"),
        "init_lora_weights": ("pissa", "init_lora_weights 'pissa' is not supported, only plain LoRA"),
    },
}


@pytest.mark.parametrize("key", CHANGES["adapter_config.json"])
def test_an_adapter_that_does_something_else_is_refused(key, tmp_path):
    base, model, checkpoint = saved_run(tmp_path, "olmoe")
    plan_adapter_export(checkpoint).write(folder := tmp_path / "adapter")
    value, message = CHANGES["adapter_config.json"][key]
    config = json.loads((folder / "adapter_config.json").read_text()) | {key: value}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)):
        PeftAdapter(folder, model.config, read_companions(base))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    base, model, checkpoint = saved_run(tmp_path, "olmoe")
    plan_adapter_export(checkpoint).write(folder := tmp_path / "adapter")
    other = replace(model.config, num_layers=2)
    with pytest.raises(ValueError, match=r"adapts what this model does not have.*layers\.2"):
        PeftAdapter(folder, other, read_companions(base))
    with pytest.raises(ValueError, match="has 5 experts"):
        _ = PeftAdapter(folder, replace(model.config, num_experts=6), read_companions(base)).shapes
    tensors = load_file(folder / "adapter_model.safetensors")
    halves = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name or "lora_B" not in name}
    save_file(halves, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has only one of A and B: .*layers\.1\.mlp.*lora_A"):
        PeftAdapter(folder, model.config, read_companions(base))
    save_file({name: tensor[:-1] for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="which does not fit r 3"):
        _ = PeftAdapter(folder, model.config, read_companions(base)).shapes


def test_a_run_without_adapters_has_none_to_export(tmp_path):
    model = from_pretrained(save(random_model("olmoe"), tmp_path / "base"))
    state = {f"model.{key}": tensor for key, tensor in global_weights(model).items()}
    checkpoint = saved(tmp_path / "run", state, model.config)
    with pytest.raises(ValueError, match="has no adapters: its run was trained without --lora"):
        plan_adapter_export(checkpoint)
