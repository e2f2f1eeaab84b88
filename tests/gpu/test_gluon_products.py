"""Compares the Gluon kernels with plain torch in the same dtype and in fp64. Needs a Hopper GPU."""

import pytest
import torch

from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.gpu.configs import override_config
from moe_dualpipe.kernels.gpu.gluon import CONFIGS
from moe_dualpipe.kernels.grouped_gemm import grouped_linear, grouped_wgrad
from moe_dualpipe.kernels.routing import expert_order
from tests.support.kernels import DEVICE, assert_as_good_as, offsets_of

HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"), pytest.mark.usefixtures("guards", "engine"),
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def engine():
    with (
        override_config("up", CONFIGS["up"]), override_config("down", CONFIGS["down"]),
        override_config("down_backward", CONFIGS["down_backward"]),
        override_config("up_backward", CONFIGS["up_backward"]), override_config("wgrad", CONFIGS["wgrad"]),
    ):  # fmt: skip
        yield


def normal(*shape, dtype):
    return torch.randn(*shape, device=DEVICE).to(dtype)


# Rows per expert: none, fewer than a tile, one tile, several; widths: several tiles and steps, and tails of both.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[0, 5, 0, 300, 128, 0], [0, 1000, 0], [0, 0], [7] * 500])
@pytest.mark.parametrize("inputs,outputs", [(520, 392), (64, 128), (8, 1032)])
def test_grouped_linear_and_its_gradients(counts, inputs, outputs, dtype):
    offsets = offsets_of(counts)
    x, w = normal(sum(counts), inputs, dtype=dtype), normal(len(counts), outputs, inputs, dtype=dtype)
    dy = normal(sum(counts), outputs, dtype=dtype)
    results = []
    for wide, kernels in ((True, "reference"), (False, "reference"), (False, "triton"), (False, "triton")):
        a, b, d = (t.double() if wide else t.clone() for t in (x, w, dy))
        y = grouped_linear(a.requires_grad_(), b.requires_grad_(), offsets, kernels=kernels)
        y.backward(d)
        results.append([y, a.grad, b.grad])
    for exact, reference, ours, again in zip(*results, strict=True):
        assert_as_good_as(ours, reference, exact, dtype)
        assert torch.equal(ours, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rows,d,f,num_experts", [(3000, 1032, 392, 7), (257, 256, 128, 40), (1, 8, 8, 1)])
def test_experts_and_all_gradients(rows, d, f, num_experts, inside, dtype):
    ids = torch.randint(-1, num_experts, (rows, 3), device=DEVICE)
    order = expert_order(ids, num_experts, int((ids >= 0).sum()), kernels="reference")
    tensors = [
        normal(rows, d, dtype=dtype), (normal(num_experts, 2 * f, d, dtype=dtype) / d**0.5).to(dtype),
        (normal(num_experts, d, f, dtype=dtype) / f**0.5).to(dtype), torch.rand(rows, 3, device=DEVICE),
    ]  # fmt: skip
    dy, results = normal(rows, d, dtype=dtype), []
    for wide, kernels, num_sms in (
        (True, "reference", None), (False, "reference", None), (False, "triton", None), (False, "triton", 5),
    ):  # fmt: skip
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in tensors]
        x, gate_up, down, weights = leaves
        y = experts(x, gate_up, down, order, weights, weight_inside=inside, num_sms=num_sms, kernels=kernels)
        y.backward(dy.to(y.dtype))
        results.append([y, *(leaf.grad for leaf in leaves)])
    for exact, reference, ours, with_few_sms in zip(*results, strict=True):
        assert_as_good_as(ours, reference, exact, dtype)
        assert torch.equal(ours, with_few_sms)


def test_weight_gradients_do_not_read_rows_of_other_experts():
    counts = [70, 60, 3]
    x, dy = normal(133, 256, dtype=torch.bfloat16), normal(133, 136, dtype=torch.bfloat16)
    x[70:130] = dy[70:130] = torch.nan
    found = grouped_wgrad(dy, x, offsets_of(counts), torch.float32, kernels="triton")
    assert found[1].isnan().all()
    assert not found[[0, 2]].isnan().any()


def test_weight_gradients_are_added_in_fp32():
    x, dy = normal(200, 72, dtype=torch.bfloat16), normal(200, 136, dtype=torch.bfloat16)
    offsets, before = offsets_of([150, 0, 50]), torch.randn(3, 136, 72, device=DEVICE)
    alone = grouped_wgrad(dy, x, offsets, torch.float32, kernels="triton")
    added = grouped_wgrad(dy, x, offsets, add_to=before.clone(), kernels="triton")
    assert torch.equal(added, alone + before)
