"""Compares the plain-torch operators with simple loops, and tests deferred weight gradients, and products in oneDNN.

A second derivative of any operator is right, or an error. It is never silently zero.
"""

import itertools
import os
import signal
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe_dualpipe.expert_parallel import Local, combine, dispatch
from moe_dualpipe.kernels import products
from moe_dualpipe.kernels.cross_entropy import linear_cross_entropy
from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.grouped_gemm import _grouped_mm_reference, grouped_linear
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.permute import gather_sum, permute, unpermute
from moe_dualpipe.kernels.products import choose_products, chosen_library, rows_step
from moe_dualpipe.kernels.routing import expert_order, route
from moe_dualpipe.kernels.weight_grads import WeightGrads, accumulate
from moe_dualpipe.models import attach
from moe_dualpipe.overlap import Compute
from tests.support.kernels import DEVICE, needs_onednn, small_products_in_onednn
from tests.support.properties import given, settings, st
from tests.support.segments import module_of


def offsets_of(counts):
    return torch.tensor([0, *counts]).cumsum(0).int()


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


# ---- products ----


def gradients(product, x, w, deferred=False, grad_dtype=None):
    """Output and gradients of `product(x, w, weight_grads)`. Deferred: that of w comes in a step of its own."""
    x, w = (t.detach().requires_grad_() for t in (x, w))
    w.grad_dtype, weight_grads = grad_dtype or w.dtype, WeightGrads()
    with weight_grads.defer_to("later") if deferred else nullcontext():
        y = product(x, w, weight_grads)
        y.backward(torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y))
    if deferred:
        assert w.grad is None
        weight_grads.run_deferred("later")
    return y, x.grad, w.grad


def checkpointed(product):
    return lambda x, w, grads: checkpoint(lambda x: product(x, w, grads).tanh(), x, use_reentrant=False)


def grouped(x, w, grads, offsets):
    return grouped_linear(x, w, offsets, grads)


def loop_over_experts(x, w, _, offsets):
    return torch.cat([x[a:b] @ w[e].T for e, (a, b) in enumerate(itertools.pairwise(offsets))])


# Rows per expert, among them: empty experts at both ends, one expert with all rows, and no rows at all.
COUNTS = [[3, 1, 4, 2], [1], [0, 5, 0, 2, 0], [0, 7, 0], [300, 7], [0, 0]]
ROWS = {
    "contiguous": lambda rows, width: torch.randn(rows, width), "every other": lambda *s: torch.randn(*s, 2)[..., 0],
    "the same": lambda rows, width: torch.randn(1, width).expand(rows, width),
    "transposed": lambda rows, width: torch.randn(width, rows).T,
    "slices": lambda rows, width: torch.randn(rows, width + 9)[:, 3 : width + 3],
}  # fmt: skip


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("inputs,outputs,dtype,library", [
    (5, 4, torch.float32, "mkl"), (8, 12, torch.float32, "mkl"),
    pytest.param(40, 36, torch.float32, "onednn", marks=needs_onednn), (8, 1, torch.float64, "onednn"),
    (40, 36, torch.bfloat16, "mkl"),
])  # fmt: skip
@pytest.mark.quick(
    "5-4-dtype0-mkl-contiguous-True", "5-4-dtype0-mkl-every other-False", "5-4-dtype0-mkl-the same-True",
    "5-4-dtype0-mkl-transposed-False", "5-4-dtype0-mkl-slices-True", "8-12-dtype1-mkl-contiguous-False",
    "8-12-dtype1-mkl-every other-True", "8-12-dtype1-mkl-the same-False", "8-12-dtype1-mkl-transposed-True",
    "8-12-dtype1-mkl-slices-False", "40-36-dtype2-onednn-contiguous-True", "40-36-dtype2-onednn-every other-False",
    "40-36-dtype2-onednn-the same-True", "40-36-dtype2-onednn-transposed-False", "40-36-dtype2-onednn-slices-True",
    "8-1-dtype3-onednn-contiguous-False", "8-1-dtype3-onednn-every other-True", "8-1-dtype3-onednn-the same-False",
    "8-1-dtype3-onednn-transposed-True", "8-1-dtype3-onednn-slices-False", "40-36-dtype4-mkl-slices-True",
)  # fmt: skip
def test_products_and_their_gradients_equal_a_loop_over_experts(
    layout, inputs, outputs, dtype, library, deferred, monkeypatch
):
    close = torch.testing.assert_close
    if library == "onednn":
        small_products_in_onednn(monkeypatch)
        close = partial(close, rtol=1.3e-6, atol=3e-5)  # weight gradients sum up to 300 products, each up to 10
    if dtype == torch.bfloat16:
        close = partial(close, rtol=1.6e-2, atol=3e-3)
    for counts in COUNTS:
        x, w = ROWS[layout](sum(counts), inputs).to(dtype), leaf(len(counts), outputs, inputs, dtype=dtype)
        ours = partial(grouped, offsets=offsets_of(counts))
        loop = partial(loop_over_experts, offsets=offsets_of(counts))
        for mine, theirs in ((ours, loop), (checkpointed(ours), checkpointed(loop))):
            close(gradients(mine, x, w, deferred), gradients(theirs, x, w))
        assert all(count or not dw.any() for count, dw in zip(counts, gradients(ours, x, w)[2], strict=True))
    for leading in ((), (1,), (7,), (2, 33), (0,)):
        x, w = torch.randn(*leading, inputs, dtype=dtype), leaf(outputs, inputs, dtype=dtype)
        plain = lambda x, w, _: torch.nn.functional.linear(x, w)  # noqa: E731
        for mine, theirs in ((linear, plain), (checkpointed(linear), checkpointed(plain))):
            close(gradients(mine, x, w, deferred), gradients(theirs, x, w))


