"""Exports: experts in FP8 as DeepSeek publishes them; the same files for any number of writers; all or nothing."""

import dataclasses
import errno
import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_dualpipe.checkpoint import find_checkpoint
from moe_dualpipe.checkpoint.huggingface import from_pretrained, plan_checkpoint_export, save_pretrained
from moe_dualpipe.cli import main
from moe_dualpipe.kernels.fp8 import DTYPE, RECIPES, Fp8Matrix, quantize
from moe_dualpipe.models import ModelConfig, build_model
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, peak_bytes, settings, train

LATENT = ModelConfig(
    hidden_size=136, num_layers=2, attention="mla", num_heads=2, head_dim=12, rope_dim=6, value_dim=10, kv_rank=14,
    q_rank=10, router_score="sigmoid", router_bias=True, router_dtype="float32", routed_scale=1.3, dense_size=40,
    expert_size=131, num_experts=5,
)  # fmt: skip
"""Experts have blocks of 128 x 128, and smaller ones at their ends."""
SCALES, FILE = "_scale_inv", "model.safetensors"


def saved(folder, recipe="ue8m0", **options):
    """A new model, written with experts in FP8."""
    torch.manual_seed(0)
    model = build_model(LATENT)
    with torch.no_grad():  # blocks with many different maxima
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter *= 1 + torch.rand(LATENT.num_experts, 1, 1)
    save_pretrained(model, folder, fp8=RECIPES[recipe], **options)
    return folder


def tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- Laws ----


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("ue8m0", torch.float32), ("ue8m0", torch.bfloat16), ("fp32", torch.float32)]
)
def test_what_is_loaded_is_written_with_the_same_bytes(recipe, dtype, tmp_path):
    first = saved(tmp_path / "first", recipe, dtype=dtype)
    save_pretrained(from_pretrained(first, dtype), tmp_path / "second", fp8=RECIPES[recipe])
    assert (first / FILE).read_bytes() == (tmp_path / "second" / FILE).read_bytes()


def publish(folder, power_of_two):
    """Replace the experts in `folder` by others, rounded once, as another program does. Returns all tensors."""
    generator = torch.Generator().manual_seed(1)
    found = tensors(folder)
    for name in [name for name in found if f"{name}{SCALES}" in found]:
        weight = torch.randn(found[name].shape, generator=generator) * torch.rand((), generator=generator)
        matrix = quantize(weight, 128, 128, power_of_two)
        found |= {name: matrix.stored, f"{name}{SCALES}": matrix.scales}
    save_file(found, folder / FILE)
    return found


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("ue8m0", torch.float32), ("ue8m0", torch.bfloat16), ("fp32", torch.float32)]
)
def test_experts_of_other_programs_keep_their_numbers(recipe, dtype, tmp_path):
    """Those with which they compute here, too: a product rounds weights as an export does."""
    before = publish(saved(tmp_path / "first", recipe), recipe == "ue8m0")
    save_pretrained(from_pretrained(tmp_path / "first", dtype), tmp_path / "second", fp8=RECIPES[recipe])
    after, changed, total = tensors(tmp_path / "second"), 0, 0
    for name in (name for name in before if f"{name}{SCALES}" in before):
        old, new = (Fp8Matrix(found[name], found[f"{name}{SCALES}"], 128, 128) for found in (before, after))
        if recipe == "fp32":  # a scale is read from a rounded product: its last bit may change
            assert torch.equal(old.stored.view(torch.uint8), new.stored.view(torch.uint8))
            assert torch.all((old.scales.view(torch.int32) - new.scales.view(torch.int32)).abs() <= 1)
            continue
        assert torch.equal(old.read(), new.read())
        halved = quantize(old.read(), 128, 128, True).scales != old.scales
        assert torch.equal(halved, new.scales != old.scales)
        changed, total = changed + int(halved.sum()), total + halved.numel()
    assert recipe == "fp32" or changed < total / 4


def test_loading_needs_memory_for_the_model_and_for_one_weight(tmp_path):
    """In bytes that torch's CPU allocator gave out, with few experts and with many."""
    beyond = []
    for experts in (3, 24):
        torch.manual_seed(0)
        model = build_model(dataclasses.replace(LATENT, num_experts=experts, expert_size=256))
        save_pretrained(model, tmp_path / str(experts), fp8=RECIPES["ue8m0"])
        peak, loaded = peak_bytes(from_pretrained, tmp_path / str(experts), torch.bfloat16)
        beyond.append(peak - sum(tensor.nbytes for tensor in loaded.state_dict().values()))
    assert 0 < beyond[1] < 1.2 * beyond[0] and beyond[1] < 20 * 256 * 136


# ---- Examples ----


def test_the_files_are_as_deepseek_publishes_them(tmp_path):
    found = tensors(saved(tmp_path / "whole", "fp32"))
    scales = {name for name in found if name.endswith(SCALES)}
    experts = {name.removesuffix(SCALES) for name in scales}
    assert len(experts) == 3 * LATENT.num_experts
    assert all(".mlp.experts." in name and found[name].dtype == DTYPE for name in experts)
    assert {found[name].dtype for name in found.keys() - experts - scales} == {torch.float32}
    down = "model.layers.1.mlp.experts.0.down_proj.weight"
    assert found[down].shape == (136, 131) and found[down + SCALES].shape == (2, 2)
    quantization = json.loads((tmp_path / "whole" / "config.json").read_text())["quantization_config"]
    full = quantization.pop("modules_to_not_convert")
    assert {f"{name}.weight" for name in full} == {n for n in found.keys() - experts - scales if found[n].ndim == 2}
    published = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    assert quantization == published
    pieces = tensors(saved(tmp_path / "pieces", "fp32", max_shard_size=1000))  # a weight and its scales apart
    assert pieces.keys() == found.keys()
    assert all(torch.equal(found[name].view(torch.uint8), pieces[name].view(torch.uint8)) for name in found)


