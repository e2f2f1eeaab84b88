"""Tuning: which configurations are tried, that only correct ones win, and that the package uses the new table."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import tune
from benchmarks.gpu import measure, tuning
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.tuned_gemms import SMOKE_TILES, Gemm, candidate_configs
from moe_dualpipe.kernels.gpu import configs
from moe_dualpipe.kernels.gpu.configs import TileConfig, TunedKernel
from tests.support.interpreted import run_main

CPU = torch.device("cpu")
H100, A100, MI300 = 232_448, 166_912, 65_536  # maximum shared memory of a block, in bytes


@pytest.mark.parametrize("shared", [H100, A100, MI300])
@pytest.mark.parametrize("kernel", configs.KERNEL_NAMES)
def test_candidates_are_few_and_fit_in_registers_and_shared_memory(kernel, shared):
    found = candidate_configs(kernel, 2, shared, tma=shared == H100, maxnreg=shared != MI300)
    assert 4 < len(found) <= 86
    assert len(set(found)) == len(found)
    for c in found:
        assert c.stages * (c.block_m + c.block_n) * c.block_k * 2 <= shared
        assert c.block_m * c.block_n <= 128 * 32 * c.warps
    assert {c.tma for c in found} == ({False, True} if shared == H100 else {False})


def never(_config):
    return False


NOW = [0.0]
"""The time of the clock below."""


@pytest.fixture(autouse=True)
def _a_clock_that_launches_move(monkeypatch):
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: NOW[0]))


def make_gemm(milliseconds, wrong=never, fails=never):
    """Return a GEMM whose time, result and failure depend on the configuration in use."""
    expected = torch.arange(1.0, 9.0)

    def launch():
        config = configs.lookup("up", "interpreter", 4, 32, 32)
        if fails(config):
            raise RuntimeError("out of resources: shared memory")
        NOW[0] += milliseconds(config) / 1e3
        return (expected * (1.1 if wrong(config) else 1),)

    return Gemm("up", 32, 32, launch, (expected,))


SLOW, MIDDLE, FAST = (TileConfig(m, 64, 32, 4, 2) for m in (16, 32, 64))
TIMES = {16: 12.0, 32: 6.0, 64: 2.0}


def test_the_fastest_correct_configuration_wins():
    gemm = make_gemm(lambda c: TIMES[c.block_m])
    found = tuning.tune_gemm(gemm, CPU, SLOW, [MIDDLE, FAST])
    assert found.config.block_m == 64
    assert (found.us, found.before_us) == (pytest.approx(2e3), pytest.approx(12e3))
    assert (found.tried, found.dropped) == (2, {})


def test_configurations_that_are_wrong_or_fail_cannot_win():
    gemm = make_gemm(lambda c: TIMES[c.block_m], wrong=lambda c: c.block_m == 64, fails=lambda c: c.block_m == 32)
    found = tuning.tune_gemm(gemm, CPU, SLOW, [MIDDLE, FAST])
    assert found.config.block_m == 16
    assert found.dropped[str(FAST)] == "relative error 0.1"
    assert found.dropped[str(MIDDLE)] == "RuntimeError: out of resources: shared memory"


def test_the_current_configuration_stays_unless_another_is_clearly_faster(monkeypatch):
    us = {SLOW: 100.0, FAST: 99.0}
    monkeypatch.setattr(tuning, "final_times_us", lambda _gemm, _device, _finalists: us)
    gemm = make_gemm(lambda _: 0)
    assert tuning.tune_gemm(gemm, CPU, SLOW, [FAST]).config == SLOW
    us[FAST] = 90.0
    assert tuning.tune_gemm(gemm, CPU, SLOW, [FAST]).config == FAST


def test_an_error_is_raised_if_no_configuration_works():
    gemm = make_gemm(lambda _: 0, fails=lambda _: True)
    with pytest.raises(ValueError, match=r"no configuration of up n=32 k=32 works on this GPU: .*out of resources"):
        tuning.tune_gemm(gemm, CPU, SLOW, [FAST])


def test_other_entries_of_a_table_are_preserved(tmp_path):
    path = tmp_path / "tuned.json"
    old, other = TunedKernel("up", "sm_90", 2, 64, 32, SLOW), TunedKernel("up", "sm_90", 2, 64, 128, MIDDLE)
    configs.save_table(path, [old, other])
    new = TunedKernel("up", "sm_90", 2, 64, 32, FAST)
    assert tuning.merged_entries(path, new) == [other, new]
    fewer = dataclasses.replace(new, rows=64)
    assert tuning.merged_entries(path, fewer) == [old, other, fewer]
    assert tuning.merged_entries(tmp_path / "none.json", new) == [new]


@pytest.mark.long
def test_the_command_tunes_every_kernel_and_the_package_uses_the_table(tmp_path, monkeypatch):
    path = tmp_path / "moe-dualpipe" / "tuned.json"
    done = run_main("benchmarks.tune", "--smoke", "--shapes", "7,16,16,2,1", "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("  ")] == [
        "  up n=16 k=16", "  down n=16 k=16", "  down_backward n=16 k=16", "  up_backward n=16 k=32",
        "  wgrad n=16 k=16", "  wgrad n=16 k=32",
    ]  # fmt: skip
    assert "0 dropped" in done.stdout
    entries = configs.load_table(path)
    assert {entry.kernel for entry in entries} == set(configs.KERNEL_NAMES) - {"any"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    configs.clear_caches()
    found = {configs.lookup(kernel, "interpreter", 4, 16, 16).block_m for kernel in configs.KERNEL_NAMES}
    monkeypatch.undo()
    configs.clear_caches()
    assert found <= {tile[0] for tile in SMOKE_TILES}


def test_invalid_options_print_one_line_and_exit_with_2(capsys):
    for arguments, message in (
        (["--smoke"], "--smoke needs --out"),
        (["--smoke", "--shapes", "1,2,3"], "--shapes needs five integers each, T,D,F,E,K: got '1,2,3'"),
        (["--smoke", "--shapes", "8,8,8,2,3"], "K at most E"),
        (["--smoke", "--shapes", "8,8,12,2,1"], "--shapes: D and F must be multiples of 8"),
    ):
        assert tune.main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    options = tune.parse(["--smoke", "--shapes", "5,16,8,2,1"])
    assert tune.shapes_of(options) == (Shape(5, 16, 8, 2, 1),)
