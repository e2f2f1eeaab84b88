"""Compares the grouped products and the fused experts with plain torch in the same dtype and in fp64."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from moe_dualpipe.kernels import products
from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.gpu import launch_args
from moe_dualpipe.kernels.gpu.configs import TileConfig
from moe_dualpipe.kernels.gpu.gemm import rows_times_weights
from moe_dualpipe.kernels.gpu.launch_args import dot_precision
from moe_dualpipe.kernels.gpu.tiles import Tiling
from moe_dualpipe.kernels.gpu.wgrad import weight_gradients
from moe_dualpipe.kernels.grouped_gemm import grouped_linear, grouped_mm, grouped_wgrad
from moe_dualpipe.kernels.permute import permute, unpermute
from moe_dualpipe.kernels.routing import expert_order
from tests.support.kernels import DEVICE, DTYPES, all_kernels, check, offsets_of, run

pytestmark = pytest.mark.usefixtures("guards")

GPU = DEVICE == "cuda"
POINTERS = TileConfig(32, 64, 32, 4, 2, 2) if GPU else TileConfig(16, 32, 16, 4, 1, 2)
TMA = TileConfig(64, 64, 32, 4, 2, 2, True) if GPU else TileConfig(16, 32, 16, 4, 1, 2, True)
PATHS = [(POINTERS, DTYPES[0]), *((TMA, dtype) for dtype in DTYPES[1:])]
both_paths = pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


# (rows per expert, input width, output width), among them: empty experts at both ends, one expert with all rows, no
# rows at all, widths that TMA cannot load, and widths that are multiples of a tile.
SIZES = [
    ([3, 1, 20, 2], 24, 40), ([0, 5, 0, 33, 0], 24, 40), ([0, 40, 0], 24, 40), ([0, 0], 24, 40),
    ([3, 1, 20, 2], 37, 13), ([0, 5, 0, 33, 0], 37, 13),
    ([0, 5, 0, 33, 0], 64, 128), ([3, 1, 20, 2], 8, 8),
]  # fmt: skip


@pytest.mark.parametrize("config,dtype", PATHS)
@pytest.mark.parametrize("counts,inputs,outputs", SIZES)
@pytest.mark.quick(
    "counts1-24-40-config1-dtype1", "counts3-24-40-config1-dtype1", "counts4-37-13-config0-dtype0",
    "counts6-64-128-config0-dtype0",
)  # fmt: skip
def test_grouped_linear_and_its_gradients(counts, inputs, outputs, dtype, config):
    dy, offsets = normal(sum(counts), outputs, dtype=dtype), offsets_of(counts)
    x, w = normal(sum(counts), inputs, dtype=dtype), normal(len(counts), outputs, inputs, dtype=dtype)
    product = lambda x, w, kernels: (grouped_linear(x, w, offsets, kernels=kernels), dy)  # noqa: E731
    *_, dw = check(product, config, dtype, x, w)[2]
    for e, count in enumerate(counts):
        assert count or not dw[e].any()  # zeros for experts without rows


def moe(rows, choices, num_experts, d, f, dtype=torch.float32, ids=None):
    """x, gate_up, down, weights, order and dy of a layer. Activations have a standard deviation near 1."""
    ids = torch.randint(-1, num_experts, (rows, choices)) if ids is None else ids
    order = expert_order(ids.to(DEVICE), num_experts, int((ids >= 0).sum()), kernels="reference")
    x, dy = normal(rows, d, dtype=dtype), normal(rows, d, dtype=dtype)
    gate_up = (torch.randn(num_experts, 2 * f, d, device=DEVICE) / d**0.5).to(dtype)
    down = (torch.randn(num_experts, d, f, device=DEVICE) / f**0.5).to(dtype)
    return x, gate_up, down, torch.rand(ids.shape, device=DEVICE), order, dy


def layer(tensors, order, **options):
    x, gate_up, down, weights = tensors
    return experts(x, gate_up, down, order, weights, **options)


LAYERS = {
    "awkward": (7, 3, 5, 37, 13, None),
    "even": (33, 2, 4, 32, 48, None),
    "one row": (1, 1, 1, 8, 8, None),
    "hot expert": (50, 1, 3, 24, 8, torch.full((50, 1), 1)),
    "no valid choice": (5, 2, 3, 16, 8, torch.full((5, 2), -1)),
    "the same expert twice": (6, 2, 3, 16, 8, torch.tensor([[0, 0], [2, 2], [1, 0]] * 2)),
    "no rows": (0, 2, 3, 16, 8, torch.empty(0, 2, dtype=torch.int64)),
}
WEIGHTINGS = [(name, "outside") for name in LAYERS] + [
    ("awkward", "inside"),
    ("even", "inside"),
    ("the same expert twice", "none"),
]


@pytest.mark.parametrize("config,dtype", PATHS)
@pytest.mark.parametrize("name,weighting", WEIGHTINGS)
@pytest.mark.quick(
    "awkward-inside-config1-dtype1", "even-outside-config0-dtype0", "no valid choice-outside-config0-dtype0",
    "the same expert twice-none-config1-dtype1", "no rows-outside-config1-dtype1",
)  # fmt: skip
def test_experts_and_all_gradients(name, dtype, config, weighting):
    rows, choices, num_experts, d, f, ids = LAYERS[name]
    *tensors, order, dy = moe(rows, choices, num_experts, d, f, dtype, ids)

    def function(*tensors_and_kernels):
        x, gate_up, down, weights, kernels = tensors_and_kernels
        given = weights if weighting != "none" else None
        return experts(x, gate_up, down, order, given, weight_inside=weighting == "inside", kernels=kernels), dy

    assert len(check(function, config, dtype, *tensors)[2]) == (4 if weighting == "none" else 5)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.quick("True")
def test_choices_of_no_expert_do_not_use_their_weights(bound):
    """bound: the order has room for all choices, as on a GPU, where the valid ones are not counted."""
    ids = torch.randint(-1, 4, (9, 3))
    *tensors, order, dy = moe(9, 3, 4, 8, 8, ids=ids)
    skipped = (ids < 0).to(DEVICE)
    assert skipped.any()
    if bound:
        order = expert_order(ids.to(DEVICE), 4, ids.numel(), kernels="triton")

    def function(*leaves_and_kernels):
        *leaves, kernels = leaves_and_kernels
        used = order.trimmed() if kernels == "reference" else order
        rows = unpermute(permute(leaves[0], used, kernels), used, leaves[3], kernels)
        return layer(leaves, used, kernels=kernels) + rows, dy

    expected, ours = (
        run(function, POINTERS, kernels, *tensors[:3], tensors[3].masked_fill(skipped, value))
        for kernels, value in (("reference", 0.0), ("triton", torch.nan))
    )
    torch.testing.assert_close(ours, expected)
    assert (ours[-1][skipped] == 0).all()


@pytest.mark.parametrize("counts,block", [([1] * 200, 16), ([0] * 511 + [9], 4), ([100, 0, 1], 1), ([0, 0], 2)])
def test_tiles_cover_every_row_once(counts, block):
    offsets, tiling = offsets_of(counts).tolist(), Tiling(offsets_of(counts), sum(counts))
    expected = [[e, row, b] for e, (a, b) in enumerate(itertools.pairwise(offsets)) for row in range(a, b, block)]
    table = tiling(block)
    assert len(table) == 1 + tiling.max_tiles(block) and table[1 : 1 + int(table[0, 0])].tolist() == expected


@both_paths
@pytest.mark.quick("tma")
def test_wgrad_adds_to_an_existing_gradient_in_fp32(config):
    dy, x, offsets = normal(30, 24, dtype=DTYPES[-1]), normal(30, 40, dtype=DTYPES[-1]), offsets_of([10, 0, 20])
    with all_kernels(config):
        added = grouped_wgrad(dy, x, offsets, torch.float32, kernels="triton")
        for kept in (torch.float32, torch.float16):  # a gradient in 16 bits is rounded once
            grad = normal(3, 24, 40, dtype=kept)
            expected = (grad.float() + added).to(kept)
            assert grouped_wgrad(dy, x, offsets, add_to=grad, kernels="triton") is grad
            assert torch.equal(grad, expected)


X, DY, WEIGHTS, OFFSETS = normal(6, 16), normal(6, 8), normal(2, 8, 16), offsets_of([4, 2])
LAYOUTS = {
    "slices of wider rows": (normal(6, 40)[:, 8:24], normal(6, 20)[:, 12:], WEIGHTS, OFFSETS),
    "offsets with a stride": (X, DY, WEIGHTS, torch.stack([OFFSETS, OFFSETS + 5], 1)[:, 0]),
    "weights that are not 16-byte aligned": (X, DY, normal(257)[1:].view(2, 8, 16), OFFSETS),
    "one expert with any stride": (X, DY, normal(8, 16, 1).permute(2, 0, 1), offsets_of([6])),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_may_have_any_layout_with_contiguous_rows(name):
    x, dy, w, offsets = LAYOUTS[name]
    results = []
    for kernels, config in (("reference", TMA), ("triton", TMA), ("triton", POINTERS)):
        with all_kernels(config):
            products = [grouped_mm(x, w, offsets, kernels=kernels), grouped_mm(dy, w, offsets, True, kernels=kernels)]
            results.append([*products, grouped_wgrad(dy, x, offsets, kernels=kernels)])
    for ours in results[1:]:
        torch.testing.assert_close(ours, results[0], rtol=1e-4, atol=1e-5)


@both_paths
def test_rows_past_the_last_offset_are_neither_read_nor_written(config):
    """Buffers can be longer than their content, because only the device knows the number of rows."""
    x, w, offsets = normal(40, 24), normal(2, 16, 24), offsets_of([12, 18])
    x[30:] = float("nan")
    with all_kernels(config):
        y = rows_times_weights("down", x, w, Tiling(offsets, 40))
        dw = weight_gradients(y, x, offsets, torch.float32)
    torch.testing.assert_close(y[:30], grouped_mm(x[:30], w, offsets, kernels="reference"), rtol=1e-4, atol=1e-4)
    assert y[30:].isnan().all()  # not written
    torch.testing.assert_close(dw, grouped_wgrad(y[:30], x[:30], offsets, kernels="reference"), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_accumulated_gradients_bypass_autograd_unless_there_are_hooks(kernels):
    x, gate_up, down, weights, order, _ = moe(9, 2, 3, 16, 8)
    leaves = [leaf.requires_grad_() for leaf in (gate_up, down)]

    def backward() -> list[Any]:
        gate_up.grad = down.grad = None
        layer((x, gate_up, down, weights), order, accumulate=True, kernels=kernels).sum().backward()
        rows = permute(x, order, kernels)
        grouped_linear(rows, gate_up, order.expert_offsets, accumulate=True, kernels=kernels).sum().backward()
        return [leaf.grad for leaf in leaves]

    y = layer((x, gate_up, down, weights), order, accumulate=True, kernels=kernels)
    assert torch.autograd.grad(y.sum(), gate_up, allow_unused=True) == (None,)
    expected = backward()
    for factor, leaf in enumerate(leaves, 2):
        leaf.register_hook(lambda grad, factor=factor: factor * grad)
    torch.testing.assert_close(backward(), [2 * expected[0], 3 * expected[1]])


@pytest.mark.skipif(GPU, reason="counts in the interpreter")
@both_paths
@pytest.mark.quick("tma")
def test_any_number_of_programs_computes_all_tiles(config, monkeypatch):
    monkeypatch.setattr(launch_args, "_num_multiprocessors", lambda _device: 2)
    launch, programs = GridExecutor.__call__, []

    def recorded(executor, *args, **options):
        launch(executor, *args, **options)
        if "PRECISION" in options:  # a product
            programs.append(executor.grid[0])

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    *tensors, order, dy = moe(12, 2, 3, 24, 24)
    results = []
    for per_sm, num_sms, number in ((2, None, 4), (1, 3, 3)):
        programs.clear()
        function = lambda *leaves, n=num_sms: (layer(leaves[:4], order, num_sms=n, kernels="triton"), dy)  # noqa: E731
        results.append(run(function, dataclasses.replace(config, per_sm=per_sm), "triton", *tensors))
        assert programs == [number] * 6  # forward: up, down; backward: down, up, two weight gradients
        assert all(map(torch.equal, results[0], results[-1]))


@pytest.mark.parametrize("attribute", [False, True])
def test_tf32_is_used_if_either_torch_setting_allows_it(attribute):
    assert dot_precision(torch.float32) == dot_precision(torch.bfloat16) == "ieee"
    before = torch.backends.cuda.matmul.fp32_precision, products._SETTING.fp32_precision
    try:
        if attribute:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        assert dot_precision(torch.float32) == ("ieee" if torch.version.hip else "tf32")
        assert dot_precision(torch.bfloat16) == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision, products._SETTING.fp32_precision = before
