"""Compares the grouped products and the fused experts with plain torch in the same dtype and in fp64."""

import dataclasses
import itertools
from collections import Counter
from functools import partial

import pytest
import torch

from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.gpu import launch_args
from moe_dualpipe.kernels.gpu.configs import TileConfig
from moe_dualpipe.kernels.gpu.gemm import rows_times_weights
from moe_dualpipe.kernels.gpu.launch_args import dot_precision
from moe_dualpipe.kernels.gpu.swiglu import swiglu_down_backward, swiglu_up
from moe_dualpipe.kernels.gpu.tiles import Tiling
from moe_dualpipe.kernels.gpu.wgrad import weight_gradients
from moe_dualpipe.kernels.grouped_gemm import grouped_linear, grouped_mm, grouped_wgrad
from moe_dualpipe.kernels.permute import permute, unpermute
from moe_dualpipe.kernels.routing import expert_order
from moe_dualpipe.kernels.weight_grads import WeightGrads
from tests.machines.interpreter import record_writes
from tests.support.kernels import DEVICE, DTYPES, RUNS, all_kernels, assert_as_good_as, offsets_of, record_programs

pytestmark = pytest.mark.usefixtures("guards")

GPU = DEVICE == "cuda"
POINTERS = TileConfig(32, 64, 32, 4, 2, 2) if GPU else TileConfig(16, 32, 16, 4, 1, 2)
TMA = TileConfig(64, 64, 32, 4, 2, 2, True) if GPU else TileConfig(16, 32, 16, 4, 1, 2, True)
PATHS = [(POINTERS, DTYPES[0]), *((TMA, dtype) for dtype in DTYPES[1:])]
# (rows per expert, input width, output width), among them: empty experts at both ends, one expert with all rows, no
# rows at all, widths that TMA cannot load, and widths that are multiples of a tile.
SIZES = [
    ([3, 1, 20, 2], 24, 40), ([0, 5, 0, 33, 0], 24, 40), ([0, 40, 0], 24, 40), ([0, 0], 24, 40),
    ([3, 1, 20, 2], 37, 13), ([0, 5, 0, 33, 0], 37, 13),
    ([0, 5, 0, 33, 0], *((64, 128) if GPU else (32, 64))), ([3, 1, 20, 2], 8, 8),
]  # fmt: skip


def normal(*shape, dtype):
    return torch.randn(*shape, device=DEVICE).to(dtype)


# ---- grouped products ----


@pytest.mark.parametrize("config,dtype", PATHS)
@pytest.mark.parametrize("counts,inputs,outputs", SIZES)
@pytest.mark.quick(
    "counts0-24-40-config0-dtype0",
    "counts1-24-40-config1-dtype1",
    "counts2-24-40-config0-dtype0",
    "counts3-24-40-config1-dtype1",
    "counts4-37-13-config0-dtype0",
    "counts5-37-13-config1-dtype1",
    "counts6-32-64-config0-dtype0",
    "counts7-8-8-config1-dtype1",
)
def test_grouped_linear_and_its_gradients(counts, inputs, outputs, dtype, config):
    offsets = offsets_of(counts)
    x, w = normal(sum(counts), inputs, dtype=dtype), normal(len(counts), outputs, inputs, dtype=dtype)
    dy = normal(sum(counts), outputs, dtype=dtype)
    results = []
    for wide, kernels in RUNS:
        a, b, d = (t.double() if wide else t.clone() for t in (x, w, dy))
        for leaf in (a, b):
            leaf.requires_grad_()
        with all_kernels(config):
            y = grouped_linear(a, b, offsets, kernels=kernels)
            y.backward(d)
        results.append([y, a.grad, b.grad])
    for exact, reference, ours, *again in zip(*results, strict=True):
        assert_as_good_as(ours, reference, exact, dtype)
        assert all(torch.equal(ours, other) for other in again)
    for e, count in enumerate(counts):
        assert count or not results[2][2][e].any()  # zeros for experts without rows


@pytest.mark.parametrize("attribute", [False, True])
def test_tf32_is_used_if_either_torch_setting_allows_it(attribute):
    assert dot_precision(torch.float32) == dot_precision(torch.bfloat16) == "ieee"
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        if attribute:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        assert dot_precision(torch.float32) == ("ieee" if torch.version.hip else "tf32")
        assert dot_precision(torch.bfloat16) == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
