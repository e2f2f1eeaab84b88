"""On a simulated GPU, any small model, order of chunks and schedule uses no memory too early."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.schedule import NAMES
from tests.machines.simulated_gpu import SimulatedGpu
from tests.support.pairs import assert_same, stage
from tests.support.simulated_ranks import replace_devices
from tests.support.simulated_runs import all_to_all, loopback, needs_triton, pipeline, run_actions, single_process


@needs_triton
@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 3), dense=st.integers(0, 1), shared=st.integers(0, 1), length=st.integers(1, 9),
    recompute=st.sampled_from(["none", "norms", "attention", "full"]), backend=st.sampled_from([all_to_all, loopback]),
    actions=st.lists(st.sampled_from(["pair", "forwards", "forward", "backward", "split"]), min_size=3, max_size=9),
)  # fmt: skip
def test_training(layers, dense, shared, length, recompute, backend, actions):
    def model(ep):
        return stage(layers, dense, ep, recompute=recompute, num_shared_experts=shared)

    with pytest.MonkeyPatch.context() as patch:
        replace_devices(patch)
        with SimulatedGpu():
            simulated = run_actions(model(backend()), actions, length)
        assert_same(simulated, run_actions(model(loopback()), actions, length))


@pytest.mark.long
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_pipelines(name, train, monkeypatch):
    replace_devices(monkeypatch)
    losses, grads = pipeline(name, train=train)
    expected_losses, expected_grads = single_process(len(grads))
    assert losses == expected_losses
    if train:
        torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-6)
