"""Before a run starts: what memory is known, what is refused, and that the changes named do fit."""

import dataclasses
import re
from typing import Any

import pytest
import torch

from moe_dualpipe.models import ModelConfig
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.schedule import build, default_schedule
from moe_dualpipe.training.config import BatchConfig, CheckpointConfig, OptimizerConfig, TrainConfig
from moe_dualpipe.training.layout_choice import Choice
from moe_dualpipe.training.memory_check import MARGIN, memory_line, memory_problem, step_memory

MODEL = ModelConfig(num_layers=8, num_experts=8, experts_per_token=3, dense_size=192)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
FLAGS = {"micro-batch-size": int, "recompute": str}


def config_of(batch=BatchConfig(seq_len=96, batch_size=48), compute=(), **changes) -> Any:  # noqa: B008
    config: Any = TrainConfig(model=MODEL, checkpoint=CheckpointConfig(save_async=False))
    return dataclasses.replace(
        config, batch=batch, compute=dataclasses.replace(config.compute, **dict(compute)), **changes
    )


def run_of(config, layout=Layout(), size=3, dtype=torch.float32, device=CPU) -> Any:  # noqa: B008
    name = default_schedule(layout.pp, layout.ep)
    schedule = build(name, layout.pp, config.batch.batch_size // (layout.dp * size))
    return config, Choice(layout, name, schedule, size), dtype, device


def largest(*run):
    return max(step_memory(*run), key=lambda rank: rank.total)


def low(*run):
    needs = largest(*run)
    return needs.total - MARGIN * (needs.activations + needs.temporary)


def test_what_fits_is_no_problem_and_one_byte_less_is():
    run = run_of(config_of(), Layout(2, 2, 2))
    assert memory_problem(*run, free_bytes=round(low(*run)) + 2) == ""
    assert memory_problem(*run, free_bytes=round(low(*run)) - 2).startswith("pipeline rank ")


@pytest.mark.parametrize("share", [0.95, 0.7, 0.5, 0.35])
@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2, 2), Layout(1, 4, 4)], ids=str)
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_the_change_that_a_problem_names_fits(layout, share, device):
    config = config_of()
    run = run_of(config, layout, dtype=torch.bfloat16, device=device)
    free = round(share * low(*run))
    text = memory_problem(*run, free_bytes=free)
    assert text.endswith(", or --set health.check_memory=false to start anyway") and "\n" not in text
    use, needs, unit = re.fullmatch(
        r".* are free: use (.*?)(?:, which needs ([\d.]+) (.iB))?, or --set .*", text
    ).groups()
    if needs is None:  # with everything saved, it does not fit either
        most = run_of(config_of(compute={"recompute": "full", "fused_loss": True}), layout, 1, torch.bfloat16, device)
        assert use == "more processes, a smaller model or shorter sequences" and low(*most) > free
        return
    found = {name: kind(value) for name, kind in FLAGS.items() for value in re.findall(rf"--{name} (\w+)", use)}
    compute = {"recompute": found.get("recompute", "none"), "fused_loss": "--fused-loss" in use}
    changed = run_of(config_of(compute=compute), layout, found.get("micro-batch-size", 3), torch.bfloat16, device)
    assert low(*changed) <= free < low(*run)
    assert low(*changed) / 2 ** {"MiB": 20, "GiB": 30}[unit] == pytest.approx(float(needs), abs=0.06)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_in_the_background_copies_weights_and_moments(name, dtype):
    tiny = config_of(
        BatchConfig(seq_len=3, batch_size=16), {"recompute": "full", "fused_loss": True}, optim=OptimizerConfig(name)
    )  # fmt: skip
    saving = dataclasses.replace(tiny, checkpoint=CheckpointConfig(save_async=True))
    run = run_of(saving, size=1, dtype=dtype)
    needs = largest(*run)
    master = needs.weights if dtype == torch.float32 else 0  # else the state of the optimizer has the fp32 weights
    copied = needs.weights + 2 * needs.optimizer + master
    assert copied > needs.total
    text = memory_problem(*run, free_bytes=copied - 1)
    assert "copy for checkpoints" in text and ": use --set checkpoint.save_async=false, which needs " in text
    assert memory_problem(*run, free_bytes=copied) == ""
    assert memory_problem(*run_of(tiny, size=1, dtype=dtype), free_bytes=copied - 1) == ""
    on_gpu = run_of(saving, size=1, dtype=dtype, device=GPU)
    assert memory_problem(*on_gpu, free_bytes=largest(*on_gpu).total) == ""


@pytest.mark.parametrize("name,each,ends", [("adamw", 12, 0), ("muon", 8, 4)])
def test_the_optimizer_has_one_moment_or_two_and_fp32_weights(name, each, ends):
    """Embedding and head have two."""
    run = run_of(config_of(optim=OptimizerConfig(name)), dtype=torch.bfloat16)
    needs = largest(*run)
    assert needs.optimizer == each * needs.gradients // 4 + ends * 2 * MODEL.vocab_size * MODEL.hidden_size
    assert f"{needs.total / 2**20:,.1f} MB on the rank that needs the most (weights " in memory_line(*run)


@pytest.mark.parametrize(
    "changes", [{"freeze": ("embedding.*",)}, {"attention": "none.py:A"}, {"experts": "none.py:E"}]
)
def test_memory_with_frozen_parameters_and_layers_of_ones_own_is_unknown(changes):
    config = config_of(**changes) if "freeze" in changes else config_of()
    if "freeze" not in changes:
        config = dataclasses.replace(config, model=dataclasses.replace(MODEL, **changes))
    run = run_of(config)
    assert memory_line(*run) == "" and memory_problem(*run, free_bytes=1) == ""
