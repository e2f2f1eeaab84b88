"""Dispatch in 8 bits: what arrives is what was rounded, bit for bit, and it takes half of the bytes."""

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, Fp8Dispatch, Local, Loopback, Shared
from moe_dualpipe.expert_parallel.fp8_dispatch import pack, unpack
from moe_dualpipe.kernels.fp8 import RECIPES
from moe_dualpipe.models import ModelConfig, MoE, StageOptions
from tests.support.expert_ids import random_ids
from tests.support.ranks import run_ranks

CONFIG = ModelConfig(hidden_size=160, expert_size=24, num_experts=8, experts_per_token=2, init_std=0.3, head_dim=4)
RECIPE = RECIPES["ue8m0"]


@pytest.mark.parametrize("name", ["ue8m0", "mxfp8"])
@pytest.mark.parametrize("width", [5, 128, 300])
def test_a_message_holds_the_rows_bit_for_bit(name, width):
    x = torch.randn(7, width) * torch.exp2(torch.arange(-60, 60, 120 / 7))[:, None]
    x[2, 1], x[3] = torch.nan, 0.0
    rows = RECIPES[name].quantize_rows(x)
    message = pack(rows)
    assert message.shape[1] * message.element_size() % 16 == 0
    found = unpack(message, width, rows.columns)
    assert torch.equal(found.stored.view(torch.uint8), rows.stored.view(torch.uint8))
    assert torch.equal(found.read(), rows.read()) or found.read()[2].isnan().any()
    assert torch.equal(found.read()[3:], rows.read()[3:])


def arrivals(rank):
    """Rows and weights that arrive through each backend are those of the backend, rounded."""
    own = torch.Generator().manual_seed(rank)
    ids = random_ids(own, (9, 1)[rank], 2, "some without experts", 8)
    x, weights = torch.randn(len(ids), 160, generator=own).bfloat16(), torch.rand(ids.shape, generator=own)
    for backend in (Local(8), Loopback(8, 4), AllToAll(8, group.WORLD), Shared(8, group.WORLD)):
        rounding = Fp8Dispatch(backend, RECIPE)
        plain, ours = backend.prepare(ids), rounding.prepare(ids)
        for sent in (weights, None):
            expected, found = (ep.dispatch(x, r, sent).wait() for ep, r in ((backend, plain), (rounding, ours)))
            assert torch.equal(found.x_ND, RECIPE.quantize_rows(expected.x_ND).read(torch.bfloat16))
            assert found.x_ND.dtype == torch.bfloat16 and (sent is None or torch.equal(found[1], expected[1]))
        assert torch.equal(plain.order.positions_NK, ours.order.positions_NK)


def spread(rank):
    """Experts over ranks, and all of them on this rank: outputs and the gradients of tokens and router."""
    x_TD = torch.randn(2, 7, 160, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    results = []
    for ep in (Local(8), AllToAll(8, group.WORLD)):
        torch.manual_seed(5)  # draws the router
        layer = MoE(CONFIG, Fp8Dispatch(ep, RECIPE), 0, StageOptions(seed=1, fp8=RECIPE)).double()
        x = x_TD.clone().requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        results.append([y, x.grad, layer.router.logits.weight.grad])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("check", [arrivals, spread])
def test_rows_are_rounded_once_wherever_their_experts_are(check):
    run_ranks(2, check)


def test_a_row_takes_half_of_its_bytes():
    ids, x = torch.arange(8)[:, None], torch.randn(8, 1024).bfloat16()
    sent = []
    for wrap in (lambda ep: ep, lambda ep: Fp8Dispatch(ep, RECIPE)):
        backend = Loopback(8, 8)
        ep = wrap(backend)
        ep.dispatch(x, ep.prepare(ids)).wait()
        sent.append(backend.bytes_sent)
    # 7 rows leave, with an id each, in multiples of 128 bytes: 2,048 for the row, and 1,024 with 8 scales.
    assert sent == [7 * (2048 + 128), 7 * (1024 + 128)]


def test_scales_that_are_no_powers_of_two_are_refused():
    with pytest.raises(ValueError, match="powers of two: use the recipe ue8m0 or mxfp8"):
        Fp8Dispatch(Local(8), RECIPES["fp32"])
