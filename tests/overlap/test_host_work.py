"""What the host queues for an overlapped pair on a simulated GPU: which operators, on which streams, in which order."""

import pytest
import torch

from moe_dualpipe.overlap.labels import SIZES_WAIT
from tests.machines.simulated_gpu import SimulatedGpu
from tests.support.pairs import OVERLAPPED, stage
from tests.support.simulated_ranks import replace_devices
from tests.support.simulated_runs import all_to_all


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    replace_devices(monkeypatch)


def run_pair(backend):
    """Run a pair of chunks of one MoE layer. Returns the operators and the annotations of the pair."""
    with SimulatedGpu() as gpu:
        model = stage(1, 0, backend, embedding=False, head=False, num_shared_experts=0)
        x0, x1 = torch.randn(2, 1, 7, 16, requires_grad=True)
        outputs = model(x1)
        operators, labels = len(gpu.log), len(gpu.labels)
        OVERLAPPED(model, [x0], None, None, model, None, [outputs], [torch.ones_like(outputs)])
        return gpu.log[operators:], gpu.labels[labels:]


def test_after_the_sizes_have_arrived_only_the_message_is_packed():
    operators, labels = run_pair(all_to_all())
    assert labels.index("prepare dispatch(F)") < labels.index("mlp(B)") < labels.index(SIZES_WAIT)
    assert [access.operator for access in operators if access.label == "dispatch(F)" and not access.is_view] == [
        "empty", *("index_select", "copy_") * 2, "copy_", "new_empty", "all_to_all"
    ]  # fmt: skip


def test_each_lane_packs_on_a_stream_of_its_own():
    operators, _ = run_pair(all_to_all())
    streams = {
        label: {access.stream.name for access in operators if access.label == label} - {"nccl"}
        for label in ("prepare dispatch(F)", "dispatch(F)", "combine(F)", "dispatch(B)", "combine(B)")
    }
    forward, backward = streams["dispatch(F)"], streams["dispatch(B)"]
    assert len(forward) == len(backward) == 1 and forward != backward and "compute" not in forward | backward
    assert streams["prepare dispatch(F)"] == streams["combine(F)"] == forward
    assert streams["combine(B)"] == backward


def test_a_transfer_waits_for_its_own_input_and_not_for_the_computation_that_is_queued_before_it():
    operators, _ = run_pair(all_to_all())
    for transfer, hides in (("dispatch(F)", "mlp(B)"), ("combine(F)", "attn(B)")):
        *_, computed = (access for access in operators if access.label == hides)
        started = next(access for access in operators if access.label == transfer and not access.is_view)
        assert started.stream is not computed.stream and not computed.is_before(started.clock), transfer


def test_packing_does_not_wait_for_the_other_lanes_transfer():
    operators, _ = run_pair(all_to_all())
    transfer = next(access for access in operators if access.label == "dispatch(F)" and access.stream.name == "nccl")
    later = operators[operators.index(transfer) :]
    packed = [access for access in later if access.label == "dispatch(B)" and access.stream.name != "nccl"]
    assert not transfer.is_before(packed[0].clock)
