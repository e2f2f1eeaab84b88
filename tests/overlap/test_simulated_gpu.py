"""Training on a simulated GPU uses no memory too early, and what the simulation calls too early."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.overlap import Comm, Compute, PrepareComm
from moe_dualpipe.overlap.engine import _SideStream
from moe_dualpipe.schedule import NAMES
from tests.machines.simulated_gpu import SimulatedGpu
from tests.support.pairs import assert_same, stage
from tests.support.segments import doubled, module_of
from tests.support.simulated_ranks import replace_devices
from tests.support.simulated_runs import (
    all_to_all,
    loopback,
    pipeline,
    run_actions,
    single_process,
    train,
    train_simulated,
)


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    replace_devices(monkeypatch)


@pytest.mark.parametrize("overlapped", [True, False])
def test_training_uses_no_memory_too_early(overlapped):
    assert_same(train_simulated(overlapped), train(stage(2, 0, loopback()), overlapped))


def test_a_pipeline_uses_no_memory_too_early():
    losses, grads = pipeline()
    expected_losses, expected_grads = single_process()
    assert losses == expected_losses
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-6)


def test_a_side_stream_holds_what_it_must_and_no_longer():
    """The other side holds the functions of an interleaved transfer: alone, it would never let them go."""
    with SimulatedGpu() as gpu:
        one, other = _SideStream.pair(gpu.device, gpu)
        for side, peer in ((one, other), (other, one)):
            comm = Comm("move", partial(doubled, torch.ones(3)), doubled)
            side.prepare(PrepareComm("move", abs), lambda: None)
            for num_prepared, interleaved in ((1, False), (0, True)):
                transfer = side.start(comm, side.mark(), interleaved)
                peer.held.clear()
                transfer.wait()
                assert peer.held == [(comm.back,)] * interleaved
                assert len(transfer.prepared) == num_prepared
            del transfer
            side.run(int, side.mark())
            assert not side.held  # nothing refers to what has arrived


def prepares_a_transfer(_self, x):
    y, ids = yield Compute("attn", lambda x: (x * 2, (x > 0).long()), x)
    yield PrepareComm("move", lambda ids: ids * 3, ids)
    del ids
    moved = yield Comm("move", doubled, doubled, y)
    z = yield Compute("mlp", lambda y: y + 1, y)  # may reuse the memory of ids
    return (yield Compute("add", torch.add, moved, z))


def test_the_inputs_of_a_preparation_are_held():
    with SimulatedGpu():
        module_of(prepares_a_transfer)(torch.randn(3, requires_grad=True))


# ---- what is too early ----


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 3), dense=st.integers(0, 1), shared=st.integers(0, 1), length=st.integers(1, 9),
    recompute=st.sampled_from(["none", "norms", "attention", "full"]),
    actions=st.lists(st.sampled_from(["pair", "forwards", "forward", "backward", "split"]), min_size=3, max_size=9),
)  # fmt: skip
def test_training_of_any_model(layers, dense, shared, length, recompute, actions):
    def model(ep):
        return stage(layers, dense, ep, recompute=recompute, num_shared_experts=shared)

    with pytest.MonkeyPatch.context() as patch:
        replace_devices(patch)
        with SimulatedGpu():
            simulated = run_actions(model(all_to_all()), actions, length)
        assert_same(simulated, run_actions(model(loopback()), actions, length))


@pytest.mark.long
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_pipelines_of_any_schedule(name, train, monkeypatch):
    replace_devices(monkeypatch)
    losses, grads = pipeline(name, train=train)
    expected_losses, expected_grads = single_process(len(grads))
    assert losses == expected_losses
    if train:
        torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-6)
