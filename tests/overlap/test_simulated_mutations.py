"""Each wrong order of streams, events and memory is found on the simulated GPU."""

from contextlib import nullcontext

import pytest
import torch

from moe_dualpipe.expert_parallel import AllToAll
from moe_dualpipe.models.moe import MoE
from moe_dualpipe.overlap import Comm, Compute, PrepareComm, segmented
from moe_dualpipe.overlap.engine import _SideStream, _SideStreamTransfer
from moe_dualpipe.runtime import P2P
from moe_dualpipe.runtime.p2p import Transfer
from tests.support.segments import doubled, module_of
from tests.support.simulated_gpu import Event, RaceError, SimulatedGpu, current_gpu
from tests.support.simulated_ranks import Work, replace_devices
from tests.support.simulated_runs import pipeline, single_process, train_simulated


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    replace_devices(monkeypatch)


def after(patch, owner, name, change):
    """After each call of a method, call `change(result, self, *arguments)`, which returns another result or None."""
    original = getattr(owner, name)

    def method(self, *arguments):
        result = original(self, *arguments)
        changed = change(result, self, *arguments)
        return result if changed is None else changed

    patch.setattr(owner, name, method)


# ---- the engine ----


def compute_does_not_wait_for_a_transfer(patch):
    patch.setattr(_SideStreamTransfer, "wait", lambda self: self.value)


def a_transfer_does_not_wait_for_its_input(patch):
    patch.setattr(_SideStream, "mark", lambda self: (self.stream.record_event(), []))


def a_mark_is_taken_one_segment_early(patch):
    before = {}

    def change(mark, self):
        old, before[self] = before.get(self, mark[0]), mark[0]
        return old, mark[1]

    after(patch, _SideStream, "mark", change)


def results_are_not_held(patch):
    after(patch, _SideStream, "start", lambda _, self, *_arguments: self.held.clear())


def results_are_let_go_one_step_early(patch):
    original = _SideStream.run
    patch.setattr(_SideStream, "run", lambda self, fn, mark: original(self, fn, (mark[0], self.mark()[1])))


def inputs_are_not_held(patch):
    after(patch, _SideStream, "start", lambda _, _self, comm, *_arguments: setattr(comm, "fn", None))


def functions_are_not_held_for_the_other_lane(patch):
    def change(_, self):
        self.side.peer.held = [held for held in self.side.peer.held if not isinstance(held, tuple)]

    after(patch, _SideStreamTransfer, "wait", change)


def both_lanes_share_an_event(patch):
    shared = {}

    def change(result, self, *_arguments):
        return result[0], self.stream.record_event(shared.setdefault(current_gpu(), result[1]))

    after(patch, _SideStream, "run", change)


# ---- the exchange ----


def the_host_does_not_wait_for_the_counts(patch):
    patch.setattr(Event, "synchronize", lambda _: None)


def received_counts_are_not_waited_for(patch):
    original = AllToAll.all_to_all_counts

    def all_to_all_counts(self, counts):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Work, "wait", lambda _: None)
            return original(self, counts)

    patch.setattr(AllToAll, "all_to_all_counts", all_to_all_counts)


def received_rows_are_not_waited_for(patch):
    after(patch, AllToAll, "all_to_all", lambda pending, *_arguments: setattr(pending, "_works", ()))


def a_side_stream_reads_weights_while_the_optimizer_writes_them(patch):
    weights = []
    after(patch, MoE, "__init__", lambda _, self, *_arguments: weights.extend(self.experts.parameters()))

    def change(_, self, *_arguments):
        self.run(weights[0].sum, self.mark())

    after(patch, _SideStream, "start", change)


@pytest.mark.parametrize("mutation,message", [
    (compute_does_not_wait_for_a_transfer, r"\(F\) on compute reads what all_to_all in dispatch\(F\) on nccl writes"),
    (a_transfer_does_not_wait_for_its_input, r"in prepare dispatch\(F\) on side \d reads what .* on compute writes"),
    (a_mark_is_taken_one_segment_early, r"in combine\(F\) on .* reads what .* in mlp\(F\) on compute writes"),
    (results_are_not_held, "reuses memory of side .* is used by .* on compute, but no event makes .* wait for compute"),
    (results_are_let_go_one_step_early, "reuses memory of side .* is used by .* on compute"),
    (inputs_are_not_held, "on compute reuses memory of compute .* is used by .* on side"),
    (functions_are_not_held_for_the_other_lane, "reuses memory of side 1 .* is used by .* on side 2"),
    (both_lanes_share_an_event, "on compute reads what .* writes, but no event makes compute wait for"),
    (the_host_does_not_wait_for_the_counts, r"the host reads what copy_ in prepare dispatch\(F\)"),
    (received_counts_are_not_waited_for, r"stack in prepare dispatch\(F\) on .* reads what all_to_all"),
    (received_rows_are_not_waited_for, "on compute reads what all_to_all .* on nccl writes"),
    (a_side_stream_reads_weights_while_the_optimizer_writes_them, "add_ .* changes .* used by sum .* on side"),
])  # fmt: skip
def test_of_a_pair(mutation, message, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises(RaceError, match=message):
        train_simulated()


def prepares_a_transfer(_self, x):
    y, ids = yield Compute("attn", lambda x: (x * 2, (x > 0).long()), x)
    yield PrepareComm("move", lambda ids: ids * 3, ids)
    del ids
    moved = yield Comm("move", doubled, doubled, y)
    z = yield Compute("mlp", lambda y: y + 1, y)  # may reuse the memory of ids
    return (yield Compute("add", torch.add, moved, z))


@pytest.mark.parametrize("held", [True, False])
def test_the_inputs_of_a_preparation_are_held(held, monkeypatch):
    if not held:
        after(monkeypatch, _SideStream, "prepare", lambda _, self, *_arguments: self.prepared.clear())
    message = r"in mlp\(F\) on compute reuses memory of compute .* is used by mul in prepare move\(F\) on side 1"
    with SimulatedGpu(), nullcontext() if held else pytest.raises(RaceError, match=message):
        module_of(prepares_a_transfer)(torch.randn(3, requires_grad=True))


# ---- the pipeline ----


def received_activations_are_not_waited_for(patch):
    patch.setattr(Transfer, "wait", lambda self: self.tensors)


def a_send_does_not_wait_for_the_gradient(patch):
    original = P2P.send

    def send(self, tensors, to):
        gpu = current_gpu()
        with gpu.stream(gpu.Stream()):
            return original(self, tensors, to)

    patch.setattr(P2P, "send", send)


def a_sent_gradient_is_changed(patch):
    after(patch, P2P, "send", lambda _, _self, tensors, _to: [tensor.detach().mul_(2) for tensor in tensors] and None)


@pytest.mark.parametrize("mutation,message", [
    (received_activations_are_not_waited_for, "on compute reads what receive in .* writes"),
    (a_send_does_not_wait_for_the_gradient, "send in .* reads what .* on compute writes"),
    (a_sent_gradient_is_changed, "mul_ in .* on compute changes what is used by send"),
])  # fmt: skip
def test_of_a_pipeline(mutation, message, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises(RaceError, match=message):
        pipeline()


def test_a_gradient_that_is_sent_before_it_is_complete(monkeypatch):
    original = segmented._backward

    def backward(module, loss, outputs, grads, on_input_grads):
        if on_input_grads is not None:
            on_input_grads()
        return (yield from original(module, loss, outputs, grads, None))

    monkeypatch.setattr(segmented, "_backward", backward)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(pipeline()[1], single_process()[1])
