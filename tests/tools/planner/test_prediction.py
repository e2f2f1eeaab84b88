"""The whole prediction: its keys, its waterfall and its interval."""

import dataclasses
import math
import re

import pytest

from moe_dualpipe.tools.planner.constants import find_constant
from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.prediction import estimate, ideal_seconds
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.real_routing import load_factor
from moe_dualpipe.tools.planner.workload import Workload, layout_of
from moe_dualpipe.tools.planner.workload_memory import memory_of

LOAD = Workload(
    read_shape("deepseek-v3"), load_device("h800"), layout_of(2048, 1, 16, 1, 64), global_batch=15360, precision="fp8",
    schedule="dualpipe", recompute="norms", ep_backend="deepep", routing="real",
)  # fmt: skip
KEYS = {
    "step_time_s", "step_time_low_s", "step_time_high_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu",
    "hidden_fraction", "bubble_fraction", "peak_memory_gb", "gpu_hours_per_trillion_tokens",
}  # fmt: skip


def test_the_report_has_its_keys_and_they_agree():
    found = estimate(LOAD)
    report = found.as_dict()
    assert {*report} >= KEYS
    assert report["step_time_low_s"] < report["step_time_s"] < report["step_time_high_s"]
    ends = [report[f"step_time_{end}_s"] / found.step.seconds for end in ("low", "high")]
    assert ends == pytest.approx([found.constant.low, found.constant.high])
    gpu_seconds = 2048 * report["step_time_s"]
    assert report["tokens_per_s_per_gpu"] == pytest.approx(15360 * 4096 / gpu_seconds)
    assert report["gpu_hours_per_trillion_tokens"] == pytest.approx(1e12 / report["tokens_per_s_per_gpu"] / 3600)
    flops = LOAD.shape.train_flops(4096) * report["tokens_per_s_per_gpu"]
    assert report["model_tflops_per_gpu"] == pytest.approx(flops / 1e12)
    assert report["mfu"] == pytest.approx(flops / 1978.9e12)
    assert 0 < report["hidden_fraction"] < 1 and 0 < report["bubble_fraction"] < 1
    assert report["peak_memory_gb"] == pytest.approx(sum(report["memory_gb"].values())) == memory_of(LOAD).total / 1e9


def test_the_waterfall_goes_from_the_ideal_to_the_prediction():
    found = estimate(LOAD)
    parts = list(found.waterfall())
    assert sum(seconds for _, seconds in parts) == pytest.approx(found.seconds)
    assert parts[0][1] == ideal_seconds(LOAD) == pytest.approx(found.seconds * found.utilization)
    names = [name for name, _ in parts]
    assert names[0] == "model FLOPs at the peak" and names[-1] == "software" and len({*names}) == len(names)
    assert all(seconds >= 0 for _, seconds in parts[:-1])


def test_the_software_chooses_the_constant():
    constants = [find_constant("h100", "fp8", name).factor for name in (None, "megatron", "torchtitan")]
    assert constants[1] < constants[0] < constants[2]
    load = dataclasses.replace(LOAD, device=load_device("h100"))
    assert estimate(load, "torchtitan").seconds / estimate(load).seconds == pytest.approx(constants[2] / constants[0])


def test_a_gpu_without_runs_gets_the_constant_of_the_software():
    """Runs of torchtitan are slow on another GPU, so they are expected to be slow on this one."""
    known = {"mean": 0.1, "spread": 0.2, "prior": 1.0, "fast": 1.0, "slow": 2.0, "groups": [
        {"gpu": "h100", "precision": "fp8", "software": "slow", "rows": 2, "families": {"llama": 0.5, "qwen3": 0.7}},
        {"gpu": "h100", "precision": "fp8", "software": "fast", "rows": 3, "families": {"llama": 0.0}},
    ]}  # fmt: skip
    found = find_constant("b200", "bf16", "slow", known)
    assert found.rows == 0 and math.log(found.factor) == pytest.approx((0.1 + 0.5 + 0.7) / 3)
    assert math.log(find_constant("b200", "bf16", None, known).factor) == pytest.approx(0.1)
    assert math.log(found.factor / found.low) == pytest.approx(0.2 * math.sqrt(2))  # as wide as without any run
    assert math.log(found.high / found.factor) == pytest.approx(2 * 0.2 * math.sqrt(2))
    same = find_constant("h100", "fp8", "slow", known)
    assert same.rows == 2 and same.high / same.low < found.high / found.low


