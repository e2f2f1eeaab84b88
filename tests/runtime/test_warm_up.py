"""All kernels are loaded before the first transfer between stages, and nothing else changes."""

import dataclasses

import pytest
import torch

from moe_dualpipe.models import StageOptions, TransformerStage
from moe_dualpipe.pipeline.pipeline import Pipeline
from moe_dualpipe.runtime.p2p import P2P
from moe_dualpipe.runtime.shared_errors import gather_objects
from moe_dualpipe.schedule import build
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL

SMALL = dataclasses.replace(MODEL, mtp_layers=1, router_bias=True, router_score="sigmoid", sequence_loss=0.01)


def state(pipeline):
    modules = pipeline.stages.values()
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers(), *grads(module))]
    return [t.detach().clone() for t in tensors] + [torch.get_rng_state()]


def grads(module):
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def loaded_and_not(rank, schedule, ep):
    log, found = [], []
    recv = P2P.recv
    P2P.recv = lambda self, specs, source: (log.append("recv"), recv(self, specs, source))[1]
    for load in (True, False):
        size = torch.distributed.get_world_size() // ep
        pipeline = Pipeline(SMALL, build(schedule, size, 4), (1, 8), ep=ep, options=StageOptions(recompute="full"))
        before = state(pipeline)
        if load:
            pipeline._kernels_loaded = False
            for stage in pipeline.stages.values():
                stage.register_forward_pre_hook(lambda *_: log.append("stage"))
            pipeline.load_kernels()
            assert all(map(torch.equal, state(pipeline), before))
            pipeline._kernels_loaded = False  # as on a GPU, the first step loads the kernels
        torch.manual_seed(rank)
        batch = torch.randint(SMALL.vocab_size, (4, 9), generator=torch.Generator().manual_seed(rank % ep))
        losses = pipeline.step(batch[:, :-1], batch[:, 1:])
        found.append([*losses, *state(pipeline), pipeline.balance_experts(0.1)])
        everywhere = [x.item() for of_rank in gather_objects(losses) for x in of_rank]
        assert len(everywhere) == 4 * ep
        assert pipeline.mean_loss(losses) == pytest.approx(sum(everywhere) / len(everywhere), rel=1e-12)
        if load:
            loads = 2 * len(pipeline.stages)  # each stage runs whole and split
            assert log[: 2 * loads] == ["stage"] * 2 * loads
            assert ("recv" in log[2 * loads :]) == (size > 1)
    return len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


def test_kernels_are_loaded_before_the_first_receive_and_nothing_changes():
    assert run_ranks(2, loaded_and_not, "dualpipe", 1) == [True] * 2


def test_ranks_that_share_experts_load_together():
    assert run_ranks(2, loaded_and_not, "dualpipev", 2) == [True] * 2


def test_kernels_are_loaded_once_with_those_of_the_loss_even_if_gradients_exist_or_are_disabled(monkeypatch):
    pipeline = Pipeline(SMALL, build("dualpipev", 1, 2), (1, 8))
    batch = torch.randint(SMALL.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    pipeline.step(batch[:, :-1], batch[:, 1:])
    layers = pipeline.balance.layers.values()
    recorded = [layer.take_losses() for layer in layers]
    assert recorded != [(0.0, 0)] * len(layers)
    loss, load, calls, loads = TransformerStage.loss, pipeline.load_kernels, [], []
    monkeypatch.setattr(TransformerStage, "loss", lambda *arguments: calls.append("loss") or loss(*arguments))

    def load_and_check():
        before = state(pipeline)
        load()
        assert all(map(torch.equal, state(pipeline), before))
        assert [layer.take_losses() for layer in layers] == [(0.0, 0)] * len(layers)
        loads.append(len(calls))

    monkeypatch.setattr(pipeline, "load_kernels", load_and_check)
    pipeline._kernels_loaded = False  # as on a GPU
    with torch.no_grad():
        for _ in range(2):
            pipeline.step(batch[:, :-1], batch[:, 1:])
    assert loads == [2]  # whole and split
