"""On a simulated GPU, training uses no memory too early, and transfers do not wait for what they do not need."""

from functools import partial

import pytest
import torch

from moe_dualpipe.overlap import Collective, Comm, PrepareComm
from moe_dualpipe.overlap.engine import _SideStream
from moe_dualpipe.schedule import NAMES
from tests.machines.simulated_gpu import SimulatedGpu
from tests.support.pairs import OVERLAPPED, assert_same, stage
from tests.support.properties import given, settings, st
from tests.support.segments import doubled
from tests.support.simulated_ranks import replace_devices
from tests.support.simulated_runs import all_to_all, loopback, pipeline, run_actions, single_process


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    replace_devices(monkeypatch)


def run_pair():
    """Run a pair of chunks of one MoE layer. Returns its operators."""
    with SimulatedGpu() as gpu:
        model = stage(1, 0, all_to_all(), embedding=False, head=False, num_shared_experts=0)
        x0, x1 = torch.randn(2, 1, 7, 16, requires_grad=True)
        outputs = model(x1)
        operators = len(gpu.log)
        OVERLAPPED(model, [x0], None, None, model, None, [outputs], [torch.ones_like(outputs)])
        return gpu.log[operators:]


def test_each_lane_packs_on_a_stream_of_its_own():
    operators = run_pair()
    streams = {
        label: {access.stream.name for access in operators if access.label == label} - {"nccl"}
        for label in ("prepare dispatch(F)", "dispatch(F)", "combine(F)", "dispatch(B)", "combine(B)")
    }
    forward, backward = streams["dispatch(F)"], streams["dispatch(B)"]
    assert len(forward) == len(backward) == 1 and forward != backward and "compute" not in forward | backward
    assert streams["prepare dispatch(F)"] == streams["combine(F)"] == forward
    assert streams["combine(B)"] == backward


def test_a_transfer_waits_for_its_own_input_and_not_for_the_computation_that_is_queued_before_it():
    operators = run_pair()
    for transfer, hides in (("dispatch(F)", "mlp(B)"), ("combine(F)", "attn(B)")):
        *_, computed = (access for access in operators if access.label == hides)
        started = next(access for access in operators if access.label == transfer and not access.is_view)
        assert started.stream is not computed.stream and not computed.is_before(started.clock), transfer


def check_actions(actions, length=5, recompute="none", layers=2, dense=0, shared=1):
    """Actions on a simulated GPU give the losses and gradients of a CPU."""
    models = [
        stage(layers, dense, ep(), recompute=recompute, num_shared_experts=shared) for ep in (all_to_all, loopback)
    ]
    with SimulatedGpu():
        simulated = run_actions(models[0], actions, length)
    assert_same(simulated, run_actions(models[1], actions, length))


@pytest.mark.parametrize("actions", ["forward pair pair backward", "forward forward backward forward backward split"])
def test_training_uses_no_memory_too_early(actions):
    check_actions(actions.split())


def test_a_side_stream_holds_what_it_must_and_no_longer():
    """The other side holds the functions of an interleaved transfer: alone, it would never let them go."""
    with SimulatedGpu() as gpu:
        one, other = _SideStream.pair(gpu.device, gpu)
        for side, peer in ((one, other), (other, one)):
            comm = Comm("move", Collective(partial(doubled, torch.ones(3)), doubled))
            side.prepare(PrepareComm("move", abs), lambda: None)
            for num_prepared, interleaved in ((1, False), (0, True)):
                transfer = side.start(comm, side.mark(), interleaved)
                peer.held.clear()
                transfer.wait()
                assert peer.held == [(comm.collective,)] * interleaved
                assert len(transfer.prepared) == num_prepared
            del transfer
            side.run(int, side.mark())
            assert not side.held  # nothing refers to what has arrived


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 3), dense=st.integers(0, 1), shared=st.integers(0, 1), length=st.integers(1, 9),
    recompute=st.sampled_from(["none", "norms", "attention", "full"]),
    actions=st.lists(st.sampled_from(["pair", "forwards", "forward", "backward", "split"]), min_size=3, max_size=9),
)  # fmt: skip
def test_training_of_any_model(**model_and_actions):
    with pytest.MonkeyPatch.context() as patch:
        replace_devices(patch)
        check_actions(**model_and_actions)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("dualpipe-True")
def test_a_pipeline_uses_no_memory_too_early(name, train):
    losses, grads = pipeline(name, train=train)
    expected_losses, expected_grads = single_process(len(grads))
    assert losses == expected_losses
    if train:
        torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-6)