def test_short_layers_of_experts_may_wait_for_the_host():
    small = Workload(read_shape("qwen3-30b-a3b"), load_device("b200"), layout_of(8, ep=8), global_batch=512)
    text = estimate(small).host_advice()
    each = float(re.search(r"A layer takes ([\d.]+) ms", text)[1])
    assert each == pytest.approx(1e3 * estimate(small).seconds / 64 / 48, abs=0.06) and each < 9
    assert estimate(dataclasses.replace(small, micro_batch=8)).host_advice() == ""
    dense = dataclasses.replace(small, shape=read_shape("llama3-8b"), layout=layout_of(8))
    assert estimate(dense).host_advice() == ""


def test_an_unknown_software_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"--software must be one of deepseek, mega.*: got 'mine'"):
        estimate(LOAD, "mine")


def test_a_workload_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="--ep 3 does not divide"):
        estimate(dataclasses.replace(LOAD, layout=layout_of(2048, 1, 16, 1, 3)))


def test_the_imbalance_is_that_of_layers_with_experts():
    assert estimate(LOAD).imbalance == load_factor(256, 8, 64) > 1  # three of 61 layers are dense


def test_the_fullest_rank_counts_wherever_it_is():
    """A head with a large vocabulary makes the last stage the fullest, with gpipe, in which all ranks hold as much."""
    shape = dataclasses.replace(read_shape("llama3-8b"), vocab=1_000_000)
    load = Workload(shape, LOAD.device, layout_of(4, pp=4), global_batch=8, schedule="gpipe")
    head = 8 * 4096 * 4 * shape.vocab  # log-probabilities of 8 micro-batches, in fp32
    assert memory_of(load).activations > head


def test_memory_follows_the_layout():
    def parts(**numbers):
        layout = layout_of(2048, **{"pp": 16, "ep": 64, **numbers})
        return memory_of(dataclasses.replace(LOAD, schedule="1f1b", layout=layout))

    base = parts()
    assert parts(ep=128).weights < base.weights and parts(pp=32).weights < base.weights
    assert parts(tp=2).activations < base.activations
    assert parts(ep=1, tp=8).weights < 0.3 * parts(ep=1, tp=2).weights  # tp divides experts, too
    assert memory_of(dataclasses.replace(LOAD, zero=False)).optimizer > 10 * memory_of(LOAD).optimizer
    assert memory_of(dataclasses.replace(LOAD, recompute="full")).activations < memory_of(LOAD).activations


def test_what_does_not_fit_is_said_with_a_way_out():
    large = dataclasses.replace(
        LOAD, shape=read_shape("olmoe-1b-7b"), layout=layout_of(8, ep=8), global_batch=128, micro_batch=8,
        schedule="1f1b", recompute="none",
    )  # fmt: skip
    assert estimate(large).memory.total > 80e9
    kind = re.search(r"With --recompute (\w+), it needs ([\d.]+) GB", estimate(large).memory_advice())
    assert kind is not None
    fits = estimate(dataclasses.replace(large, recompute=kind[1]))
    assert fits.memory_advice() == "" and fits.memory.total / 1e9 == pytest.approx(float(kind[2]), abs=0.06)
    tiny = dataclasses.replace(large, device=dataclasses.replace(LOAD.device, memory_gb=10.0))
    assert "plan search" in estimate(tiny).memory_advice()