@pytest.mark.parametrize(("fp8", "recipe", "options", "scales"), [
    ("experts", "ue8m0", (), True), ("experts", "ue8m0", ("--dtype", "float32"), False),
    ("experts", "mxfp8", (), False), ("off", "ue8m0", (), False),
])  # fmt: skip
def test_a_run_with_experts_in_fp8_exports_them_so(fp8, recipe, options, scales, tmp_path):
    run = settings(
        tmp_path / "run",
        model=LATENT,
        steps=1,
        seq_len=16,
        eval_sequences=1,
        fp8=fp8,
        fp8_recipe=recipe,
        export=str(tmp_path / "first"),
    )
    run_ranks(1, train, run)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "later"), *options]) == 0
    assert (f"model.layers.1.mlp.experts.0.up_proj.weight{SCALES}" in tensors(tmp_path / "later")) == scales
    assert (contents(tmp_path / "first") == contents(tmp_path / "later")) == (not options)
    model = from_pretrained(tmp_path / "later")
    assert model.embedding.weight.dtype == (torch.bfloat16 if scales else torch.float32)


# ---- Refusals ----


def test_other_blocks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="have blocks of 128 x 128: use the recipe ue8m0 or fp32"):
        saved(tmp_path / "first", "mxfp8")


# ---- The same files however the writers are divided, all or nothing ----


DEEPSEEK = dataclasses.replace(
    MODEL, attention="mla", head_dim=12, rope_dim=6, value_dim=10, kv_rank=14, q_rank=10, router_score="sigmoid",
    router_bias=True, router_dtype="float32", mtp_layers=1, routed_scale=1.3,
)  # fmt: skip
SMALL = {"seq_len": 16, "eval_sequences": 1}


def export(run, out, *options):
    return main(["export", str(run), "--out", str(out), *options])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("deepseek") / "run"
    run_ranks(2, train, settings(run, model=DEEPSEEK, steps=1, **SMALL))
    return run


# ---- Laws ----


def write_together(rank, checkpoint, out, size, failing=None):
    """Write on all ranks. failing: the rank that cannot read a tensor. Returns the error, or ""."""
    plan, count = plan_checkpoint_export(checkpoint), 0

    def read(name):
        nonlocal count
        count += 1
        if rank == failing and count > 5:
            raise OSError(errno.EIO, "Input/output error", "tensors")
        return plan.read(name)

    try:
        dataclasses.replace(plan, read=read).write(out, size)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def write_in_turn(rank, checkpoint, folder):
    """A write that fails on rank 1, two that do not, and one into a folder that is there."""
    attempts = [("60KB", "failed", 1), ("60KB", "shards", None), ("5GB", "whole", None), ("60KB", "shards", None)]
    return [write_together(rank, checkpoint, folder / out, size, failing) for size, out, failing in attempts]


def test_ranks_that_write_together_write_the_files_of_one_or_nothing(run, tmp_path):
    errors = run_ranks(2, write_in_turn, find_checkpoint(str(run)), tmp_path)
    failed = "rank 1: [Errno 5] Input/output error: 'tensors'"
    assert errors == [[failed, "", "", f"rank 0: {tmp_path}/shards already exists: choose another folder"]] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"shards", "whole"}
    for name, size in (("shards", "60KB"), ("whole", "5GB")):
        assert export(run, tmp_path / "one", "--max-shard-size", size) == 0
        assert contents(tmp_path / name) == contents(tmp_path / "one")
        assert len([*(tmp_path / name).glob("*.safetensors")]) > 5 or name == "whole"
        shutil.rmtree(tmp_path / "one")


# ---- All or nothing ----


@pytest.mark.parametrize("dtype,value,problem", [
    ("float32", math.nan, "holds a NaN or infinity"), ("bfloat16", -math.inf, "holds a NaN or infinity"),
    ("float16", -7e4, "holds 7e+04, and torch.float16 at most 6.55e+04: choose another dtype"),
    ("bfloat16", 3.4e38, "holds 3.4e+38, and torch.bfloat16 at most 3.39e+38"),
])  # fmt: skip
def test_a_weight_that_is_not_finite_in_its_dtype_is_refused_by_name(run, tmp_path, dtype, value, problem):
    plan = plan_checkpoint_export(find_checkpoint(str(run)), getattr(torch, dtype))
    for target in [*plan.layout.targets()][::7]:
        part = target.parts[-1]

        def read(name, wrong=target.name, row=-part.shape[0]):
            tensor = plan.read(name).clone()
            if name == wrong:
                tensor.view(len(tensor), -1)[row, 0] = value
            return tensor

        if plan.shapes[part.name][0] == getattr(torch, dtype):  # the bias of a router stays in fp32
            with pytest.raises(ValueError, match=re.escape(f"{part.name} {problem}")):
                dataclasses.replace(plan, read=read).write(tmp_path / "out")
    assert not [*tmp_path.iterdir()]
