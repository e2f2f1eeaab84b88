"""kernels/products.py: the library, which follows from the machine, and the exactness of products in oneDNN."""

import pytest
import torch

from moe_dualpipe.kernels import products
from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.products import choose_products, times_transposed, transposed_times
from tests.support.kernels import offsets_of, small_products_in_onednn

ROWS = {
    "a weight": lambda *shape: torch.randn(*shape), "transposed": lambda rows, width: torch.randn(width, rows).T,
    "slices": lambda rows, width: torch.randn(rows, width + 9)[:, 3 : width + 3],
    "every other": lambda *shape: torch.randn(*shape, 2)[..., 0],
}  # fmt: skip


def dense(matrix):
    """A copy without gaps, with rows or columns contiguous as in `matrix`."""
    return matrix.contiguous() if matrix.stride(0) > matrix.stride(1) else matrix.T.contiguous().T


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("rows", [32, 288])
@torch.no_grad()
def test_products_in_onednn_are_exact_and_equal_in_every_run_and_layout(rows, layout, monkeypatch):
    """oneDNN multiplies some layouts in a slow loop, whose sums have other bits: no layout may get there."""
    small_products_in_onednn(monkeypatch)
    x, w, dy = torch.randn(rows, 200), ROWS[layout](70, 200), ROWS[layout](rows, 70)
    cases = ((times_transposed, x, w, x.double() @ w.double().T), (times_transposed, dy, w.T, dy.double() @ w.double()),
             (transposed_times, dy, x, dy.double().T @ x.double()))  # fmt: skip
    for multiply, left, right, exact in cases:
        found = multiply(left, right)
        assert (found - exact).abs().max() <= 1e-6 * exact.abs().max() + 1e-5
        assert torch.equal(found, multiply(left, right))
        assert torch.equal(found, multiply(dense(left), dense(right)))


def test_experts_of_any_load_need_few_shapes_in_onednn(monkeypatch):
    small_products_in_onednn(monkeypatch)
    shapes, multiply = set(), products._onednn
    monkeypatch.setattr(products, "_onednn", lambda x, w: (shapes.add((*x.shape, *w.shape)), multiply(x, w))[1])
    for counts in torch.randint(1, 20, (30, 6)):
        x, w = torch.randn(int(counts.sum()), 8, requires_grad=True), torch.randn(6, 5, 8, requires_grad=True)
        grouped_linear(x, w, offsets_of(counts.tolist())).sum().backward()
    # Forward and input gradient with 4, 8, ... 20 rows; weight gradient from 4, 8, ... 16 rows.
    assert len(shapes) == 5 + 5 + 4


def test_second_derivatives_are_those_of_torch(monkeypatch):
    x, w, found = torch.randn(40, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True), []
    for small in (False, True):
        if small:
            small_products_in_onednn(monkeypatch)
        gradients = torch.autograd.grad(linear(x, w).square().sum(), [x, w], create_graph=True)
        found.append(torch.autograd.grad(torch.stack([t.square().sum() for t in gradients]).sum(), [x, w]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind,amd,capability,mkl,onednn,expected", [
    ("cpu", True, "AVX512", True, True, "onednn"), ("cpu", False, "AVX512", True, True, "mkl"),
    ("cpu", True, "AVX2", True, True, "mkl"), ("cpu", True, "AVX512", False, True, "mkl"),
    ("cpu", True, "AVX512", True, False, "mkl"), ("cuda", True, "AVX512", True, True, "mkl"),
])  # fmt: skip
def test_auto_is_onednn_where_mkl_leaves_half_of_the_vectors_unused(
    kind, amd, capability, mkl, onednn, expected, monkeypatch
):
    monkeypatch.setattr(products, "_is_amd", lambda: amd)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    assert choose_products("auto", kind) == expected
    assert choose_products("mkl", kind) == "mkl"


def test_onednn_needs_a_cpu():
    with pytest.raises(
        ValueError, match=r"^compute.products=onednn needs a CPU, and this run is on a GPU: use compute"
    ):
        choose_products("onednn", "cuda")
