"""Hosts that launch too late, on devices and with calls of any speed."""

from dataclasses import replace

import pytest

from tests.support.diagnosed import verdicts_of
from tests.support.faults import run
from tests.support.faults.program import Job, Kernel, Machine, Python

MACHINE = Machine(
    call_us=5, launch_us=5, latency_us=3, gap_us=1, slower_beside_transfers=0, slower_beside_computation=0
)  # fmt: skip


@pytest.mark.parametrize(("latency_us", "named"), [(15, True), (40, False)])
def test_host_bound_on_a_device_with_a_long_latency(latency_us, named, tmp_path):
    """The host launches a kernel every 40 us, and each begins some time later. With 40 us, one is always waiting."""
    machine = replace(MACHINE, latency_us=latency_us)
    programs = {0: (Python(30), Kernel("a", 5)) * 32}
    found = [verdict for _, verdict in verdicts_of(Job(programs, machine, {}), tmp_path)]
    assert [verdict.kind for verdict in found] == ["host-bound"] * named
    for verdict in found:
        assert verdict.evidence[0].startswith("31 of 32 kernels") and verdict.cost_us == pytest.approx(31 * 35)


@pytest.mark.parametrize("launch_us", [5, 15, 30])
def test_the_gain_of_a_late_host_counts_the_whole_launch(launch_us, tmp_path):
    job = Job({0: (Kernel("a", 5),) * 40}, replace(MACHINE, launch_us=launch_us), {})
    [(_, verdict)] = verdicts_of(job, tmp_path)
    true = run(job).window_us - run(job.on(call_us=0, launch_us=0)).window_us
    assert verdict.kind == "host-bound" and verdict.gain_us == pytest.approx(true)
