"""The self-test of the kernels passes, remembers that, and finds a wrong result of each kernel of a layer."""

import pytest
import torch

from moe_dualpipe.kernels import self_test
from moe_dualpipe.kernels.gpu import gemm, permute, routing, swiglu, wgrad
from moe_dualpipe.kernels.options import RoutingOptions
from moe_dualpipe.kernels.self_test import SelfTest
from tests.support.kernels import DEVICE

TEST = SelfTest(16, 8, 4, RoutingOptions(2, "sigmoid", scale=2.5), torch.device(DEVICE), torch.float32)


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if DEVICE == "cpu":
        monkeypatch.setattr(self_test, "ROWS", (7,))


def test_what_has_passed_is_not_run_again(monkeypatch):
    assert TEST.first_difference() is None
    monkeypatch.setattr(SelfTest, "_problems", lambda _: pytest.fail("this has passed before"))
    assert TEST.first_difference() is None
    monkeypatch.setattr(self_test.triton, "__version__", "2.99")
    with pytest.raises(pytest.fail.Exception):
        TEST.first_difference()


# How a wrong kernel spoils its result, given its arguments.
SPOIL = {
    "scaled": lambda result, *_: result * 1.01,
    "first scaled": lambda results, *_: (results[0] * 1.01, *results[1:]),
    "ids reversed": lambda results, *_: (results[0], results[1].flip(1)),
    "transposed scaled": lambda result, *arguments: result * 1.01 if arguments[4:5] == (True,) else result,
    "not added": lambda result, *arguments: result.sub_(1) if arguments[-1] is result else result,  # it began as ones
    "nan": lambda result, *_: result * torch.nan,
}


@pytest.mark.parametrize(("module", "name", "spoil", "result"), [
    (routing, "top_k_experts", "first scaled", "routing weight"),
    (routing, "top_k_experts", "ids reversed", "choice of experts"),
    (routing, "top_k_experts_backward", "scaled", "gradient of the router's logits"),
    (permute, "sum_rows", "scaled", "output of the experts"),
    (permute, "sum_partials", "nan", "gradient of the routing weights"),
    (gemm, "rows_times_weights", "transposed scaled", "gradient of x"),
    (swiglu, "swiglu_down_backward", "first scaled", "gradient of x"),
    (wgrad, "weight_gradients", "not added", "gradient of gate and up"),
])  # fmt: skip
@pytest.mark.quick(
    *(f"moe_dualpipe.kernels.gpu.{case}" for case in (
        "routing-top_k_experts-ids reversed-choice of experts",
        "permute-sum_partials-nan-gradient of the routing weights",
        "wgrad-weight_gradients-not added-gradient of gate and up",
    )),
)  # fmt: skip
def test_a_wrong_result_is_found(module, name, spoil, result, monkeypatch):
    launch = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: SPOIL[spoil](launch(*args, **options), *args))
    found = TEST.first_difference()
    assert found.startswith(f"the Triton kernels compute a wrong {result} on ")
    assert TEST.first_difference() == found  # a failure is not remembered
