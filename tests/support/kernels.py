"""Helpers for the tests of kernels: device, dtypes, tolerances and custom experts."""

import contextlib

import pytest
import torch
from torch import nn

from moe_dualpipe.kernels import products
from moe_dualpipe.kernels.gpu import configs
from moe_dualpipe.kernels.grouped_gemm import grouped_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# No bfloat16 in the interpreter, which computes wrong numbers in it.
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]

# Runs to compare, as (in fp64, kernels): the exact result, plain torch, and Triton. On a GPU, Triton runs twice: its
# programs may run in another order the second time. In the interpreter, the order is always the same.
RUNS = [(True, "reference"), (False, "reference"), (False, "triton")]
if DEVICE == "cuda":
    RUNS.append((False, "triton"))

# A relative error |ours - exact| / |exact| in the 2-norm that is always allowed: a few roundings to the dtype.
FLOOR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def error(ours, exact):
    ours, exact = ours.detach().double(), exact.detach().double()
    assert ours.shape == exact.shape
    norm = exact.norm()
    return float((ours - exact).norm() / norm if norm > 0 else ours.norm())


def assert_as_good_as(ours, reference, exact, dtype, what=""):
    """Assert that `ours` is as close to the fp64 result as plain torch in the same dtype, up to a factor of two."""
    assert error(reference, exact) <= 4 * FLOOR[dtype], f"{what}: plain torch has an error of {error(reference, exact)}"
    allowed = max(2 * error(reference, exact), FLOOR[dtype])
    assert error(ours, exact) <= allowed, f"{what}: error {error(ours, exact):.2e}, allowed {allowed:.2e}"


ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
ONEDNN = ONEDNN and products._onednn_is_precise()
needs_onednn = pytest.mark.skipif(not ONEDNN, reason="needs a CPU with AVX-512 and without AMX")


def small_products_in_onednn(monkeypatch):
    """Let oneDNN compute all products of more than 4,096 multiply-adds, the smallest for which torch calls it."""
    monkeypatch.setattr(products, "_library", "onednn")
    monkeypatch.setattr(products, "SMALLEST", 1)


def offsets_of(counts):
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()


class LinearExperts(nn.Module):
    """Custom experts with the attribute `kernels`, which the model sets to its own option of that name."""

    kernels = "auto"

    def __init__(self, config, num_local_experts):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_local_experts, config.hidden_size, config.hidden_size))

    def forward(self, x_MD, expert_offsets):
        return grouped_linear(x_MD, self.weight, expert_offsets, kernels=self.kernels)


@contextlib.contextmanager
def all_kernels(config):
    """Run every product with this configuration; None: as it is."""
    with contextlib.ExitStack() as stack:
        for kernel in configs.KERNEL_NAMES if config else ():
            stack.enter_context(configs.override_config(kernel, config))
        yield


def run(function, config, kernels, *tensors, wide=False):
    """The output of an operator, and the gradients of its inputs. `function(*leaves, kernels)` returns y and dy."""
    leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in tensors]
    with all_kernels(config):
        y, dy = function(*leaves, kernels)
        y.backward(dy.to(y.dtype))
    return [y, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check(function, config, dtype, *tensors):
    """The kernels are as close to fp64 as plain torch in the same dtype, and have the same bits each time.

    Returns the results of `run`: in fp64, of plain torch, of the kernels.
    """
    results = [run(function, config, kernels, *tensors, wide=wide) for wide, kernels in RUNS]
    for i, (exact, reference, ours, *again) in enumerate(zip(*results, strict=True)):
        assert_as_good_as(ours, reference, exact, dtype, f"result {i}")
        assert ours.dtype == reference.dtype and all(torch.equal(ours, other) for other in again)
    return results
