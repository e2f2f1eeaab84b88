"""The planner against published training runs: rows are read as they are printed, and what is scored was not seen."""

import dataclasses
import json
import math
import re

import pytest

from benchmarks.planner.__main__ import OWN, report
from benchmarks.planner.fit import GROUPS, HOSTS, Point, fit, predict, score, summary
from benchmarks.planner.ratios import pairs
from benchmarks.planner.rows import Row, read_rows, row_of
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.tools.planner import load_device, read_shape
from moe_dualpipe.tools.planner.constants import find_constant, read_constants
from tests.support.runs import ROOT

FILES = sorted(OWN.glob("*.json"))
COUNTS = ("num_gpus", "tp", "pp", "vpp", "ep", "cp", "dp", "seq", "micro_batch", "global_batch")
KEYS = {
    "source",
    "model",
    "gpu",
    *COUNTS,
    "precision",
    "recompute",
    "metric",
    "value",
    "notes",
    "also",
    "group",
    "planned",
}


def records(path):
    return json.loads(path.read_text())


def positive(value, kinds):
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rows_have_their_keys_and_their_numbers_fit_each_other(path):
    for row in records(path):
        assert row.keys() == KEYS, row
        assert all(row[name] is None or positive(row[name], int) for name in COUNTS), row
        assert positive(row["value"], int | float), row
        assert all(row[name] for name in ("source", "model", "notes", "group")), row
        assert re.search(r"@|#\d|arXiv ", row["source"]), row
        also = row["also"]
        split = [row[name] for name in ("tp", "pp", "cp", "dp")]
        if None not in split:
            shared = 8 if row["group"] == "megascale-moe" and row["tp"] == 1 else 1  # sequence parallelism of attention
            assert math.prod(split) * shared == row["num_gpus"], row
            assert not row["ep"] or row["num_gpus"] // row["pp"] % row["ep"] == 0, row
            assert not row["micro_batch"] or row["global_batch"] % (row["micro_batch"] * row["dp"]) == 0, row
        rate = row["value"] if row["metric"] == "tokens/s/GPU" else also.get("tokens_per_s_per_gpu")
        seconds = row["value"] if row["metric"] == "step_time_s" else also.get("step_time_s_derived")
        if rate and seconds and row["global_batch"] and row["seq"]:
            assert rate * seconds * row["num_gpus"] == pytest.approx(row["global_batch"] * row["seq"], rel=0.01), row
        tflops = row["value"] if row["metric"] == "model_tflops/s/GPU" else also.get("model_tflops_per_gpu", 1)
        peak = load_device(row["gpu"].split()[0].split("-")[0]).peak
        assert tflops * 1e12 < max(rate for rate in peak.values() if rate), row


@pytest.mark.parametrize("metric,value", [
    ("step_time_s", 8.0), ("tokens/s/GPU", 512.0), ("samples/s/GPU", 0.5), ("model_tflops/s/GPU", 1.0),
    ("GPU_hours_per_1T_tokens", 1e12 / 512 / 3600),
])  # fmt: skip
def test_every_metric_is_the_seconds_of_a_step(metric, value):
    """64 sequences of 1,024 tokens on 16 GPUs in 8 s."""
    planned = {
        "shape": "qwen3-30b-a3b", "mtp": 0, "device": "h100", "vpp": 1, "cp": 1, "micro_batch": 1, "precision": "bf16",
        "schedule": "1f1b", "recompute": "norms", "ep_backend": "deepep", "overlap": True, "real_routing": False,
        "attention": "fastest", "cuda_graphs": "partial", "software": "megatron",
    }  # fmt: skip
    record = {
        "num_gpus": 16, "tp": 1, "pp": 2, "ep": 8, "seq": 1024, "global_batch": 64, "metric": metric, "value": value,
        "planned": planned,
    }  # fmt: skip
    row = row_of(record)
    assert row is not None
    load = row.load
    scale = load.shape.train_flops(1024) * 512 / 1e12 if metric.startswith("model") else 1  # TFLOP/s of 512 tokens/s
    assert row.seconds == pytest.approx(8.0 * scale)
    assert (load.shape.name, load.device.name, load.layout.dp, load.layout.pp) == ("qwen3-30b-a3b", "h100", 8, 2)
    assert (load.recompute, load.ep_backend, load.overlaps, load.cuda_graphs) == ("norms", "deepep", True, "partial")
    assert (row.software, row.family) == ("megatron", "qwen3")
    assert row_of(record | {"planned": None}) is None


# ---- The fit, on made-up rows ----


(TEMPLATE, *_) = read_rows([OWN / "modelzoo.json"])


