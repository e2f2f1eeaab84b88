"""Router logits in fp32 in a bf16 model: choices, gradients, saved bytes, deferral, older checkpoints."""

import pytest
import torch

from moe_dualpipe.models import ModelConfig, split
from moe_dualpipe.models.router import Router
from moe_dualpipe.tools.planner.activations import MicroBatch, deferred_bytes, saved_bytes

T, D, E, K = 4096, 256, 64, 6


def make_router(dtype, **choices):
    torch.manual_seed(1)
    config = ModelConfig(hidden_size=D, num_experts=E, experts_per_token=K, router_dtype=dtype, **choices)
    return Router(config).bfloat16()


def make_tokens():
    return torch.randn(T, D, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.mark.parametrize("choices", [{}, {"router_score": "sigmoid", "expert_groups": 8, "top_groups": 4}], ids=str)
def test_fp32_logits_choose_the_experts_that_exact_logits_choose(choices):
    x_TD, other = make_tokens(), {}
    for dtype in ("model", "float32"):
        router = make_router(dtype, **choices)
        exact_TE = x_TD.double() @ router.logits.weight.double().T
        _, expected_TK = router.choose(exact_TE, None)
        _, ids_TK = router(x_TD)
        other[dtype] = (ids_TK.sort().values != expected_TK.sort().values).any(-1).double().mean().item()
    assert other["float32"] == 0
    assert 0.01 < other["model"] < 0.1


def saved_by(router, x):
    sizes = {}

    def note(t):
        sizes[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        router(x)
    return sum(sizes.values())


def test_no_fp32_copy_of_the_input_is_saved_and_the_planner_counts_the_logits():
    x = make_tokens().requires_grad_()
    more = saved_by(make_router("float32"), x) - saved_by(make_router("model"), x)
    assert more <= T * E * 2
    batch, configs = MicroBatch(1, T), [make_router(dtype).config for dtype in ("model", "float32")]
    for count in (saved_bytes, deferred_bytes):
        plain, fp32 = (count(config, split(config, 1)[0], batch) for config in configs)
        assert fp32 - plain == 3 * T * E * 2  # three layers with experts
    deep = [deferred_bytes(c, split(c, 1)[0], MicroBatch(1, T, element=4)) for c in configs]
    assert deep[0] == deep[1]
