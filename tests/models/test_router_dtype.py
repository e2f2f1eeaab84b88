"""Router logits in fp32 in a bf16 model: choices, gradients, saved bytes, deferral, older checkpoints."""

import dataclasses

import pytest
import torch

from moe_dualpipe.checkpoint.load import model_differences
from moe_dualpipe.models import PRESETS, ModelConfig, split
from moe_dualpipe.models.router import Router
from moe_dualpipe.tools.planner.activations import MicroBatch, deferred_bytes, saved_bytes
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, losses, settings, train_each

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


def test_checkpoints_without_the_option_load():
    """The DeepSeek presets of earlier versions had logits in the dtype of the model."""
    config = PRESETS["deepseek-v2-lite"]
    older = dataclasses.asdict(config)
    del older["router_dtype"]
    assert model_differences(older, config) == []
    assert ModelConfig(**older).router_dtype == "model"
    for other in ("model", "float32"):
        assert model_differences({**older, "router_dtype": other}, config) == []


def test_bf16_runs_with_overlap_and_deferral_are_bit_equal_to_sequential_ones(tmp_path):
    model = dataclasses.replace(MODEL, router_dtype="float32", sequence_loss=0.1)
    common = {"model": model, "dtype": "bfloat16", "steps": 2, "seq_len": 16, "eval_sequences": 1}
    changes = {"overlapped": {}, "sequential": {"overlap": False, "recompute": "attention"}}
    configs = [settings(tmp_path / name, **common, **change) for name, change in changes.items()]
    overlapped, sequential = (losses(run) | losses(run, "grad_norm") for run in run_ranks(2, train_each, configs)[0])
    assert len(overlapped) == 2
    assert overlapped == sequential