def made_up(name, gpu, software, log_ratio, vote=1.0, host=0.0):
    """A point whose measured time is exp(log_ratio) times 10 s, which it predicts. host: what each of HOSTS adds."""
    shape = dataclasses.replace(TEMPLATE.load.shape, name=name)
    device = dataclasses.replace(TEMPLATE.load.device, name=gpu)
    load = dataclasses.replace(TEMPLATE.load, shape=shape, device=device)
    record = {"metric": "step_time_s", "value": 10 * math.exp(log_ratio)}
    return Point(Row(record, load, software), {h: 10 * math.exp(host * i) for i, h in enumerate(HOSTS)}, vote)


def constant(point, known):
    return find_constant(point.row.load, point.row.software, known)


MANY = ("llama", "mixtral", "mpt", "nemotron", "megascale")


def test_a_family_has_a_factor_of_its_own_which_few_runs_hardly_change():
    usual = [made_up(name, "h100", "a", 0.1) for name in MANY for _ in range(6)]
    odd = made_up("gpt-oss-120b", "h100", "a", 0.5)
    few, some = (fit([*usual, *[odd] * number]) for number in (1, 9))
    logs = [math.log(constant(odd, known).factor) for known in (fit(usual), few, some)]
    assert logs == sorted(logs) and logs[0] == pytest.approx(0.1, abs=0.02)
    assert logs[1] < 0.25 and 0.35 < logs[2] < 0.5
    assert (constant(odd, few).family_runs, constant(odd, some).family_runs) == (1, 9)


def test_one_run_that_went_wrong_counts_little_and_a_configuration_counts_once():
    usual = [made_up(name, "h100", "a", 0.1) for name in MANY for _ in range(6)]
    wrong = fit([*usual, made_up("llama", "h100", "a", 3.0)])
    assert math.log(constant(made_up("qwen3", "h100", "a", 0), wrong).factor) == pytest.approx(0.1, abs=0.02)
    load = dataclasses.replace(TEMPLATE.load, shape=read_shape("tiny"), layout=Layout(), global_batch=2)
    tiny = dataclasses.replace(TEMPLATE, load=load)
    rows = [tiny, tiny, dataclasses.replace(tiny, software="other")]
    assert [point.vote for point in predict(rows)] == [0.5, 0.5, 1.0]


def test_the_seconds_of_a_launch_are_those_that_fit_best():
    slow = [made_up(name, "h100", "a", 0.1 + 0.2 * 2, host=0.2) for name in MANY for _ in "12"]
    points = [*slow, *(made_up(name, "h100", "a", 0.1) for name in MANY for _ in "12")]
    assert fit(points)["host"] == {"x86": HOSTS[2], "grace": HOSTS[2]}


def test_a_group_is_predicted_without_its_own_rows():
    points = [made_up(name, gpu, "a", 0.1) for name in MANY for gpu in ("h100", "a100") for _ in "123"]
    points += [made_up("gpt-1b", gpu, "a", 0.5) for gpu in ("h100", "a100") for _ in range(8)]
    strict, known = score(points, "new family"), score(points, "known family")
    for scores, log in ((strict, 0.1), (known, 0.4)):
        errors = [one.error for one in scores if one.point.row.family == "gpt"]
        assert len(errors) == 16 and errors[0] == pytest.approx(math.exp(log - 0.5) - 1, abs=0.06)
    votes, mean, median, inside, slow = summary(strict)
    assert votes == len(points) and mean == pytest.approx(sum(abs(one.error) for one in strict) / votes)
    assert median < mean and 0.6 < inside < 1 and slow < 0.7
    assert "| gpt | 16 | 16 |" in report(strict) and "| all | 46 | 46 |" in report(strict)


def test_ratios_are_of_the_second_run_to_the_first():
    rows = [row for row in read_rows([OWN / "papers.json"]) if row.software == "zero-bubble"]
    points = [Point(row, dict.fromkeys(HOSTS, row.seconds * (1 + 0.01 * i))) for i, row in enumerate(rows)]
    for what, _, measured, predicted in (found := list(pairs(points))):
        assert measured < predicted < 1.3 * measured and " -> " in what
    assert len(found) >= 12


# ---- What the documentation says ----


@pytest.fixture(scope="module")
def points():
    return predict(read_rows(FILES))


@pytest.mark.long
def test_the_constants_are_those_of_the_fit(points):
    assert json.loads(json.dumps(fit(points))) == read_constants()


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_the_errors_in_the_documentation_are_those_of_the_score(points, group):
    lines = report(score(points, group)).splitlines()
    page = (ROOT / "docs" / "planning.md").read_text()
    by_family = (FILES[0].parent / "README.md").read_text()
    _, _, _, mean, median, _, slow, inside = lines[-1].strip("| ").split(" | ")
    assert f"| {mean} | {median} | {inside} | {slow} |" in page
    assert group != "new family" or all(line in by_family for line in lines[2:])
