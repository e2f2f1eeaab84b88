"""Any small model and any order of chunks uses no memory too early on a simulated GPU."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pairs import assert_same, stage
from tests.support.simulated_gpu import SimulatedGpu
from tests.support.simulated_ranks import replace_devices
from tests.support.simulated_runs import all_to_all, loopback, run_actions


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
