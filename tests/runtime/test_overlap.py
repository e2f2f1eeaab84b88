"""Overlapped pairs in real pipelines: bit-equal results, one order on all ranks, memory, sends, and failures."""

import os
import re
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from moe_dualpipe.expert_parallel import Link, Loopback
from moe_dualpipe.overlap import Engine
from moe_dualpipe.overlap.tape import Tape
from moe_dualpipe.runtime.p2p import P2P
from moe_dualpipe.schedule import Costs, Overlap, simulate
from tests.support import pipelines
from tests.support.delayed import Delayed
from tests.support.engines import run_on
from tests.support.pipelines import make_pipeline, run_step
from tests.support.ranks import run_failing_ranks, run_ranks


def small_pipeline(*arguments):
    pipelines.CONFIG, pipelines.MICRO_BATCHES = replace(pipelines.CONFIG, num_layers=6), 6
    return make_pipeline(*arguments)


def set_expert_parallel(executor, backend):
    for stage in executor.modules.values():
        for module in stage.modules():
            if hasattr(module, "expert_parallel"):
                module.expert_parallel = backend


def step_is_sequential(rank, name, pp, ep, slow, fused_loss):
    """A pair sends its gradient before its last weight gradients."""
    outcomes, send = [], P2P.send

    def watched(self, tensors, to):
        log.append("send")
        return send(self, tensors, to)

    P2P.send = watched
    for overlap in (False, True):
        schedule, layout, executor, experts, _ = small_pipeline(rank, name, pp, ep, ep, fused_loss)
        executor.overlap = overlap
        if slow:
            set_expert_parallel(executor, Delayed(experts, Link(latency_us=300)))
        log: list[str] = []
        with run_on(Engine(torch.device("cpu"), log=log)):
            result = run_step(schedule, layout, executor)
        pairs = [action for action in schedule.actions[layout.pp_rank] if isinstance(action, Overlap)]
        assert any(label.endswith("(W)") for label in log) == (overlap and len(pairs) > 0)
        ending = sum(pair.backward.stage == schedule.num_stages - 1 for pair in pairs) * overlap
        assert [log.count("head(W)"), log.count("loss(W)")] == [ending * (not fused_loss), ending * fused_loss]
        backwards = [pair.backward for pair in pairs if pair.backward.stage > 0]
        gradients = sum(schedule.rank_of(b.stage - 1, b.micro_batch) != layout.pp_rank for b in backwards)
        early = [label for label, following in pairwise(log) if (label, following) == ("send", "attn(W)")]
        assert len(early) == gradients * overlap and (gradients > 0 or name != "dualpipe")
        grads = {n: p.grad for stage in executor.modules.values() for n, p in stage.named_parameters()}
        outcomes.append(result.losses | grads)
    assert outcomes[0].keys() == outcomes[1].keys()
    for key, tensor in outcomes[0].items():
        assert torch.equal(tensor, outcomes[1][key]), key


@pytest.mark.parametrize("name,pp,ep,slow,fused_loss", [
    ("dualpipev", 1, 1, False, False), ("dualpipe", 2, 1, False, False), ("dualpipev", 2, 2, False, False),
    ("dualpipe", 2, 2, True, True),
])  # fmt: skip
@pytest.mark.quick("dualpipev-1-1-False-False", "dualpipe-2-2-True-True")
def test_overlap_changes_no_bit_of_a_step(name, pp, ep, slow, fused_loss):
    run_ranks(pp * ep, step_is_sequential, name, pp, ep, slow, fused_loss)


# ---- Memory ----


def counts_live_tapes(rank, name, pp):
    schedule, layout, executor, _, _ = small_pipeline(rank, name, pp)
    # Loopback transfers take time, so pairs are interleaved.
    set_expert_parallel(executor, Loopback(pipelines.CONFIG.num_experts, 1))
    alive: Any = weakref.WeakSet()
    peaks, original = [], Tape.__init__

    def watched(self, inputs):
        original(self, inputs)
        alive.add(self)
        peaks.append(len(alive))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "__init__", watched)
        run_step(schedule, layout, executor)
    assert len(alive) == 0
    assert max(peaks) == simulate(schedule, Costs()).peak_activations[rank]
    assert name != "dualpipe" or max(peaks) == pp + 1  # as in DeepSeek's table of schedules


@pytest.mark.parametrize("name,pp", [("dualpipe", 2), ("dualpipev", 2), ("1f1b", 2)])
@pytest.mark.quick("dualpipe-2")
def test_the_number_of_live_chunks_is_that_of_the_schedule(name, pp):
    run_ranks(pp, counts_live_tapes, name, pp)


# ---- Failures ----


def fails(rank, name, pp, ep, how, where):
    """Rank 1 fails in the experts of layer 5, in its second forward or backward."""
    schedule, layout, executor, _, _ = small_pipeline(rank, name, pp, ep, ep)
    calls: list[int] = []

    def hook(*_):
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            if how == "dies":
                os._exit(1)
            raise ArithmeticError("boom")

    for stage in executor.modules.values():
        if "5" in stage.layers:  # type: ignore[operator]
            experts: Any = stage.get_submodule("layers.5.mlp.experts")
            (experts.register_forward_pre_hook if where == "F" else experts.register_full_backward_pre_hook)(hook)
    run_step(schedule, layout, executor)


@pytest.mark.parametrize("name,pp,ep,how,where", [
    ("dualpipev", 1, 2, "raises", "F"), ("dualpipev", 1, 2, "raises", "B"), ("dualpipev", 1, 2, "dies", "B"),
    ("dualpipe", 2, 1, "raises", "F"), ("dualpipe", 2, 1, "raises", "B"), ("dualpipe", 2, 1, "dies", "F"),
])  # fmt: skip
@pytest.mark.quick("dualpipev-1-2-dies-B", "dualpipe-2-1-raises-F")
def test_a_failed_rank_ends_the_step_on_all_ranks(name, pp, ep, how, where):
    survivor, failed = run_failing_ranks(2, fails, name, pp, ep, how, where)
    if how == "raises":
        assert "ArithmeticError: boom" in failed
        assert f"in layer 5, mlp {'forward' if where == 'F' else 'backward'}" in failed
        assert f"while rank 1 (pipeline rank {1 if pp > 1 else 0}) ran" in failed
    else:
        assert failed == ""
    # The other rank waits for what the failed one would have sent, and says where.
    assert "Connection closed by peer" in survivor or "Connection reset by peer" in survivor
    assert re.search(r"while rank 0 \(pipeline rank 0\) ran .* \(stage \d, micro-batch \d.*\) of dualpipe", survivor)
    if ep > 1:
        assert re.search(r"in layer \d, (wait for )?(dispatch|combine) (forward|backward)", survivor)
