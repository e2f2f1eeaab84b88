"""All kernels are loaded before the first transfer between stages, and nothing else changes."""

import dataclasses

import pytest
import torch

from moe_dualpipe.expert_parallel.gather import gather_objects
from moe_dualpipe.models import StageOptions, TransformerStage
from moe_dualpipe.pipeline import Numerics, Parallel, Pipeline
from moe_dualpipe.runtime.p2p import P2P
from moe_dualpipe.schedule import build
from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW

SMALL = dataclasses.replace(SHALLOW, mtp_layers=1, router_bias=True, router_score="sigmoid", sequence_loss=0.01)


def state(pipeline):
    modules = pipeline.stages.values()
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers(), *grads(module))]
    return [t.detach().clone() for t in tensors] + [torch.get_rng_state()]


def grads(module):
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def loaded_and_not(rank, schedule, ep):
    """The results of a step after the kernels were loaded, and of one without."""
    log, found, recv, loss = [], [], P2P.recv, TransformerStage.loss
    P2P.recv = lambda self, specs, source: (log.append("recv"), recv(self, specs, source))[1]
    TransformerStage.loss = lambda *arguments: (log.append("loss"), loss(*arguments))[1]  # type: ignore[assignment]
    batch = torch.randint(SMALL.vocab_size, (4, 9), generator=torch.Generator().manual_seed(rank % ep))
    size = torch.distributed.get_world_size() // ep
    for load in (True, False):
        numerics = Numerics(options=StageOptions(recompute="full"))
        pipeline = Pipeline(SMALL, build(schedule, size, 4), (1, 8), Parallel(ep), numerics)
        for stage in pipeline.stages.values():
            stage.register_forward_pre_hook(lambda *_: log.append("stage"))
        pipeline._kernels_loaded = True
        pipeline.step(batch[:, :-1], batch[:, 1:])  # gradients exist
        recorded = [layer.take_losses() for layer in pipeline.balance.layers.values()]
        assert any(decisions for _, decisions in recorded)
        before = state(pipeline)
        log.clear()
        if load:
            pipeline._kernels_loaded = False  # as on a GPU
            with torch.no_grad():
                pipeline.load_kernels()
            assert all(map(torch.equal, state(pipeline), before))
            assert all(layer.take_losses() == (0.0, 0) for layer in pipeline.balance.layers.values())
            # Each stage runs whole and split.
            assert log.count("stage") == 2 * len(pipeline.stages) and "recv" not in log and log.count("loss") == 2
            pipeline._kernels_loaded = False  # the first step loads the kernels
        torch.manual_seed(rank)
        losses = pipeline.step(batch[:, :-1], batch[:, 1:])
        assert ("recv" in log) == (size > 1) and pipeline._kernels_loaded
        found.append([*losses, *state(pipeline), pipeline.balance_experts(0.1)])
        everywhere = [x.item() for of_rank in gather_objects(losses) for x in of_rank]
        assert pipeline.mean_loss(losses) == pytest.approx(sum(everywhere) / (4 * ep), rel=1e-12)
    return len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


@pytest.mark.parametrize("schedule,ep", [("dualpipe", 1), ("dualpipev", 2)])
@pytest.mark.quick("dualpipev-2")
def test_kernels_are_loaded_before_the_first_receive_and_nothing_changes(schedule, ep):
    assert run_ranks(2, loaded_and_not, schedule, ep) == [True] * 2
