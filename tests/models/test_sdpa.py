"""The choice of attention kernels on GPUs, and what is recorded of it."""

from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend

from moe_dualpipe.models import sdpa
from moe_dualpipe.models.sdpa import ScaledDotProduct, preferred_kernels


def test_cudnn_comes_first_where_it_is_fastest():
    order = preferred_kernels((9, 0))
    assert order is not None and order[0] == SDPBackend.CUDNN_ATTENTION
    assert len(set(order)) == 4  # what cuDNN does not support runs, too
    assert not any(map(preferred_kernels, [(8, 0), (8, 9), (12, 0)]))


class OnHopper(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True


def test_on_hopper_the_order_applies_to_the_product_only(monkeypatch):
    log = []

    @contextmanager
    def kernel(order, set_priority):
        log.append((order, set_priority))
        yield
        log.append("end")

    monkeypatch.setattr(sdpa, "sdpa_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    layer, expected = ScaledDotProduct(), torch.nn.functional.scaled_dot_product_attention
    y = layer(q.as_subclass(OnHopper), k, k, is_causal=True, enable_gqa=True)
    assert log == [(sdpa.CUDNN_FIRST, True), "end"]
    assert torch.equal(torch.Tensor(y), expected(q, k, k, is_causal=True, enable_gqa=True))
    assert torch.equal(layer(q, k, k, is_causal=True, enable_gqa=True), y) and len(log) == 2


def test_what_ran_is_recorded():
    layer, q = ScaledDotProduct(), torch.randn(1, 2, 4, 8)
    assert layer.ran == set()
    layer(q, q, q, is_causal=True)
    assert layer.ran == {"flash_attention"}
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        layer(*[torch.randn(1, 2, 3, 4)] * 3)
    assert layer.ran == {"flash_attention", "math"}
