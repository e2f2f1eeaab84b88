"""The whole prediction: its numbers agree, a measured step calibrates it, and memory is judged with an error bar."""

import dataclasses
import math
import re

import pytest

from moe_dualpipe.tools.planner.constants import find_constant, read_constants
from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.peak import memory_of
from moe_dualpipe.tools.planner.prediction import CHANGES, MEMORY_ERROR, estimate, ideal_seconds
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.routing import assumed_factor
from moe_dualpipe.tools.planner.workload import Workload, layout_of

LOAD = Workload(
    read_shape("deepseek-v3"), load_device("h800"), layout_of(2048, 1, 16, 1, 64), global_batch=15360, precision="fp8",
    schedule="dualpipe", recompute="norms", ep_backend="deepep", violation=0.5,
)  # fmt: skip
SMALL = Workload(
    read_shape("olmoe-1b-7b"), load_device("h100"), layout_of(16, pp=2, ep=8), seq=2048, micro_batch=4,
    global_batch=256,
)  # fmt: skip


def test_the_numbers_of_a_report_agree():
    found = estimate(LOAD)
    report = found.as_dict()
    ends = [report[f"step_time{end}_s"] / found.step.seconds for end in ("_low", "", "_high")]
    assert ends == pytest.approx([found.constant.low, found.constant.factor, found.constant.high]) and ends == sorted(
        ends
    )
    gpu_seconds = 2048 * report["step_time_s"]
    assert report["tokens_per_s_per_gpu"] == pytest.approx(15360 * 4096 / gpu_seconds)
    assert report["gpu_hours_per_trillion_tokens"] == pytest.approx(1e12 / report["tokens_per_s_per_gpu"] / 3600)
    flops = LOAD.shape.train_flops(4096) * report["tokens_per_s_per_gpu"]
    assert report["model_tflops_per_gpu"] == pytest.approx(flops / 1e12)
    assert report["mfu"] == pytest.approx(flops / 1978.9e12)
    assert 0 < report["hidden_fraction"] < 1 and 0 < report["bubble_fraction"] < 1
    assert report["peak_memory_gb"] == pytest.approx(sum(report["memory_gb"].values())) == memory_of(LOAD).total / 1e9
    parts = [*found.waterfall()]
    assert report["waterfall_s"] == dict(parts) and sum(seconds for _, seconds in parts) == pytest.approx(found.seconds)
    assert parts[0][1] == ideal_seconds(LOAD) == pytest.approx(found.seconds * found.utilization)
    assert (parts[0][0], parts[-1][0]) == ("model FLOPs at the peak", "software")
    assert all(seconds >= 0 for _, seconds in parts[:-1])
    assert found.imbalance == assumed_factor(256, 8, 64, 0.5) > 1  # of the layers with experts: three of 61 are dense


def test_a_constant_is_the_sum_of_its_causes():
    known = {
        "mean": 0.1, "interval": {"new family": [0.3, 0.5], "known family": [0.2, 0.25]},
        "causes": {"gpu h800": {"log": 0.01, "runs": 4}, "software mine": {"log": 0.02, "runs": 3},
                    "gpu b200": {"log": 0.04, "runs": 1},
                    "experts launched one by one on a GPU with mxfp8": {"log": 0.08, "runs": 2}},
        "families": {"deepseek": {"log": 0.16, "runs": 5}},
    }  # fmt: skip
    b200 = dataclasses.replace(LOAD, device=load_device("b200"))
    other = dataclasses.replace(LOAD, shape=dataclasses.replace(LOAD.shape, name="strange"))
    dense = dataclasses.replace(b200, shape=read_shape("llama3-8b"))
    for load, software, log, runs, family, (fast, slow) in (
        (LOAD, None, 0.27, 4, 5, (0.2, 0.25)), (LOAD, "mine", 0.29, 4, 5, (0.2, 0.25)),
        (b200, None, 0.38, 1, 5, (0.2, 0.25)), (other, None, 0.11, 4, 0, (0.3, 0.5)),
        (dataclasses.replace(b200, cuda_graphs="full"), None, 0.30, 1, 5, (0.2, 0.25)),
        (dense, None, 0.14, 1, 0, (0.3, 0.5)),
    ):  # fmt: skip
        found = find_constant(load, software, known)
        assert math.log(found.factor) == pytest.approx(log)
        assert (found.runs, found.family_runs) == (runs, family)
        assert math.log(found.factor / found.low) == pytest.approx(fast)
        assert math.log(found.high / found.factor) == pytest.approx(slow)
    with pytest.raises(ValueError, match=r"--software must be one of automodel, deepseek, .*: got 'mine'"):
        estimate(LOAD, "mine")
    assert {"gpu h100", "software megatron"} <= {*read_constants()["causes"]}


def test_a_measured_step_replaces_the_constant():
    found = estimate(LOAD)
    own = found.measured(2 * found.seconds)
    assert own.seconds == pytest.approx(2 * found.seconds) and own.gpu_hours == pytest.approx(2 * found.gpu_hours)
    low, high = own.interval
    assert low * 1.06 == pytest.approx(own.seconds) == pytest.approx(high / 1.06)
    assert (own.step, own.memory) == (found.step, found.memory)


def test_differences_are_what_another_prediction_says():
    found = estimate(SMALL)
    slower, faster = found.differences(True), found.differences(False)
    for listed, sign in ((slower, 1), (faster, -1)):
        assert len(listed) >= 2 and [abs(more) for _, more in listed] == sorted(
            (abs(m) for _, m in listed), reverse=True
        )
        for what, more in listed:
            changed = estimate(dataclasses.replace(SMALL, **CHANGES[what])).seconds
            assert more == pytest.approx(changed - found.seconds) and more * sign > 0.01 * found.seconds
    names = " ".join(what for what, _ in slower)
    assert "--recompute full" in names and "--attention plain" in names
    assert "--ep-backend deepep" in (names := " ".join(what for what, _ in faster)) and "--overlap" in names
    short = estimate(dataclasses.replace(SMALL, micro_batch=1))
    assert "--cuda-graphs full" in short.differences(False)[0][0]


def test_memory_is_judged_with_its_error():
    def advice(memory_gb, **options):
        device = dataclasses.replace(SMALL.device, memory_gb=memory_gb)
        return estimate(dataclasses.replace(SMALL, device=device, **options)).memory_advice()

    kinds = {kind: memory_of(dataclasses.replace(SMALL, recompute=kind)).total / 1e9 for kind in ("none", "full")}
    total = kinds["none"]
    assert advice(1.01 * total * (1 + MEMORY_ERROR)) == ""
    for share in (0.99 * (1 + MEMORY_ERROR), 1.0, 1.01 * (1 - MEMORY_ERROR)):
        assert advice(share * total).startswith("It may not fit: ")
    small = 1.01 * kinds["full"]
    assert small < (1 - MEMORY_ERROR) * total
    kind = re.search(r"With --recompute (\w+), it needs ([\d.]+) GB", advice(small))
    assert kind is not None and kind[1] == "full" and float(kind[2]) == pytest.approx(kinds["full"], abs=0.06)
    assert "plan search" in advice(0.5 * kinds["full"])
