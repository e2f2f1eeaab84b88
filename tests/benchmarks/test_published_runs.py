"""The rows of benchmarks/published_runs: their format, and numbers of a row that must fit each other."""

import json
from pathlib import Path

import pytest

from moe_dualpipe.tools.planner import load_device

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "published_runs").glob("*.json"))
COUNTS = ("num_gpus", "tp", "pp", "vpp", "ep", "cp", "dp", "seq", "micro_batch", "global_batch")
METRICS = {"tokens/s/GPU", "step_time_s", "model_tflops/s/GPU"}
KEYS = {"source", "model", "gpu", *COUNTS, "precision", "recompute", "metric", "value", "notes", "also", "group"}


def rows(path):
    return json.loads(path.read_text())


def positive(value, kinds):
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


def tokens_per_second(row):
    """Tokens per second and GPU that the row states, in its value or beside it."""
    return row["value"] if row["metric"] == "tokens/s/GPU" else row["also"].get("tokens_per_s_per_gpu")


def step_seconds(row):
    return row["value"] if row["metric"] == "step_time_s" else row["also"].get("step_time_s_derived")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_format(path):
    for row in rows(path):
        assert row.keys() == KEYS, row
        assert all(row[name] is None or positive(row[name], int) for name in COUNTS), row
        assert row["metric"] in METRICS and positive(row["value"], int | float), row
        assert all(positive(number, int | float) for number in row["also"].values()), row
        assert all(row[name] for name in ("source", "model", "notes", "group")), row
        assert "@" in row["source"] or row["source"].startswith("arXiv "), row
        assert row["precision"] is None or isinstance(row["precision"], str), row
        assert row["recompute"] is None or isinstance(row["recompute"], str), row
        load_device(row["gpu"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_numbers_of_a_row_fit_each_other(path):
    for row in rows(path):
        division = [row[name] for name in ("tp", "pp", "cp", "dp")]
        if None not in division:
            tp, pp, cp, dp = division
            assert tp * pp * cp * dp == row["num_gpus"], row
        if row["ep"] and None not in division:
            assert row["num_gpus"] // row["pp"] % row["ep"] == 0, row
        if row["micro_batch"] and row["global_batch"] and row["dp"]:
            assert row["global_batch"] % (row["micro_batch"] * row["dp"]) == 0, row
        rate, seconds = tokens_per_second(row), step_seconds(row)
        if rate and seconds and row["global_batch"] and row["seq"]:
            tokens = row["global_batch"] * row["seq"]
            assert rate * seconds * row["num_gpus"] == pytest.approx(tokens, rel=0.01), row
        peak = load_device(row["gpu"]).peak
        tflops = row["value"] if row["metric"] == "model_tflops/s/GPU" else row["also"].get("model_tflops_per_gpu", 1)
        assert tflops * 1e12 < max(rate for rate in peak.values() if rate), row
