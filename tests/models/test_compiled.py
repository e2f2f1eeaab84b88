"""Models whose chains of small operators torch.compile fuses: same numbers, few graphs, no graph after the first step.

Most tests use the backend "aot_eager": it traces and divides graphs as for training, but generates no code.
"""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.kernels import fuse as fuse_module
from moe_dualpipe.kernels.experts import swiglu
from moe_dualpipe.kernels.fuse import fuse
from moe_dualpipe.models import RECOMPUTE, ModelConfig, StageOptions, build_model
from moe_dualpipe.models.context_parallel import LoopbackContext
from tests.support.pairs import CONFIG, assert_same, gradients, tokens

MLA = {"attention": "mla", "kv_rank": 6, "rope_dim": 4, "value_dim": 5}
MODELS = {
    "gqa": CONFIG,
    "norms of heads, gated shared expert": dataclasses.replace(CONFIG, qk_norm="head", shared_gate=True),
    "joint norm, groups": dataclasses.replace(CONFIG, qk_norm="full", expert_groups=4, top_groups=2),
    "mla": dataclasses.replace(CONFIG, q_rank=7, **MLA),
    "mla without a latent of queries": dataclasses.replace(CONFIG, **MLA),
    "mtp": dataclasses.replace(CONFIG, mtp_layers=1),
}


@pytest.fixture(scope="module", autouse=True)
def backend():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse_module, "BACKEND", "aot_eager")
        forget()
        yield
        forget()


def forget():
    """Drop all graphs. Tests that do not count graphs share them, because compiling takes long."""
    fuse_module._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()


def model(config: ModelConfig = CONFIG, compiled=True, recompute="none"):
    return build_model(config, options=StageOptions(compiled=compiled, recompute=recompute))


def one_of_two_ranks(config, compiled):
    """The model on the first of two ranks that share each sequence, whose rows are alike."""
    experts = Loopback(config.num_experts, 2)
    options = StageOptions(compiled=compiled, context=LoopbackContext(2, experts))
    return build_model(config, experts, options)


def step(stage, seed=1, length=5):
    """The loss and the gradients of a micro-batch."""
    stage.zero_grad()
    loss = stage.loss(stage(tokens(seed, 2, length)), tokens(seed + 1, 2, length))
    loss.backward()
    return [loss.detach(), *gradients(stage)]


def assert_near(ours, expected, relative):
    for one, other in zip(ours, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.linalg.vector_norm(one - other) <= relative * torch.linalg.vector_norm(other)


def graphs():
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.quick("gqa")
@pytest.mark.parametrize("name", MODELS)
def test_compiled_models_agree_with_eager_ones_and_nothing_is_compiled_after_the_first_step(name):
    forget()
    config = dataclasses.replace(MODELS[name], num_layers=2)
    assert_near(step(model(config)), step(model(config, compiled=False)), 1e-6)
    first = graphs()
    larger = model(dataclasses.replace(config, num_layers=3))  # layers share graphs
    for seed in range(2):
        step(larger, seed)
    assert graphs() == first > 5


@pytest.mark.quick("mla")
@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_compiled_models_agree_with_eager_ones_on_ranks_that_share_sequences(name):
    config = dataclasses.replace(MODELS[name], num_layers=2)
    compiled, plain = (step(one_of_two_ranks(config, compiled), length=6) for compiled in (True, False))
    assert_near(compiled, plain, 1e-6)


def test_a_varying_number_of_rows_shares_one_graph():
    forget()
    compiled = fuse(swiglu, True, rows_vary=True)
    for rows in (7, 2, 64, 3):
        x = torch.randn(rows, 10, requires_grad=True)
        compiled(x).sum().backward()
    assert graphs() == 1


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_generated_code_has_the_same_laws(name, monkeypatch):
    forget()
    monkeypatch.setattr(fuse_module, "BACKEND", "inductor")
    config = dataclasses.replace(MODELS[name], hidden_size=48, head_dim=8, expert_size=40)
    none = step(model(config), length=37)
    for recompute in RECOMPUTE[1:]:
        assert_same(step(model(config, recompute=recompute), length=37), none)
    assert_near(none, step(model(config, compiled=False), length=37), 1e-5)
    forget()
