"""Who made the others wait, how long and why, in programs of four ranks in which the reason is known."""

import random

import pytest

from moe_dualpipe.tools.profiler.account import COMPUTATION, IDLE, LAUNCHING, PYTHON, TRANSFER, UNKNOWN, WAITING
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.reports.ranks import lateness_text
from tests.support.rank_programs import Compute, Idle, Join, execute, write_ranks

TP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))
STEPS = 4


def step(attention=100, mlp=50, idle=0):
    """Attention, a collective of tensor parallelism, an MLP and one of data parallelism, on a grid of 2 x 2."""
    return [
        Compute(attention, "flash_fwd", "attn"), Idle(idle),
        *(Join("all_gather", "tp", ranks, 20, phase="attn") for ranks in TP),
        Compute(mlp, "gemm", "mlp"),
        *(Join("all_reduce", "dp", ranks, 40, phase="mlp") for ranks in DP),
    ] * STEPS  # fmt: skip


def on(rank, us, otherwise=0.0):
    return {other: us if other == rank else otherwise for other in range(4)}


def examined(tmp_path, program, **options):
    return analyze_files(write_ranks(execute(program, 4), tmp_path, **options), pictures=False)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize(("late", "us"), [(3, 30), (0, 45)])
def test_a_rank_that_computes_longer(late, us, offset, tmp_path):
    """Its neighbors wait for it in tp and in dp: two of the three others, in each of 4 steps."""
    files = examined(tmp_path, step(attention=on(late, 100 + us, 100)), offset=offset)
    found = files.lateness[late]
    assert (found.joined, found.last) == (2 * STEPS, 2 * STEPS)
    assert found.waited_us == pytest.approx(us * STEPS * 2 / 3)
    assert (found.reasons[0].kind, found.reasons[0].detail) == (COMPUTATION, "attention in attn")
    assert found.reasons[0].us == pytest.approx(us * STEPS)
    said = lateness_text(files).splitlines()
    assert said[0].startswith(f"rank {late} was late: it joined 8 of 8 collectives last. The others waited")
    assert said[1].startswith(
        f"   It spent more time than they did on computation, attention in attn ({us * STEPS} us)"
    )


@pytest.mark.parametrize("launches", [True, False])
def test_a_rank_whose_host_launches_late(launches, tmp_path):
    paths = write_ranks(execute(step(idle=on(1, 25)), 4), tmp_path)
    for path in paths if not launches else ():
        path.write_text(path.read_text().replace("cuda_runtime", "other"))
    reasons = analyze_files(paths, pictures=False).lateness[1].reasons
    kinds = {reason.kind for reason in reasons if reason.us > 1}
    assert kinds <= ({LAUNCHING, PYTHON} if launches else {UNKNOWN}) and kinds


def test_ranks_in_step_are_not_late(tmp_path):
    files = examined(tmp_path, step())
    assert [one.waited_us for one in files.lateness] == [0] * 4
    assert (
        lateness_text(files) == "No rank made the others wait, with nothing else to do, for more than 1% of the window."
    )


def test_ranks_that_are_late_in_turn(tmp_path):
    program = [op for number in range(4) for op in step(mlp=on(number, 90, 50))[:7]]
    said = lateness_text(examined(tmp_path, program))
    assert "rank 3 was late" in said and "In total, nothing took it longer" in said


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed, tmp_path):
    """All that a rank waited, exposed, is in its account, with the rank that it waited for."""
    rng = random.Random(seed)
    program = [
        op for _ in range(5) for op in step({rank: rng.randint(20, 200) for rank in range(4)}, rng.randint(0, 60))[:7]
    ]
    done = execute(program, 4)
    files = analyze_files(write_ranks(done, tmp_path), pictures=False)
    for rank, device in enumerate(files.devices):
        waiting = [entry for entry in device.analysis.account if entry.kind == WAITING]
        assert sum(entry.us for entry in waiting) == pytest.approx(done.waited[rank], abs=0.01)
        assert not any(entry.detail.startswith(f"rank {rank},") for entry in waiting)
        assert device.analysis.time_of(TRANSFER) == pytest.approx(5 * 60, abs=0.1)
        assert device.analysis.exposed_comm_us == pytest.approx(5 * 60 + done.waited[rank], abs=0.1)
        assert device.analysis.time_of(TRANSFER, WAITING, COMPUTATION, *IDLE) == pytest.approx(
            device.analysis.window_us
        )
    waited = [sum(one.analysis.time_of(WAITING) for one in files.devices), sum(one.waited_us for one in files.lateness)]
    assert waited[0] == pytest.approx(3 * waited[1])