def test_wgrad_adds_to_an_existing_gradient_in_fp32(config):
    dtype = DTYPES[-1]
    dy, x, offsets = normal(30, 24, dtype=dtype), normal(30, 40, dtype=dtype), offsets_of([10, 0, 20])
    before = torch.randn(3, 24, 40, device=DEVICE)
    with all_kernels(config):
        added = grouped_wgrad(dy, x, offsets, torch.float32, kernels="triton")
        for kept in (torch.float32, torch.float16):  # a gradient in 16 bits is rounded once
            grad = before.to(kept)
            expected = (grad.float() + added).to(kept)
            assert grouped_wgrad(dy, x, offsets, add_to=grad, kernels="triton") is grad
            assert torch.equal(grad, expected)


X, DY = (torch.randn(6, columns, device=DEVICE) for columns in (16, 8))
WEIGHTS, OFFSETS = torch.randn(2, 8, 16, device=DEVICE), offsets_of([4, 2])
LAYOUTS = {
    "slices of wider rows": (
        torch.randn(6, 40, device=DEVICE)[:, 8:24], torch.randn(6, 20, device=DEVICE)[:, 12:], WEIGHTS, OFFSETS,
    ),
    "offsets with a stride": (X, DY, WEIGHTS, torch.stack([OFFSETS, OFFSETS + 5], 1)[:, 0]),
    "weights that are not 16-byte aligned": (X, DY, torch.randn(257, device=DEVICE)[1:].view(2, 8, 16), OFFSETS),
    "one expert with any stride": (X, DY, torch.randn(8, 16, 1, device=DEVICE).permute(2, 0, 1), offsets_of([6])),
}  # fmt: skip


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


@pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
def test_rows_past_the_last_offset_are_neither_read_nor_written(config):
    """Buffers can be longer than their content, because only the device knows the number of rows."""
    x, w = normal(40, 24, dtype=torch.float32), normal(2, 16, 24, dtype=torch.float32)
    x[30:] = float("nan")
    offsets = offsets_of([12, 18])
    with all_kernels(config):
        y = rows_times_weights("down", x, w, Tiling(offsets, 40))
        torch.testing.assert_close(y[:30], grouped_mm(x[:30], w, offsets, kernels="reference"), rtol=1e-4, atol=1e-4)
        assert y[30:].isnan().all()  # not written
        dw = weight_gradients(y, x, offsets, torch.float32)
    expected = grouped_wgrad(y[:30], x[:30], offsets, kernels="reference")
    torch.testing.assert_close(dw, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(GPU, reason="counts in the interpreter")
@pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
@pytest.mark.parametrize("counts,inputs,outputs", [([0, 3, 17, 0], 24, 24), ([5, 11], 13, 11)])
@pytest.mark.quick("counts0-24-24-tma", "counts1-13-11-pointers")
def test_each_element_is_written_once(counts, inputs, outputs, config, monkeypatch):
    """So no order of the programs changes a result, and a row tile does not touch the next expert."""
    rows, writes, offsets = sum(counts), record_writes(monkeypatch), offsets_of(counts)
    x, dy, w = (normal(*shape, dtype=torch.float32) for shape in (
        (rows + 9, inputs), (rows + 9, outputs), (len(counts), outputs, inputs))
    )  # fmt: skip
    index = torch.randperm(rows + 9)[:rows]
    tiling, total = Tiling(offsets, rows + 9), torch.zeros_like(w)
    both, choice = torch.cat([w, w], 1), torch.arange(rows)
    z = normal(rows, 2 * outputs, dtype=torch.float32)
    down, few = w.mT.contiguous(), Tiling(offsets, rows)
    launches = [
        lambda: (rows_times_weights("down", x, w, tiling),),
        lambda: (rows_times_weights("up_backward", dy, w, tiling, True),),
        lambda: swiglu_up(x, index, both, few, None, choice),
        lambda: swiglu_down_backward(x, index, down, z, few, torch.rand(rows), choice),
        lambda: (weight_gradients(dy, x, offsets, torch.float32, None, index),),
        lambda: (weight_gradients(dy, x, offsets, torch.float32, index, None, total),),
        lambda: (weight_gradients(dy, x, offsets, torch.float32),),
    ]
    with all_kernels(config):
        assert len(tiling(config.block_m)) >= len(few(config.block_m))  # builds the tables
        for launch in launches:
            writes.clear()
            out = launch()
            kept = [t[..., :rows, :] if t.shape[-2] == rows + 9 else t for t in out]
            addresses = [t.data_ptr() + 4 * i for t in kept for i in range(t.numel())]
            assert writes == Counter(addresses)


def tiles_of(tiling, block_m):
    """The tiles in a table, without unused rows."""
    table = tiling(block_m)
    assert len(table) == 1 + tiling.max_tiles(block_m)
    return table[1 : 1 + int(table[0, 0])].tolist()


@pytest.mark.parametrize("counts,block", [([1] * 200, 16), ([0] * 511 + [9], 4), ([100, 0, 1], 1), ([0, 0], 2)])
def test_tiles_cover_every_row_once(counts, block):
    offsets = offsets_of(counts).tolist()
    expected = [[e, row, b] for e, (a, b) in enumerate(itertools.pairwise(offsets)) for row in range(a, b, block)]
    assert tiles_of(Tiling(offsets_of(counts), sum(counts)), block) == expected


# ---- fused experts ----


def moe(rows, choices, num_experts, d, f, dtype, ids=None):
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


WEIGHTINGS = [(name, "outside") for name in LAYERS] + [("awkward", "inside"), ("even", "inside"), ("awkward", "none")]


@pytest.mark.parametrize("config,dtype", PATHS)
@pytest.mark.parametrize("name,weighting", WEIGHTINGS)
@pytest.mark.quick(
    "awkward-outside-config0-dtype0",
    "awkward-inside-config1-dtype1",
    "even-outside-config0-dtype0",
    "awkward-none-config0-dtype0",
    "one row-outside-config0-dtype0",
    "one row-outside-config1-dtype1",
    "hot expert-outside-config1-dtype1",
    "no valid choice-outside-config0-dtype0",
    "the same expert twice-outside-config1-dtype1",
    "no rows-outside-config0-dtype0",
    "no rows-outside-config1-dtype1",
)
def test_experts_and_all_gradients(name, dtype, config, weighting):
    rows, choices, num_experts, d, f, ids = LAYERS[name]
    *tensors, order, dy = moe(rows, choices, num_experts, d, f, dtype, ids)
    results = []
    for wide, kernels in RUNS:
        x, gate_up, down, weights = ((t.double() if wide else t.clone()).requires_grad_() for t in tensors)
        with all_kernels(config):
            y = experts(
                x, gate_up, down, order, weights if weighting != "none" else None, weight_inside=weighting == "inside",
                kernels=kernels,
            )  # fmt: skip
            y.backward(dy.to(y.dtype))
        results.append({"y": y, "x": x.grad, "gate_up": gate_up.grad, "down": down.grad, "weights": weights.grad})
    for name in results[0]:
        if name == "weights" and weighting == "none":
            continue
        exact, reference, ours, *again = (result[name] for result in results)
        assert_as_good_as(ours, reference, exact, dtype, name)
        assert all(torch.equal(ours, other) for other in again), name
        assert ours.dtype == reference.dtype


@pytest.mark.parametrize("bound", [False, True])
def test_choices_of_no_expert_do_not_use_their_weights(bound):
    """bound: the order has room for all choices, as on a GPU, where the valid ones are not counted."""
    ids = torch.randint(-1, 4, (9, 3))
    *tensors, order, dy = moe(9, 3, 4, 8, 8, DTYPES[0], ids)
    skipped = (ids < 0).to(DEVICE)
    assert skipped.any()
    if bound:
        order = expert_order(ids.to(DEVICE), 4, ids.numel(), kernels="triton")
    results = []
    for kernels, value in (("reference", 0.0), ("triton", torch.nan)):
        leaves = [t.clone().requires_grad_() for t in (*tensors[:3], tensors[3].masked_fill(skipped, value))]
        used = order.trimmed() if kernels == "reference" else order
        with all_kernels(POINTERS):
            y = layer(leaves, used, kernels=kernels)
            rows = unpermute(permute(leaves[0], used, kernels), used, leaves[3], kernels)
            (y + rows).backward(dy)
        results.append([y, rows, *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, expected)
    assert (results[1][-1][skipped] == 0).all()


def saved_tensors(function):
    """The tensors that autograd saves for backward during a call."""
    saved = {}

    def pack(t):
        saved[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return list(saved.values())


def test_only_x_and_the_preactivation_are_saved_for_backward():
    n, k, d, f = 40, 2, 64, 32
    x, gate_up, down, weights, order, _ = moe(n, k, 4, d, f, torch.float16, torch.randint(0, 4, (n, k)))
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    saved = saved_tensors(lambda: layer(leaves, order, kernels="triton"))
    activations = [t for t in saved if t.data_ptr() not in {gate_up.data_ptr(), down.data_ptr(), weights.data_ptr()}]
    assert sum(t.nbytes for t in activations) == n * (2 * d + 4 * k * f)


def test_the_preactivation_is_not_stored_without_gradients(guards):
    n, k, f = 10, 2, 24
    x, gate_up, down, weights, order, _ = moe(n, k, 4, 16, f, torch.float32, torch.randint(0, 4, (n, k)))
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            layer(leaves, order, kernels="triton")
    assert n * k * 2 * f not in [numel for _, numel in guards.buffers]
    layer(leaves, order, kernels="triton")
    assert n * k * 2 * f in [numel for _, numel in guards.buffers]


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_accumulated_gradients_bypass_autograd_unless_there_are_hooks(kernels):
    x, gate_up, down, weights, order, _ = moe(9, 2, 3, 16, 8, torch.float32)
    rows = permute(x, order, kernels)
    for leaf in (gate_up, down):
        leaf.requires_grad_()

    def forward():
        return experts(x, gate_up, down, order, weights, accumulate=True, kernels=kernels).sum()

    def backward():
        for leaf in (gate_up, down):
            leaf.grad = None
        forward().backward()
        grouped_linear(rows, gate_up, order.expert_offsets, accumulate=True, kernels=kernels).sum().backward()
        assert gate_up.grad is not None
        assert down.grad is not None
        return gate_up.grad, down.grad

    (returned,) = torch.autograd.grad(forward(), gate_up, allow_unused=True)
    assert returned is None
    assert gate_up.grad.any()
    expected = backward()
    # The gradient of a weight with hooks goes through autograd.
    gate_up.register_hook(lambda grad: 2 * grad)
    down.register_hook(lambda grad: 3 * grad)
    torch.testing.assert_close(backward(), (2 * expected[0], 3 * expected[1]))


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.quick("False-triton", "True-reference")
def test_weight_gradients_can_be_deferred(kernels, has_grad):
    *tensors, order, dy = moe(20, 2, 4, 24, 16, torch.float32)
    expected, ours = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    layer(expected, order, kernels=kernels).backward(dy)
    weight_grads = WeightGrads()
    if has_grad:
        for leaf in ours[1:3]:
            leaf.grad = torch.ones_like(leaf)
    before = [None if leaf.grad is None else leaf.grad.clone() for leaf in ours]
    with weight_grads.defer_to("W"):
        layer(ours, order, weight_grads=weight_grads, kernels=kernels).backward(dy)
    assert torch.equal(ours[0].grad, expected[0].grad)
    assert torch.equal(ours[3].grad, expected[3].grad)
    for leaf, grad in zip(ours[1:3], before[1:3], strict=True):
        assert leaf.grad is None if grad is None else torch.equal(leaf.grad, grad)
    weight_grads.run_deferred("W")
    for leaf, other in zip(ours[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(leaf.grad, other.grad + has_grad)


@pytest.mark.long
def test_num_sms_limits_the_programs_of_each_product(monkeypatch):
    programs = record_programs(monkeypatch)
    *tensors, order, dy = moe(20, 2, 3, 40, 40, torch.float32)
    leaves = [t.requires_grad_() for t in tensors]
    with all_kernels(POINTERS):
        layer(leaves, order, num_sms=3, kernels="triton").backward(dy)
        assert programs == [3] * 6  # forward: up, down; backward: down, up, two weight gradients
        programs.clear()
        rows = permute(leaves[0], order, "triton")
        grouped_linear(rows, leaves[1], order.expert_offsets, num_sms=2, kernels="triton").sum().backward()
        assert programs == [2] * 3


@pytest.mark.parametrize("config", [POINTERS, TMA], ids=["pointers", "tma"])
@pytest.mark.quick("tma")
def test_persistent_programs_compute_all_tiles(config, monkeypatch):
    monkeypatch.setattr(launch_args, "_num_multiprocessors", lambda _device: 2)
    programs = record_programs(monkeypatch)
    x, w, dy = (normal(*shape, dtype=torch.float32) for shape in ((37, 24), (3, 40, 24), (37, 40)))
    results = []
    for per_sm in (None, 2):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        with all_kernels(dataclasses.replace(config, per_sm=per_sm)):
            y = grouped_linear(leaves[0], leaves[1], offsets_of([0, 30, 7]), kernels="triton")
            y.backward(dy)
            results.append([y, *(leaf.grad for leaf in leaves)])
            grouped_mm(x, w, offsets_of([0, 30, 7]), num_sms=3, kernels="triton")
    assert programs[4:] == [4, 4, 4, 3]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


# ---- refusals ----


def zeros(*shape, **options):
    return torch.zeros(*shape, **{"device": DEVICE, **options})


def run_experts(dtype=torch.float32, kernels="triton", **changes):
    x, gate_up, down, weights, order, _ = moe(6, 2, 3, 16, 8, dtype, torch.randint(0, 3, (6, 2)))
    given = {"x_ND": x, "gate_up_EGD": gate_up, "down_EDF": down, "order": order, "weights_NK": weights}
    return experts(**{**given, "kernels": kernels, **changes})


def wgrad(dy, x, **options):
    return lambda: grouped_wgrad(dy, x, offsets_of([3, 1]), kernels="triton", **options)


def product(x, w, counts=(3, 1)):
    return lambda: grouped_linear(x, w, offsets_of(counts), kernels="triton")


REFUSED = [
    (partial(run_experts, x_ND=zeros(5, 16)), r"this order needs x \[6, D\]: got \[5, 16\]"),
    (
        partial(run_experts, x_ND=zeros(6, 15)),
        r"x \[N, 15\] and an order of 3 experts do not match down \[E, D, F\] = \[3, 16, 8\]",
    ),
    (partial(run_experts, gate_up_EGD=zeros(3, 15, 16)), r"got \[3, 15, 16\] and \[3, 16, 8\]"),
    (
        partial(run_experts, gate_up_EGD=zeros(4, 16, 16), down_EDF=zeros(4, 16, 8)),
        "order of 3 experts do not match down",
    ),
    (partial(run_experts, weights_NK=zeros(6, 3)), r"weights must be \[N, K\] = \[6, 2\]: got \[6, 3\]"),
    (partial(run_experts, x_ND=zeros(6, 16, dtype=torch.float16)), r"one floating-point dtype: got torch\.float16, "),
    (partial(run_experts, x_ND=zeros(16, 6).T), r"with contiguous rows: got \[6, 16\] with strides \(1, 6\)"),
    (partial(run_experts, down_EDF=zeros(3, 8, 16).mT), r"down must be contiguous: got \[3, 16, 8\] with strides"),
    (partial(run_experts, gate_up_EGD=zeros(3, 16, 16, device="meta")), "all tensors must be on one device: got "),
    (partial(run_experts, num_sms=0), "num_sms must be at least 1, or None for all: got 0"),
    (partial(run_experts, kernels="fast"), "kernels must be one of auto, triton, reference: got 'fast'"),
    (partial(run_experts, torch.float64), r'"triton" supports bfloat16, float16 and float32: got torch\.float64'),
    (
        partial(run_experts, accumulate=True, gate_up_EGD=zeros(3, 16, 16, requires_grad=True) * 1),
        r"adds to gate_up\.grad: gate_up must be a leaf, not computed from other tensors",
    ),
    (
        partial(
            run_experts, torch.float16, accumulate=True,
            gate_up_EGD=zeros(3, 16, 16, dtype=torch.float16, requires_grad=True),
        ),
        r"of gate_up is torch\.float16: set gate_up\.grad_dtype = torch\.float32",
    ),
    (wgrad(zeros(4, 8), zeros(5, 6)), r"x \[M, I\] of the same dtype: got \[4, 8\] in torch\.float32 and \[5, 6\]"),
    (wgrad(zeros(4, 8), zeros(4, 6, dtype=torch.float16)), r"of the same dtype: got .* and \[4, 6\] in torch\.float16"),
    (wgrad(zeros(8, 4).T, zeros(4, 6)), "dy must be .* with contiguous rows"),
    (wgrad(zeros(4, 8), zeros(4, 6), add_to=zeros(2, 6, 8)), r"add_to must be \[2, 8, 6\]: got \[2, 6, 8\]"),
    (wgrad(zeros(4, 8), zeros(4, 6), add_to=zeros(2, 6, 8).mT), r"add_to must be contiguous: got \[2, 8, 6\]"),
    (product(zeros(4, 8), zeros(2, 6, 8).half()), r"of the same dtype: got torch\.float32 and torch\.float16"),
    (product(zeros(4, 8), zeros(2, 6, 8), (3, 1, 0)), "2 experts need 3 offsets in int32"),
    (product(zeros(4, 8), zeros(2, 8, 6).mT), "w must be contiguous"),
]  # fmt: skip


@pytest.mark.parametrize("call,message", REFUSED, ids=[message for _, message in REFUSED])
def test_arguments_that_do_not_fit_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_float64_uses_plain_torch():
    assert run_experts(torch.float64, "auto").dtype == torch.float64


@pytest.mark.skipif(GPU, reason="a limit of the interpreter")
def test_bfloat16_raises_in_the_interpreter():
    with pytest.raises(ValueError, match="interpreter gives wrong results in bfloat16"):
        run_experts(torch.bfloat16)
