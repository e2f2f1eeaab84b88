"""The Gluon kernels for Hopper, on a model of a multiprocessor: their numbers, and all orders of their actions."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from moe_dualpipe.kernels.experts import swiglu
from moe_dualpipe.kernels.gpu import gemm as triton_gemm
from moe_dualpipe.kernels.gpu import tiles
from moe_dualpipe.kernels.gpu.configs import SHIPPED, TileConfig, load_table, override_config
from moe_dualpipe.kernels.gpu.descriptors import uses_gluon
from moe_dualpipe.kernels.gpu.gluon import CONFIGS, gemm, ring, rows, wgrad
from moe_dualpipe.kernels.gpu.gluon import swiglu as fused
from tests.support.hopper_machine import Machine, gluon
from tests.support.hopper_orders import HazardError, explore

DTYPE = torch.bfloat16
# Rows per expert: empty experts at both ends, tails, one tile, several tiles.
COUNTS = [0, 5, 0, 19, 16, 0]


PING_PONG = TileConfig(16, 32, 16, 4, 3, 2, tma=True, per_sm=1, engine="gluon")
COOPERATIVE = TileConfig(16, 32, 16, 8, 3, 2, tma=True, per_sm=1, engine="gluon")


class Kernel:
    """A kernel that the machine runs."""

    def __init__(self, machine, function):
        self.machine, self.function = machine, function

    def __getitem__(self, grid):
        return lambda *arguments, **_options: self.machine.run(self.function, grid, *arguments)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    models = gluon(machine)
    for module in (ring, rows, gemm, fused, wgrad, tiles):
        for name, item in list(vars(module).items()):
            if hasattr(item, "fn") and name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Kernel(machine, item.fn))
            elif hasattr(item, "fn"):
                monkeypatch.setattr(module, name, item.fn)
            elif name in models:
                monkeypatch.setattr(module, name, models[name])
        monkeypatch.setattr(module, "range", models["range"], raising=False)
    return machine


class Tiling:
    """The Tiling of tiles.py, without Triton."""

    def __init__(self, counts):
        self.offsets, self.num_rows = torch.tensor([0, *counts]).cumsum(0).int(), sum(counts)

    def __call__(self, block_m):
        ranges = enumerate(pairwise(self.offsets.tolist()))
        entries = [(e, row, end) for e, (start, end) in ranges for row in range(start, end, block_m)]
        return torch.tensor([(len(entries), -1, -1), *entries], dtype=torch.int32)

    def max_tiles(self, block_m):
        return self.num_rows // block_m + len(self.offsets) - 1


class Layer:
    """Random tensors of a layer, and the expert of each row."""

    def __init__(self, counts, d, f):
        self.tiling, self.m = Tiling(counts), sum(counts)
        self.expert_M = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        self.x, self.gate_up, self.down = normal(9, d), normal(len(counts), 2 * f, d), normal(len(counts), d, f)
        self.index_M, self.choice_M = torch.randint(9, (self.m,)), torch.randperm(self.m)
        self.z, self.h, self.weights = normal(self.m, 2 * f), normal(self.m, f), torch.randn(self.m)


def normal(*shape):
    return torch.randn(shape).to(DTYPE)


def nans(*shape, dtype=DTYPE):
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_close(ours, exact):
    assert ours.shape == exact.shape
    error = (ours.double() - exact).norm()
    assert error <= 8e-3 * exact.norm(), error / exact.norm()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_times_weights(transposed):
    layer = Layer(COUNTS, 24, 40)
    a, w = (layer.z, layer.gate_up) if transposed else (layer.h, layer.down)
    out = nans(layer.m, 24)
    gemm.rows_times_weights(a, w, out, layer.tiling, transposed, PING_PONG, 2)
    w = w.mT if transposed else w
    assert_close(out, torch.einsum("mk,mnk->mn", a.double(), w[layer.expert_M].double()))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("store_z,weighted", [(True, False), (False, True)])
def test_swiglu_up(store_z, weighted):
    layer = Layer(COUNTS, 24, 40)
    z, h = nans(layer.m, 80) if store_z else None, nans(layer.m, 40)
    weights = layer.weights if weighted else None
    fused.swiglu_up(
        layer.x, layer.index_M, layer.gate_up, z, h, layer.tiling, weights, layer.choice_M, COOPERATIVE, 2
    )  # fmt: skip
    exact = torch.einsum("mk,mnk->mn", layer.x[layer.index_M].double(), layer.gate_up[layer.expert_M].double())
    if z is not None:
        assert_close(z, exact)
    s = layer.weights[layer.choice_M].double() if weighted else torch.ones(layer.m).double()
    assert_close(h, swiglu(exact) * s[:, None])


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_down_backward(weighted):
    layer = Layer(COUNTS, 24, 40)
    dz, h, sums = nans(layer.m, 80), nans(layer.m, 40), nans(2, layer.m, dtype=torch.float32) if weighted else None
    weights = layer.weights if weighted else None
    fused.swiglu_down_backward(
        layer.x, layer.index_M, layer.down, layer.z, dz, h, sums, layer.tiling, weights, layer.choice_M, PING_PONG, 2
    )  # fmt: skip
    z = layer.z.double().requires_grad_()
    s = layer.weights[layer.choice_M].double() if weighted else torch.ones(layer.m).double()
    dh = torch.einsum("mk,mkn->mn", layer.x[layer.index_M].double(), layer.down[layer.expert_M].double())
    exact = swiglu(z)
    (exact_dz,) = torch.autograd.grad(exact, z, dh * s[:, None])
    assert_close(dz, exact_dz)
    assert_close(h, exact.detach() * s[:, None])
    if sums is not None:
        assert_close(sums.sum(0), (dh * exact.detach()).sum(1))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("gather,add", [("a", False), ("b", True), ("neither", False)])
def test_weight_gradients(gather, add):
    layer = Layer(COUNTS, 24, 40)
    # Rows of other experts, and those past the last one, must not get into a sum.
    layer.h = torch.cat([layer.h, nans(3, 40)])
    a, b = (layer.x, layer.h) if gather == "a" else (layer.h, layer.x if gather == "b" else normal(layer.m, 24))
    index_a, index_b = (layer.index_M if gather == name else None for name in "ab")
    before = torch.randn(len(COUNTS), a.shape[1], b.shape[1])
    out = before.clone() if add else nans(*before.shape, dtype=torch.float32)
    wgrad.weight_gradients(a, b, layer.tiling.offsets, out, index_a, index_b, add, COOPERATIVE, 2)
    rows_a, rows_b = (t[: layer.m] if i is None else t[i] for t, i in ((a, index_a), (b, index_b)))
    exact = before.double() if add else torch.zeros_like(before).double()
    exact.index_add_(0, layer.expert_M, rows_a.double()[:, :, None] * rows_b.double()[:, None, :])
    assert_close(out, exact)


# ---- the choice of engine ----


def test_the_shipped_table_uses_triton():
    assert {entry.config.engine for entry in load_table(SHIPPED)} == {"triton"}


@pytest.mark.parametrize(
    "arch,dtype", [("sm_100", torch.bfloat16), ("interpreter", torch.float16), ("sm_90", torch.float32)]
)
def test_gluon_needs_hopper_and_a_16_bit_dtype(arch, dtype):
    problem = f'engine "gluon" needs sm_90 and a 16-bit dtype: got {arch} and {dtype}'
    with pytest.raises(ValueError, match=problem):
        uses_gluon(CONFIGS["up"], arch, torch.empty(4, 8, dtype=dtype))
    assert not uses_gluon(replace(CONFIGS["up"], engine="triton"), arch, torch.empty(4, 8, dtype=dtype))


def test_triton_computes_what_tma_cannot_load():
    x = torch.empty(4, 32, dtype=DTYPE)
    assert uses_gluon(CONFIGS["up"], "sm_90", x, x[:, 8:16])
    assert not uses_gluon(CONFIGS["up"], "sm_90", x, x[:, 1:9])  # not aligned to 16 bytes
    assert not uses_gluon(CONFIGS["up"], "sm_90", x, x[:0])


@pytest.mark.usefixtures("machine")
def test_the_engine_of_a_configuration_computes_the_product(monkeypatch):
    monkeypatch.setattr(triton_gemm, "arch_of", lambda _device: "sm_90")
    layer = Layer(COUNTS, 24, 40)
    with override_config("down", PING_PONG):
        out = triton_gemm.rows_times_weights("down", layer.h, layer.down, layer.tiling)
    assert_close(out, torch.einsum("mk,mnk->mn", layer.h.double(), layer.down[layer.expert_M].double()))


# ---- all orders ----

# (slots, steps of each tile): no more tiles than slots, and more than twice as many.
RINGS = [(2, [1]), (2, [1] * 5), (2, [5, 5]), (3, [2] * 3)]


def explore_all(machine):
    """Explore all programs, those with the same actions once. Return the number of states."""
    return sum(explore(*run) for run in {str(run): run for run in machine.runs}.values())


def run_product(kernel, slots, steps):
    """Run a kernel with one program, a ring of `slots`, and these steps of each tile."""
    if kernel == "wgrad":
        layer, config = Layer([16 * n for n in steps], 8, 8), replace(COOPERATIVE, stages=slots)
        out = nans(len(steps), 8, 8)
        wgrad.weight_gradients(layer.h, layer.x, layer.tiling.offsets, out, None, layer.index_M, False, config, 1)
        return
    layer = Layer([1] * len(steps), 8 if kernel == "down" else 16 * steps[0], 16 * steps[0] if kernel == "down" else 8)
    config = replace(COOPERATIVE if kernel == "up" else PING_PONG, stages=slots)
    x, m, z, h, tiling, choice = layer.x, layer.index_M, layer.z, layer.h, layer.tiling, layer.choice_M
    if kernel == "down":
        gemm.rows_times_weights(h, layer.down, nans(layer.m, 8), tiling, False, config, 1)
    elif kernel == "up":
        fused.swiglu_up(x, m, layer.gate_up, z, h, tiling, None, choice, config, 1)
    else:
        fused.swiglu_down_backward(x, m, layer.down, z, nans(*z.shape), h, None, tiling, None, choice, config, 1)


@pytest.mark.parametrize("slots,steps", RINGS)
@pytest.mark.parametrize("kernel", ["down", "up", "down_backward"])
def test_all_orders_are_safe(machine, kernel, slots, steps):
    run_product(kernel, slots, steps)
    assert explore_all(machine) > 2 * sum(steps)


@pytest.mark.parametrize("slots,steps", [*RINGS, (3, [7, 1, 0, 2])])
def test_all_orders_of_weight_gradients_are_safe(machine, slots, steps):
    run_product("wgrad", slots, steps)
    assert explore_all(machine) > 2 * sum(steps)


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["down", "up", "down_backward", "wgrad"])
@pytest.mark.parametrize("steps", [[1] * 6, [3, 3, 3], [7, 7]])
def test_all_orders_are_safe_with_as_many_slots_as_on_gpus(machine, kernel, steps):
    run_product(kernel, CONFIGS[kernel].stages, steps)
    explore_all(machine)


BROKEN = {
    "consumers do not take turns": ("down", 3, [1] * 7, gemm, "wait_for_turn", lambda _: lambda *_: None),
    "a consumer keeps its turn": ("down", 3, [1] * 3, gemm, "pass_turn", lambda _: lambda *_: None),
    "no fence after gathered rows": ("up", 2, [3, 3], ring, "fence_async_shared", lambda _: lambda: None),
    "slots are released too early": ("wgrad", 2, [3], ring, "release_slot", lambda f: lambda r, i, c: f(r, i + 1, c)),
    "all tiles are stored from one buffer": ("up", 2, [1], fused, "_stage", lambda f: lambda *a: f(*a[:3], 0, *a[4:])),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_kernels_are_found(machine, monkeypatch, case):
    kernel, slots, steps, module, name, breaks = BROKEN[case]
    monkeypatch.setattr(module, name, breaks(getattr(module, name)))
    with pytest.raises(HazardError):
        run_product(kernel, slots, steps)
        explore_all(machine)


@pytest.mark.usefixtures("machine")
def test_a_ring_of_one_slot_deadlocks():
    """A slot is released when the product of the next one has started."""
    with pytest.raises(HazardError, match="deadlock"):
        run_product("wgrad", 1, [2])
