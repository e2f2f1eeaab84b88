"""Training on a simulated GPU uses no memory too early, and what the simulation calls too early."""

from functools import partial

import pytest
import torch

from moe_dualpipe.overlap import Comm, Compute, PrepareComm
from moe_dualpipe.overlap.engine import _SideStream
from tests.machines.simulated_gpu import RaceError, SimulatedGpu
from tests.support.pairs import assert_same, stage
from tests.support.segments import doubled, module_of
from tests.support.simulated_ranks import replace_devices
from tests.support.simulated_runs import (
    all_to_all,
    loopback,
    needs_triton,
    pipeline,
    single_process,
    train,
    train_simulated,
)


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    replace_devices(monkeypatch)


@pytest.mark.parametrize("backend,overlapped", [
    (all_to_all, True), pytest.param(loopback, True, marks=needs_triton), (all_to_all, False)
])  # fmt: skip
def test_training_uses_no_memory_too_early(backend, overlapped):
    assert_same(train_simulated(backend, overlapped), train(stage(2, 0, loopback()), overlapped))


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


@pytest.fixture
def gpu():
    with SimulatedGpu() as gpu:
        yield gpu


@pytest.fixture
def side(gpu):
    return gpu.Stream()


def test_a_stream_reads_or_changes_what_another_one_uses(gpu, side):
    x = torch.ones(3)
    early = gpu.current_stream().record_event()
    x.add_(1)
    side.wait_event(early)
    message = (
        "mul in no segment on side 1 reads what add_ in no segment on compute writes, but no event makes side 1 wait"
    )
    with gpu.stream(side), pytest.raises(RaceError, match=message):
        x[1:].mul(2)
    side.wait_event(gpu.current_stream().record_event())
    with gpu.stream(side):
        x[1:].mul(2)
        done = side.record_event()
    x.sum()  # two streams may read
    with pytest.raises(RaceError, match=r"add_ .* on compute changes what is used by mul .* on side 1"):
        x.view(-1).add_(1)
    gpu.current_stream().wait_event(done)
    x.add_(1)


def test_memory_is_reused_while_another_stream_uses_it(gpu, side):
    x = torch.ones(3)
    side.wait_event(gpu.current_stream().record_event())
    with gpu.stream(side):
        x.mul(2)
        done = side.record_event()
    del x
    z = torch.empty(5)
    with pytest.raises(RaceError, match=r"fill_ .* reuses memory of compute .* is used by mul .* on side"):
        z.fill_(0)
    gpu.current_stream().wait_event(done)
    z.fill_(0)


def test_the_host_reads_before_the_copy_has_ended(gpu):
    host = torch.empty(2, pin_memory=True)
    host.copy_(torch.ones(2), non_blocking=True)
    copied = gpu.current_stream().record_event()
    with pytest.raises(RaceError, match="the host reads what copy_ in no segment on compute writes"):
        host.tolist()
    copied.synchronize()
    assert host.tolist() == [1, 1]
