"""Tuning: which configurations are tried, that only correct ones win, and that the package uses the new table."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import tune
from benchmarks.gpu import measure, tuning
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.tuned_gemms import Gemm, candidate_configs
from moe_dualpipe.kernels.gpu import configs
from moe_dualpipe.kernels.gpu.configs import TileConfig, TunedKernel

CPU = torch.device("cpu")
H100, A100, MI300 = 232_448, 166_912, 65_536  # maximum shared memory of a block, in bytes


@pytest.mark.parametrize("shared", [H100, A100, MI300])
@pytest.mark.parametrize("kernel", configs.KERNEL_NAMES)
def test_candidates_are_few_and_fit_in_registers_and_shared_memory(kernel, shared):
    element = 1 if kernel == "fp8" else 2
    found = candidate_configs(kernel, element, shared, tma=shared == H100, maxnreg=shared != MI300)
    assert 3 < len(found) <= 86
    assert len(set(found)) == len(found)
    for c in found:
        assert c.stages * (c.block_m + c.block_n) * c.block_k * element <= shared
        assert kernel != "fp8" or (c.block_k == 128 and 128 % c.block_n == 0)
        assert c.block_m * c.block_n <= 128 * 32 * c.warps
    assert {c.tma for c in found} == ({False, True} if shared == H100 else {False})


@pytest.fixture
def tuned(monkeypatch):
    """The outcome of tuning a GEMM whose time, result and failure depend on the configuration in use."""
    now, expected = [0.0], torch.arange(1.0, 9.0)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def tune_with(milliseconds, others, wrong=(), fails=()):
        def launch():
            config = configs.lookup("up", "interpreter", 4, 32, 32)
            if config.block_m in fails:
                raise RuntimeError("out of resources: shared memory")
            now[0] += milliseconds[config.block_m] / 1e3
            return (expected * (1.1 if config.block_m in wrong else 1),)

        return tuning.tune_gemm(Gemm("up", 32, 32, launch, (expected,)), CPU, SLOW, others)

    return tune_with


SLOW, MIDDLE, FAST = (TileConfig(m, 64, 32, 4, 2) for m in (16, 32, 64))
TIMES = {16: 12.0, 32: 6.0, 64: 2.0}  # by block_m


def test_the_fastest_correct_configuration_wins_if_it_is_clearly_faster(tuned):
    found = tuned(TIMES, [MIDDLE, FAST])
    assert (found.config.block_m, found.us, found.before_us) == (64, pytest.approx(2e3), pytest.approx(12e3))
    assert (found.tried, found.dropped) == (2, {})
    found = tuned(TIMES, [MIDDLE, FAST], wrong=[64], fails=[32])
    assert found.config.block_m == 16
    assert found.dropped[str(FAST)] == "relative error 0.1"
    assert found.dropped[str(MIDDLE)] == "RuntimeError: out of resources: shared memory"
    for fast, winner in ((11.9, 16), (10.8, 64)):
        assert tuned(TIMES | {64: fast}, [FAST]).config.block_m == winner
    with pytest.raises(ValueError, match=r"no configuration of up n=32 k=32 works on this GPU: .*out of resources"):
        tuned(TIMES, [FAST], fails=[16, 64])


def test_other_entries_of_a_table_are_preserved(tmp_path):
    path = tmp_path / "tuned.json"
    old, other = TunedKernel("up", "sm_90", 2, 64, 32, SLOW), TunedKernel("up", "sm_90", 2, 64, 128, MIDDLE)
    configs.save_table(path, [old, other])
    new = TunedKernel("up", "sm_90", 2, 64, 32, FAST)
    assert tuning.merged_entries(path, new) == [other, new]
    fewer = dataclasses.replace(new, rows=64)
    assert tuning.merged_entries(path, fewer) == [old, other, fewer]
    assert tuning.merged_entries(tmp_path / "none.json", new) == [new]


@pytest.mark.parametrize("arguments,message", [
    ([], "--smoke needs --out"),
    (["--shapes", "1,2,3"], "--shapes needs five integers each, T,D,F,E,K: got '1,2,3'"),
    (["--shapes", "8,8,8,2,3"], "K at most E"),
    (["--num-sms", "-1"], "--num-sms must be at least 0, for all: got -1"),
    (["--shapes", "8,8,12,2,1"], "--shapes: D and F must be multiples of 8"),
])  # fmt: skip
def test_invalid_options_print_one_line_and_exit_with_2(capsys, arguments, message):
    assert tune.main(["--smoke", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert tune.shapes_of(tune.parse(["--smoke", "--shapes", "5,16,8,2,1"])) == (Shape(5, 16, 8, 2, 1),)
