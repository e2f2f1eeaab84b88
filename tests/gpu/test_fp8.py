"""FP8 in Triton: rows are rounded as in plain torch, and products are those of the numbers that were rounded."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.fp8 import RECIPES
from moe_dualpipe.kernels.gpu import fp8
from moe_dualpipe.kernels.gpu.configs import TileConfig, override_config
from moe_dualpipe.kernels.gpu.tiles import Tiling
from moe_dualpipe.kernels.routing import expert_order
from tests.machines.interpreter import compute_fp8, from_fp8
from tests.support.kernels import DEVICE, error, offsets_of

pytestmark = pytest.mark.usefixtures("guards")


@pytest.fixture(autouse=True)
def _fp8(monkeypatch):
    compute_fp8(monkeypatch)


@pytest.mark.parametrize("shape", [(1, 5), (19, 128), (33, 300)])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_rounded_as_in_plain_torch(shape, name, dtype):
    x = (torch.randn(shape, device=DEVICE) * torch.exp2(torch.randn(shape[0], 1, device=DEVICE) * 3)).to(dtype)
    x[shape[0] // 2, :3] = 0.0
    if shape[0] > 2:
        x[0], x[1, 2], x[2, 4] = 0.0, torch.nan, -torch.inf
    expected = RECIPES[name].quantize_rows(x)
    found = fp8.quantize_rows(x, expected.columns, RECIPES[name].power_of_two)
    torch.testing.assert_close(found.scales, expected.scales, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.stored.float(), expected.stored.float(), rtol=0, atol=0, equal_nan=True)


def operands(counts, N, K, name, gathered=False):
    """Rows and weights in 8 bits, the index of rows, and their product in fp64."""
    rows = sum(counts)
    index = torch.randint(0, 40, (rows,), device=DEVICE, dtype=torch.int32) if gathered else None
    a = RECIPES[name].quantize_rows(torch.randn(40 if gathered else rows, K, device=DEVICE))
    w = RECIPES[name].quantize_weights(torch.randn(len(counts), N, K, device=DEVICE))
    a_MK = (a.take(index.long()) if gathered else a).read(torch.float64)
    parts = zip(a_MK.split(counts), w.read(torch.float64), strict=True)
    return (a, w, Tiling(offsets_of(counts), rows)), index, torch.cat([x @ w_NK.T for x, w_NK in parts])


def keep_14_bits(monkeypatch):
    """Let the interpreter add up as the tensor cores of Hopper do: 32 products at a time, with 14 bits of each sum."""

    def dot(_builder, a, b, acc, *_options):
        a, b, total = from_fp8(a.data), from_fp8(b.data), acc.data
        for k in range(0, a.shape[1], 32):
            mantissa, exponent = np.frexp(total + a[:, k : k + 32] @ b[k : k + 32])
            total = np.ldexp(np.trunc(mantissa * 2**14) / 2**14, exponent).astype(np.float32)
        return TensorHandle(total, tl.float32)

    create_dot = InterpreterBuilder.create_dot
    is_fp8 = lambda a: a.dtype.scalar == tl.float8e4nv  # noqa: E731
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda b, a, *more: (dot if is_fp8(a) else create_dot)(b, a, *more)
    )


MXFP8 = RECIPES["mxfp8"].kernels_fault(torch.device(DEVICE))
without_mx = pytest.mark.skipif(bool(MXFP8), reason=MXFP8)


@pytest.fixture(params=[24, 14])
def bits(request, monkeypatch):
    """Bits of the sums of products. MX has scales of its own."""
    if request.param == 14:
        keep_14_bits(monkeypatch)
    elif DEVICE == "cuda":
        pytest.skip("a GPU has its own")
    return request.param


@pytest.mark.parametrize("N,K", [(40, 20), (256, 128), (200, 300), (144, 272)])
@pytest.mark.parametrize("name,gathered", [
    ("fp32", False), ("fp32", True), pytest.param("mxfp8", True, marks=without_mx),
])  # fmt: skip
@pytest.mark.quick(
    "24-fp32-False-40-20", "24-fp32-True-200-300", "24-fp32-True-144-272", "24-mxfp8-True-256-128",
    "24-mxfp8-True-200-300", "14-fp32-False-256-128", "14-fp32-True-40-20",
)  # fmt: skip
def test_a_product_is_that_of_the_rounded_numbers(N, K, name, gathered, bits):
    arguments, index, exact = operands([17, 0, 38], N, K, name, gathered)
    assert error(fp8.fp8_rows_times_weights(*arguments, torch.float32, index), exact) < {24: 1e-6, 14: 3e-4}[bits]


@pytest.mark.skipif(DEVICE == "cuda", reason="models the tensor cores of a GPU")
def test_sums_of_14_bits_do_not_lose_more_digits_in_a_longer_sum(monkeypatch):
    keep_14_bits(monkeypatch)
    short, long = (
        error(fp8.fp8_rows_times_weights(*arguments, torch.float32, index), exact)
        for arguments, index, exact in (operands([8], 16, K, "fp32") for K in (128, 4096))
    )
    assert 1e-5 < short < 3e-4 and long < 1.5 * short


@pytest.mark.parametrize("name,inside", [
    ("ue8m0", True), ("fp32", False), pytest.param("mxfp8", True, marks=without_mx),
])  # fmt: skip
@pytest.mark.quick("14-fp32-False", "24-mxfp8-True")
def test_experts_and_their_gradients_are_those_of_plain_torch(name, inside, bits):
    N, K, E, D, F = 14, 2, 3, 144, 80
    ids = torch.stack([torch.randperm(E, device=DEVICE)[:K] for _ in range(N)])
    ids[0], ids[4, 1] = -1, -1
    order = expert_order(ids, E, int((ids >= 0).sum()), kernels="reference")
    tensors = [torch.randn(shape, device=DEVICE) for shape in ((N, D), (E, 2 * F, D), (E, D, F))]
    tensors, dy = [*tensors, torch.rand(K, N, device=DEVICE).T], torch.randn(N, D, device=DEVICE)
    results = []
    for kernels in ("reference", "triton"):
        leaves = [t.detach().requires_grad_() for t in tensors]  # weights in another layout
        x, gate_up, down, weights = leaves
        with override_config("wgrad", TileConfig(64, 64, 32, 4, 2)):  # few programs, which the interpreter runs sooner
            y = experts(x, gate_up, down, order, weights, weight_inside=inside, fp8=RECIPES[name], kernels=kernels)
            results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for plain, ours in zip(*results, strict=True):
        assert error(ours, plain) < 2e-3  # a number at the edge between two 8-bit numbers may be rounded to either
        assert ((ours - plain).abs() <= {24: 1e-5, 14: 3e-4}[bits] * plain.abs().max()).float().mean() > 0.9
