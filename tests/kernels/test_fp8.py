"""FP8: what is rounded, how far, and what the experts compute from it."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dualpipe.kernels import fp8
from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.fp8 import RECIPES, quantize
from moe_dualpipe.kernels.routing import expert_order
from moe_dualpipe.kernels.weight_grads import WeightGrads
from tests.support.properties import given, settings, st

TWO_POWERS = [name for name, recipe in RECIPES.items() if recipe.power_of_two]


def random(*shape, seed=0, spread=3.0):
    """Numbers of very different sizes, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(spread * torch.randn(shape, generator=generator))
    return x.where(torch.rand(shape, generator=generator) > 0.1, 0.0)


def same(a, b):
    return torch.equal(a.stored.view(torch.uint8), b.stored.view(torch.uint8)) and torch.equal(a.scales, b.scales)


# ---- Rounding ----


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 300), st.integers(1, 130), st.sampled_from([32, 128]), st.booleans(),
       st.integers(0, 99))  # fmt: skip
def test_a_number_is_off_by_a_16th_or_by_the_smallest_step_of_its_block(R, C, rows, columns, power_of_two, seed):
    x = random(2, R, C, seed=seed)
    found = quantize(x, rows, columns, power_of_two)
    read = found.read(torch.float64)
    for r in range(0, R, rows):
        for c in range(0, C, columns):
            block = x[:, r : r + rows, c : c + columns].double()
            scale = found.scales[:, r // rows, c // columns].double()
            least = block.abs().amax((1, 2)) / 448
            most = (2 if power_of_two else 1 + 1e-6) * least + (least == 0).double()  # a block of zeros has scale 1
            assert (scale >= least * (1 - 1e-6)).all() and (scale <= most).all()
            off = (read[:, r : r + rows, c : c + columns] - block).abs()
            assert (off <= (block.abs() / 16).maximum(2**-10 * scale[:, None, None]) * (1 + 1e-6)).all()
    if power_of_two:
        assert (torch.frexp(found.scales)[0] == 0.5).all()


class DividesAsCuda(TorchDispatchMode):
    """CUDA multiplies by the reciprocal of a number, and of a tensor without dimensions."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.div.Tensor and (not isinstance(args[1], torch.Tensor) or not args[1].dim()):
            return args[0] * (1 / torch.as_tensor(args[1], dtype=args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", RECIPES)
def test_scales_have_the_same_bits_on_a_gpu(name):
    x = random(40, 300)
    with DividesAsCuda():
        found = RECIPES[name].quantize_rows(x)
    assert same(found, RECIPES[name].quantize_rows(x))


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_is_rounded_as_if_it_were_alone_and_its_multiples_by_powers_of_two_exactly(name):
    recipe, x = RECIPES[name], random(9, 300)
    whole = recipe.quantize_rows(x)
    order = torch.tensor([7, 0, 3, 3])
    assert same(whole.take(order), recipe.quantize_rows(x[order]))
    for power in (-20, 13):
        scaled = recipe.quantize_rows(x * 2.0**power)
        assert torch.equal(scaled.stored.view(torch.uint8), whole.stored.view(torch.uint8))
        assert torch.equal(scaled.scales[x.any(1)], (whole.scales * 2.0**power)[x.any(1)])
    assert not recipe.quantize_rows(torch.zeros(2, 5)).read().any()
    x[4, 130] = torch.inf
    assert recipe.quantize_rows(x).read().isnan().any(1).tolist() == [row == 4 for row in range(9)]


@pytest.mark.parametrize("name", TWO_POWERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_powers_of_two_rounding_what_was_read_changes_nothing(name, dtype):
    read = RECIPES[name].quantize_rows(random(20, 300)).read()
    assert torch.equal(read.to(dtype).float(), read)
    assert torch.equal(RECIPES[name].quantize_rows(read.to(dtype)).read(), read)


# ---- Experts ----

N, K, E, D, F = 23, 3, 5, 160, 72


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(N)])  # the last expert has no rows
    ids[4, 1] = ids[0] = -1
    shapes = (N, D), (E, 2 * F, D), (E, D, F)
    tensors = [random(*shape, seed=seed, spread=1).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    return tensors, torch.rand(N, K, generator=generator).requires_grad_(), ids, random(N, D, seed=9).to(dtype)


def run(recipe, dtype=torch.float32, inside=False, deferred=False):
    (x, gate_up, down), weights, ids, dy = problem(dtype)
    grads = WeightGrads()
    y = experts(
        x,
        gate_up,
        down,
        expert_order(ids, E, int((ids >= 0).sum())),
        weights,
        weight_inside=inside,
        fp8=recipe,
        weight_grads=grads,
    )
    with grads.defer_to("this pass") if deferred else nullcontext():
        y.backward(dy)
    if deferred:
        assert gate_up.grad is None and down.grad is None
        grads.run_deferred("this pass")
    return [y.detach(), x.grad, gate_up.grad, down.grad, weights.grad]


def loop(recipe, inside):
    """The experts and their gradients, one choice at a time, in fp64 from the numbers that were rounded."""
    (x, gate_up, down), weights, ids, dy = problem()
    read = lambda rows: recipe.quantize_rows(rows.float()).read(torch.float64)  # noqa: E731
    up, down_T = recipe.quantize_weights(gate_up), recipe.quantize_weights(down.mT).read(torch.float64)
    up, up_T, down = up.read(torch.float64), recipe.quantize_weights(gate_up.mT).read(torch.float64), down
    down_8 = recipe.quantize_weights(down).read(torch.float64)
    y, dx, dw = torch.zeros(N, D).double(), torch.zeros(N, D).double(), torch.zeros(N, K).double()
    d_up, d_down = torch.zeros(E, 2 * F, D).double(), torch.zeros(E, D, F).double()
    x8, dy8 = read(x), read(dy)
    for n in range(N):
        for k in range(K):
            if (e := int(ids[n, k])) < 0:
                continue
            w, z = weights[n, k].detach().double(), (up[e] @ x8[n]).float().double().requires_grad_()
            with torch.enable_grad():
                h = torch.nn.functional.silu(z[:F]) * z[F:]
            out = down_8[e] @ read((w * h if inside else h).detach()[None].float())[0]
            y[n] += out if inside else w * out
            dh = down_T[e] @ dy8[n]
            (dz,) = torch.autograd.grad(h, z, w * dh)
            dw[n, k] = dh @ h.detach()
            dx[n] += up_T[e] @ read(dz[None])[0]
            d_up[e] += torch.outer(dz, x8[n])
            d_down[e] += torch.outer(dy[n].double(), w * h.detach())
    return [y, dx, d_up, d_down, dw]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("inside", [False, True])
def test_experts_and_their_gradients_are_products_of_the_rounded_numbers(name, inside):
    for found, expected in zip(run(RECIPES[name], inside=inside), loop(RECIPES[name], inside), strict=True):
        # A number at the edge between two 8-bit numbers may be rounded to either.
        assert (found - expected).norm() <= 1e-3 * expected.norm()
        assert ((found - expected).abs() <= 1e-5 * expected.abs().max()).double().mean() > 0.97


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_changes_results_by_a_few_percent_and_deferred_weight_gradients_by_nothing(dtype):
    plain, rounded, deferred = (
        run(None, dtype),
        run(RECIPES["ue8m0"], dtype),
        run(RECIPES["ue8m0"], dtype, deferred=True),
    )
    for a, b, c in zip(plain, rounded, deferred, strict=True):
        assert torch.equal(b, c) and a.dtype == b.dtype
        assert 0.005 < (a - b).float().norm() / a.float().norm() < 0.1
    for gradient in rounded[2:4]:
        assert not gradient[-1].any() and gradient[:-1].any((1, 2)).all()  # the last expert has no rows
    assert not rounded[0][0].any() and not rounded[1][0].any()  # nor has the first row an expert


def test_while_weights_do_not_change_each_is_rounded_once(monkeypatch):
    rounded, recipe = [], RECIPES["ue8m0"]
    monkeypatch.setattr(fp8, "quantize", lambda x, rows, *sizes: rounded.append(rows) or quantize(x, rows, *sizes))
    with fp8.weights_unchanged():
        first, second = run(recipe), run(recipe)
    assert rounded.count(128) == 2 * 4  # two runs have weights of their own: each is read along both dimensions
    with fp8.weights_unchanged():
        w = torch.ones(1, 2, 3)
        assert recipe.quantize_weights(w) is recipe.quantize_weights(w) is not recipe.quantize_weights(w.clone())
        cast = w.requires_grad_().double()
        assert recipe.quantize_weights(cast) is not recipe.quantize_weights(cast), "each micro-batch casts anew"
    w = w.detach() + 1
    assert recipe.quantize_weights(w).read().eq(2).all()
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("name,gpu,line", [
    ("ue8m0", (9, 0), ""), ("mxfp8", (10, 3), ""),
    ("fp32", (8, 9), "Hopper or a later GPU for Triton: use compute.fp8=off"),
    ("mxfp8", (9, 0), "Blackwell or a later GPU for Triton: use the recipe ue8m0 or fp32"),
])  # fmt: skip
def test_recipes_need_the_tensor_cores_that_multiply_so(monkeypatch, name, gpu, line):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: gpu)
    assert RECIPES[name].kernels_fault(torch.device("cuda")).endswith(line)
    assert bool(RECIPES[name].kernels_fault(torch.device("cuda"))) == bool(line)
    assert RECIPES[name].kernels_fault(torch.device("cpu")) == ""


def test_a_gpu_without_kernels_and_a_second_derivative_are_refused(monkeypatch):
    (x, gate_up, down), weights, ids, _ = problem()
    arguments = x, gate_up, down, expert_order(ids, E, int((ids >= 0).sum())), weights
    monkeypatch.setattr(fp8.Fp8Recipe, "kernels_fault", lambda *_: "needs another GPU: use another recipe")
    with pytest.raises(ValueError, match='FP8 needs another GPU: use another recipe, or kernels="reference"'):
        experts(*arguments, fp8=RECIPES["mxfp8"], kernels="triton")
    y = experts(*arguments, fp8=RECIPES["ue8m0"])
    with pytest.raises(RuntimeError, match="experts in FP8 cannot be differentiated twice"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