@pytest.mark.parametrize("product,shape", [(linear, (4, 8)), (partial(grouped, offsets=offsets_of([3, 2])), (2, 4, 8))])
def test_autocast_dtype_of_outputs_and_gradients(product, shape):
    x, w = torch.randn(5, 8), torch.randn(shape)
    expected = gradients(product, x, w)
    found = gradients(torch.autocast("cpu", torch.bfloat16)(product), x, w)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close([t.float() for t in found], [*expected], rtol=3e-2, atol=5e-2)


@pytest.mark.parametrize("width", [8, 5])  # one that torch's grouped product takes, and one that it does not
def test_rows_past_the_last_offset_are_those_of_no_expert(width):
    """Only a GPU may have them: a CPU checks the offsets."""
    x, w = torch.randn(6, width), torch.randn(2, width, width)
    y = _grouped_mm_reference(x, w, torch.tensor([1, 4], dtype=torch.int32))
    assert y.shape == (6, width)
    torch.testing.assert_close(y[:4], torch.cat([x[:1] @ w[0], x[1:4] @ w[1]]))
    assert width == 8 or not y[4:].any()


@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_of_an_fp32_product_of_bf16_tensors_are_rounded_to_the_dtypes_of_the_gradients_alone(deferred):
    x, w = torch.randn(7, 300).bfloat16(), torch.randn(5, 300).bfloat16()
    product = partial(linear, fp32=True)
    y, dx, dw = gradients(product, x, w, deferred, grad_dtype=torch.float32)
    exact = gradients(lambda x, w, _: x @ w.T, x.double(), w.double())
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(dx.double(), exact[1], rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(dw.double(), exact[2], rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product(x, w), y)  # autocast does not lower its precision


def test_deferred_gradients_run_per_key_in_any_order_and_at_most_max_deferred_keys_wait():
    weight, grads, ran = leaf(2), WeightGrads(max_deferred=2), []
    for key in range(5):
        with grads.defer_to(key):
            grads.defer(weight, lambda key=key: ran.append(key) or torch.ones(2))
        assert len(grads) == min(key + 1, 2) and ran == [*range(key - 1)]  # the oldest are computed early
    for key in (4, 0, 3, 1, 2):
        grads.run_deferred(key)  # those that were computed early are not computed again
    assert ran == [0, 1, 2, 4, 3] and weight.grad.tolist() == [5, 5]
    grads.clear()
    for key in range(5):
        with pytest.raises(KeyError):
            grads.run_deferred(key)


def test_deferral_does_not_nest_and_a_key_is_deferred_to_once():
    grads = WeightGrads()
    with grads.defer_to(1):
        assert grads.defers(leaf(2))
        with pytest.raises(RuntimeError, match="weight gradients for 2 are already being deferred"), grads.defer_to(2):
            pass
    assert not grads.defers(leaf(2))
    with pytest.raises(RuntimeError, match="weight gradients for 1 are already being deferred"), grads.defer_to(1):
        pass
    with pytest.raises(ValueError, match="max_deferred must be at least 1, or None for no bound: got 0"):
        WeightGrads(max_deferred=0)


def test_a_weight_with_hooks_or_a_computed_weight_is_not_deferred():
    grads, seen, x = WeightGrads(), [], leaf(3, 5)
    watched, hooked, plain = (leaf(4, 5) for _ in range(3))
    watched.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    hooked.register_hook(lambda grad: 2 * grad)
    with grads.defer_to(0):
        for weight in (watched, hooked, plain * 3):
            linear(x, weight, grads).sum().backward()
    expected = x.detach().sum(0).expand(4, 5)
    torch.testing.assert_close([seen[0], hooked.grad, plain.grad], [factor * expected for factor in (1, 2, 3)])
    assert not grads.has_deferred(0)


def test_accumulate_follows_grad_dtype():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    for grad in ([1.0, 2.0], [2**-10, 0.0]):
        accumulate(parameter, lambda grad=grad: torch.tensor(grad, dtype=torch.bfloat16))
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [1 + 2**-10, 2.0]  # bf16 would have lost the small term


# ---- expert order, permute and unpermute ----


@st.composite
def choices(draw):
    rows, columns, experts = draw(st.integers(0, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    ids = draw(st.lists(st.integers(-1, experts - 1), min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(ids, dtype=torch.int64).view(rows, columns), experts


@settings(max_examples=80, deadline=None)
@given(choices())
def test_orders_permute_and_unpermute_equal_loops(drawn):
    ids_NK, experts = drawn
    flat = ids_NK.flatten().tolist()
    expected = [choice for e in range(experts) for choice, i in enumerate(flat) if i == e]  # in the order of rows
    order = expert_order(ids_NK, experts, len(expected))
    assert order.choice_idx_M.tolist() == expected
    assert order.gather_idx_M.tolist() == [choice // ids_NK.shape[1] for choice in expected]
    assert order.positions_NK.flatten().tolist() == [expected.index(c) if i >= 0 else -1 for c, i in enumerate(flat)]
    assert torch.equal(order.expert_offsets, offsets_of([flat.count(e) for e in range(experts)]))

    x, z = leaf(len(ids_NK), 4), leaf(len(expected), 4)
    w = torch.rand(ids_NK.shape, dtype=torch.float64, requires_grad=True)
    summed = torch.zeros_like(x)
    for ours, theirs, inputs in (
        (permute(x, order), x[order.gather_idx_M], [x]),
        (unpermute(z, order), summed.index_add(0, order.gather_idx_M, z), [z]),
        (unpermute(z, order, w), summed.index_add(0, order.gather_idx_M, z * w.flatten()[expected, None]), [z, w]),
    ):
        torch.testing.assert_close(ours, theirs)
        direction = torch.randn_like(ours)
        grads = [torch.autograd.grad(y, inputs, direction, retain_graph=True) for y in (ours, theirs)]
        torch.testing.assert_close(*grads)


def test_an_order_of_more_experts_than_16_bits():
    ids = torch.tensor([[40_000, 0], [32_767, 40_000]])
    assert expert_order(ids, 40_001).positions_NK.tolist() == [[2, 0], [1, 3]]
    assert expert_order(ids % 32_767, 32_767).positions_NK.tolist() == [[2, 0], [1, 3]]


def test_gather_sum_of_bf16_rows_rounds_once():
    rows, positions = torch.randn(8, 16).bfloat16(), torch.arange(8)[None]
    for weights in (torch.ones(1, 8), torch.rand(1, 8)):
        expected = (rows.float() * weights[0][:, None]).sum(0).bfloat16()
        assert torch.equal(gather_sum(rows, positions, weights)[0], expected)
    assert torch.equal(gather_sum(rows, positions)[0], rows.float().sum(0).bfloat16())


# ---- the library of products, which follows from the machine ----


def test_a_process_that_is_forked_during_a_product_of_another_thread_has_torchs_setting_and_the_lock():
    before, inside, leave = products._SETTING.fp32_precision, threading.Event(), threading.Event()

    def multiply():
        with products._onednn():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=multiply)
    thread.start()
    inside.wait()
    threading.Timer(0.2, leave.set).start()
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)  # ends a child that waits for the lock
        found = products._SETTING.fp32_precision
        with products._onednn():
            os._exit(found != before)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def dense(matrix):
    """A copy without gaps, with rows or columns contiguous as in `matrix`."""
    return matrix.contiguous() if matrix.stride(0) > matrix.stride(1) else matrix.T.contiguous().T


@needs_onednn
@pytest.mark.parametrize("layout", [layout for layout in ROWS if layout != "the same"])
@torch.no_grad()
def test_products_in_onednn_are_exact_and_equal_in_every_run_and_layout(layout, monkeypatch):
    """oneDNN multiplies some layouts in a slow loop, whose sums have other bits: no layout may get there."""
    small_products_in_onednn(monkeypatch)
    x, w, dy = torch.randn(288, 200), ROWS[layout](70, 200), ROWS[layout](288, 70)
    for left, right in ((x, w.T), (dy, w), (dy.T, x)):
        with chosen_library(left, right.shape[1]):
            found = left @ right
            assert torch.equal(found, left @ right)
            assert torch.equal(found, dense(left) @ dense(right))
        exact = left.double() @ right.double()
        assert (found - exact).abs().max() <= 1e-6 * exact.abs().max() + 1e-5


def test_one_thread_at_a_time_permits_torch_to_call_onednn():
    """Otherwise, one would take the permission back while the other multiplies."""
    seen = []

    def enter():
        with products._onednn():
            seen.append(products._SETTING.fp32_precision)

    other = threading.Thread(target=enter)
    with products._onednn():
        other.start()
        other.join(0.05)
        assert not seen
    other.join()
    assert [*seen, products._SETTING.fp32_precision] == ["bf16", "none"]


class Shapes(TorchDispatchMode):
    """Collects the shapes of products that are written into their place."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.out:
            self.seen.add((*args[0].shape, args[1].shape[1]))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_of_any_load_need_few_shapes_in_onednn(dtype, monkeypatch):
    if dtype == torch.float32:  # in 16 bits, torch itself calls oneDNN
        small_products_in_onednn(monkeypatch)
    with Shapes() as shapes:
        for counts in torch.randint(1, 250, (40, 6)):
            x, w = leaf(int(counts.sum()), 8, dtype=dtype), leaf(6, 8, 8, dtype=dtype)
            grouped_linear(x, w, offsets_of(counts.tolist())).sum().backward()
    # 8, 16, ... 128, 144, ... 256 rows in the forward and the input gradient, and as many or 0 in the weight gradient.
    assert 40 < len(shapes.seen) <= 24 + 24 + 24
    for rows in range(1, 3000):
        assert rows % rows_step(rows) <= max(7, rows / 8)


@needs_onednn
def test_second_derivatives_are_those_of_torch(monkeypatch):
    x, w, found = torch.randn(40, 18, requires_grad=True), torch.randn(15, 18, requires_grad=True), []
    for small in (False, True):
        if small:
            small_products_in_onednn(monkeypatch)
        for product in (linear, partial(grouped_linear, expert_offsets=offsets_of([0, 40]))):
            weight = w if product is linear else torch.stack([w, w])
            gradients = torch.autograd.grad(product(x, weight).square().sum(), [x, w], create_graph=True)
            found.append(torch.autograd.grad(torch.stack([t.square().sum() for t in gradients]).sum(), [x, w]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


ZEN_5 = "vendor_id : AuthenticAMD\ncpu family      : 26"


@pytest.mark.parametrize("kind,cpu,capability,precise,mkl,onednn,expected", [
    ("cpu", ZEN_5, "AVX512", True, True, True, "onednn"),
    ("cpu", "AMD64 Family 26 Model 36 Stepping 0, AuthenticAMD", "AVX512", True, True, True, "onednn"),
    ("cpu", ZEN_5.replace("26", "25"), "AVX512", True, True, True, "mkl"),
    ("cpu", ZEN_5.replace("AuthenticAMD", "GenuineIntel"), "AVX512", True, True, True, "mkl"),
    ("cpu", "", "AVX512", True, True, True, "mkl"), ("cpu", ZEN_5, "AVX2", True, True, True, "mkl"),
    ("cpu", ZEN_5, "AVX512", True, False, True, "mkl"), ("cpu", ZEN_5, "AVX512", True, True, False, "mkl"),
    ("cuda", ZEN_5, "AVX512", True, True, True, "mkl"), ("cpu", ZEN_5, "AVX512", False, True, True, "mkl"),
])  # fmt: skip
def test_auto_is_onednn_where_mkl_leaves_half_of_the_vectors_unused(
    kind, cpu, capability, precise, mkl, onednn, expected, monkeypatch
):
    monkeypatch.setattr(products, "_cpu", lambda: cpu)
    monkeypatch.setattr(products, "_onednn_is_precise", lambda: precise)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    assert choose_products("auto", kind) == expected
    assert choose_products("mkl", kind) == "mkl"
    if kind == "cuda":
        problem = "a CPU, and this run is on a GPU"
    elif not onednn:
        problem = "oneDNN, which this PyTorch lacks"
    elif not precise or capability == "AVX2":
        problem = "a CPU with AVX-512, without AMX"
    else:
        assert choose_products("onednn", kind) == "onednn"
        return
    with pytest.raises(ValueError, match=f"^compute.products=onednn needs {problem}: use compute.products=auto$"):
        choose_products("onednn", kind)


# ---- Second derivatives ----


IDS = torch.tensor([[0, 1], [1, -1], [2, 0]], device=DEVICE)
ORDER = expert_order(IDS, 3, 5, "reference")
LABELS = torch.tensor([1, -100, 0], device=DEVICE)
EP = Local(3, "reference")
EXCHANGE = EP.prepare(IDS)


def segment(_module, x):
    return (yield Compute("mlp", torch.exp, x))


# The function, and the shapes of its inputs; by the autograd function that it calls, and whether it runs in Triton.
FUNCTIONS = {
    "_LinearFunction": (lambda x, w: linear(x, w, WeightGrads()), [(5, 8), (4, 8)]),
    "GroupedLinearFunction": (
        lambda x, w: grouped_linear(x, w, ORDER.expert_offsets, kernels="reference"), [(5, 8), (3, 4, 8)],
    ),
    "_PermuteFunction": (lambda x: permute(x, ORDER, "reference"), [(3, 4)]),
    "_UnpermuteFunction": (lambda x, w: unpermute(x, ORDER, w, "reference"), [(5, 4), (3, 2)]),
    "_LinearCrossEntropyFunction": (lambda x, w: linear_cross_entropy(x, w, LABELS), [(3, 8), (4, 8)]),
    "_Attach": (lambda x, w: attach(x.exp(), w.square().sum()), [(), (3,)]),
    "_ChunkNode": (lambda x: module_of(segment)(x), [(3, 4)]),
    "_DispatchFunction": (lambda x, w: sum(t.sum() for t in dispatch(x, w, EXCHANGE, EP)), [(3, 4), (3, 2)]),
    "_CombineFunction": (lambda x: combine(x, EXCHANGE, EP), [(3, 4)]),
    "GroupedLinearFunction triton": (
        lambda x, w: grouped_linear(x, w, ORDER.expert_offsets, kernels="triton"), [(5, 8), (3, 4, 8)],
    ),
    "_PermuteFunction triton": (lambda x: permute(x, ORDER, "triton"), [(3, 4)]),
    "_UnpermuteFunction triton": (lambda x, w: unpermute(x, ORDER, w, "triton"), [(5, 4), (3, 2)]),
    "_ExpertsFunction triton": (
        lambda x, up, down, w: experts(x, up, down, ORDER, w, kernels="triton"), [(3, 8), (3, 8, 8), (3, 8, 4), (3, 2)],
    ),
    "_RouteFunction triton": (lambda x: route(x, 2, kernels="triton")[0], [(3, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_is_right_or_an_error(name):
    """The output gradient is a constant, as that of `loss.backward()`: torch's `once_differentiable` lets it pass."""
    function, shapes = FUNCTIONS[name]
    triton = name.endswith("triton")
    dtype = torch.float32 if triton else torch.float64
    inputs = [torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True) for shape in shapes]
    try:
        torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)
    except RuntimeError as error:
        assert "cannot be differentiated twice (create_graph): " in str(error)
        assert ('use kernels="reference"' in str(error)) == triton
    else:
        assert not triton
        assert torch.autograd.gradgradcheck(function, inputs)
