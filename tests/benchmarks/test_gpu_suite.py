"""The GPU suite from end to end, as far as a CPU goes: tiny shapes, Triton's interpreter, the clock on the wall."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import overlap
from benchmarks.gpu.goals import hidden_share

ROOT = Path(__file__).parents[2]
OTHERS = '''
import dataclasses

from benchmarks.gpu.implementations import build_grouped_mm


def doubled(problem):
    """Right but for the gradient of one expert: the kind of mistake that a loss curve hides."""
    right = build_grouped_mm(problem)

    def twice_the_last(gate_up):
        gate_up[-1] *= 2
        return gate_up

    return dataclasses.replace(right, to_problem_layout={"gate_up": twice_the_last})


def explodes(problem):
    raise RuntimeError("no such tile\\nand much more")


def stops_later(problem):
    """Fails only when it is timed."""
    right, calls = build_grouped_mm(problem), []

    def forward():
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("out of patience")
        return right.forward()

    return dataclasses.replace(right, forward=forward)
'''


def suite(out, *arguments, path=""):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "others.py").write_text(OTHERS)
    names = ["triton", "grouped_mm", "liger", "scattermoe", "sonicmoe"]
    names += ["others:doubled", "others:explodes", "others:stops_later"]
    done = suite(folder / "out", "--smoke", "--contestants", *names, path=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder / "out"


@pytest.fixture(scope="module")
def results(smoke):
    return json.loads((smoke[1] / "results.json").read_text())


def test_every_section_leaves_results_with_units(results):
    assert {"about", "ceilings", "tests", "experts", "permute", "routing", "overlap", "training"} <= results.keys()
    assert results["ceilings"]["dense"]["unit"] == "TFLOP/s"
    assert results["ceilings"]["copy"]["low"] <= results["ceilings"]["copy"]["high"]
    assert all("reason" not in record for record in results.values() if isinstance(record, dict))
    assert "torch" in results["about"]["versions"]
    assert "tests collected" in results["tests"]["summary"]  # on a CPU they are not run here


def test_our_kernels_agree_and_are_timed(results):
    (entry,) = results["experts"]["shapes"]
    for name in ("triton", "grouped_mm"):
        outcome = entry["contestants"][name]
        assert outcome["status"] == "timed"
        assert all(error < 1e-5 for error in outcome["errors"].values())
        for part in ("forward", "backward", "both"):
            assert 0 < outcome[part]["low"] <= outcome[part]["median"] <= outcome[part]["high"]
        assert outcome["kept_bytes_per_token"] > 0
    shape, kept = entry["shape"], entry["contestants"]["triton"]["kept_bytes_per_token"]
    assert kept <= shape["kept_bytes_formula"] + 40 * shape["K"] + 64 * shape["E"]


def test_peers_agree_where_they_are_installed(results):
    (entry,) = results["experts"]["shapes"]
    for name in ("liger", "scattermoe", "sonicmoe"):
        outcome = entry["contestants"][name]
        assert outcome["status"] in ("timed", "not installed"), outcome


def test_a_wrong_contestant_is_reported_with_its_error_and_not_timed(smoke, results):
    (entry,) = results["experts"]["shapes"]
    outcome = entry["contestants"]["others:doubled"]
    assert outcome["status"] == "wrong"
    assert outcome["errors"]["gate_up"] > 0.1 > outcome["errors"]["down"]
    assert "forward" not in outcome
    assert "gate_up" in outcome["reason"]
    assert "WRONG" in (smoke[1] / "results.md").read_text()


def test_one_that_fails_is_reported_and_the_others_go_on(results):
    (entry,) = results["experts"]["shapes"]
    early, late = (entry["contestants"][f"others:{name}"] for name in ("explodes", "stops_later"))
    assert (early["status"], early["reason"]) == ("failed", "RuntimeError: no such tile")
    assert (late["status"], late["reason"]) == ("failed", "RuntimeError: out of patience")
    assert "forward" not in late


def test_moving_and_routing_agree_with_the_reference(results):
    (moved,) = results["permute"]["shapes"]
    (routed,) = results["routing"]["sizes"]
    outcomes = [moved["permute"], moved["unpermute"], routed["route"], routed["order"]]
    assert {(kernels, o["status"]) for each in outcomes for kernels, o in each.items()} == {
        ("triton", "timed"), ("reference", "timed")
    }  # fmt: skip


def test_pairs_are_measured_both_ways(smoke, results):
    runs = results["overlap"]["runs"]
    assert list(runs) == list(overlap.RUNS)
    for found in runs.values():
        ways = found["sequential"], found["overlapped"]
        assert found["bound_us"] == max(min(way[key] for way in ways) for key in ("compute_us", "comm_us"))
        assert 0 < found["overlapped"]["comm_us"] <= found["overlapped"]["window_us"]
    assert "DeepSeek's training trace" in runs[overlap.REPLAY_RUN]["link"]
    assert "| DeepSeek's trace (H800) |  | 129.0 |  | 124.3 | 113.4 | 96.3% |" in (smoke[1] / "results.md").read_text()


def test_the_goal_of_the_overlap_is_judged_at_its_size_only():
    found = {"status": "timed", "overlapped": {"hidden_fraction": 0.975}}
    for preset, expected in (("deepseek-v3", 97.5), ("tiny", None)):
        assert hidden_share({"overlap": {"preset": preset, "runs": {overlap.REPLAY_RUN: found}}}) == expected
    assert (
        hidden_share({"overlap": {"preset": "deepseek-v3", "runs": {overlap.REPLAY_RUN: {"status": "skipped"}}}})
        is None
    )
    assert hidden_share({}) is None


def test_training_runs_start_alike(results):
    runs = results["training"]["runs"]
    assert set(runs) == {"triton", "reference", "loop"}
    for run in runs.values():
        assert run["status"] == "timed"
        assert run["first_losses"] == pytest.approx(runs["loop"]["first_losses"], rel=1e-3)


def test_tables_have_as_many_cells_as_columns_and_the_goals_come_last(smoke):
    stdout, out = smoke
    text = (out / "results.md").read_text()
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1, block
    for heading in ("Expert MLP", "Permute and unpermute", "Routing", "Overlap of a pair", "Training", "Goals"):
        assert f"## {heading}" in text
    assert text.count("not measured") == 9  # at this shape nothing says anything about a goal
    assert stdout.index("## Goals") > stdout.index("forward + backward, TFLOP/s\n|")


def test_figures(smoke):
    pytest.importorskip("matplotlib")
    for name in ("experts.png", "training.png"):
        assert (smoke[1] / name).read_bytes().startswith(b"\x89PNG")


def test_time_that_is_spent_skips_sections_politely(tmp_path):
    done = suite(tmp_path / "out", "--smoke", "--only", "permute", "routing", "--minutes", "0.01")
    assert done.returncode == 0, done.stderr
    assert "skipped, --minutes 0.01 were spent before" in done.stdout
    assert json.loads((tmp_path / "out" / "results.json").read_text())["routing"]["status"] == "skipped"


@pytest.mark.parametrize("arguments,problem", [
    (["--contestants", "lieger"], "unknown contestant 'lieger'"),
    (["--minutes", "-1"], "--minutes must be a positive number: got -1"),
    (["--training-seconds", "nan"], "--training-seconds must be a positive number: got nan"),
    (["--tuning-shapes", "-3"], "--tuning-shapes must be at least 0: got -3"),
])  # fmt: skip
def test_arguments_that_make_no_sense_end_in_one_line(tmp_path, arguments, problem):
    done = suite(tmp_path, "--smoke", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"benchmarks.gpu: error: {problem}")
    assert done.stderr.count("\n") == 1
