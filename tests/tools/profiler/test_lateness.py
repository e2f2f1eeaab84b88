"""Who is late, how often and why, in programs of several ranks in which the reason is known."""

import random
from collections import Counter

import pytest

from moe_dualpipe.tools.profiler.attribution import IDLE, LATE_HOST, WAITING, Label
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.intervals import as_intervals, union_length
from moe_dualpipe.tools.profiler.lateness import _disjoint
from tests.support.rank_programs import Compute, Idle, Join, execute, write_ranks

TP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def step(attention=100, mlp=50, idle=0, extra=()):
    """Attention, a collective of tensor parallelism, an MLP and one of data parallelism, on a grid of 2 x 2."""
    return [
        Compute(attention, "flash_fwd", "attn"), Idle(idle), *extra,
        *(Join("all_gather", "tp", ranks, 20, phase="attn") for ranks in TP),
        Compute(mlp, "gemm", "mlp"),
        *(Join("all_reduce", "dp", ranks, 40, phase="mlp") for ranks in DP),
    ]  # fmt: skip


def on(rank, us, otherwise=0.0):
    return {other: us if other == rank else otherwise for other in range(4)}


def examined(tmp_path, program, world=4, **options):
    """The lateness of each rank, from files."""
    return analyze_files(write_ranks(execute(program, world), tmp_path, **options), pictures=False).lateness


def reasons(one):
    return {reason.label: reason.us for reason in one.reasons}


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_a_rank_that_computes_longer(tmp_path, offset):
    """Rank 3's attention takes 30 us longer in each of 4 steps: rank 2 waits in tp, and rank 1 in dp."""
    found = examined(tmp_path, step(attention=on(3, 130, 100)) * 4, offset=offset)
    assert (found[3].joined, found[3].last, found[3].delayed_us) == (8, 8, pytest.approx(240))
    assert reasons(found[3]) == {Label("attention", "attn"): pytest.approx(240)}
    assert (found[0].last, found[1].last, found[1].reasons) == (0, 0, ())


def test_a_rank_that_waited_itself(tmp_path):
    """Rank 2 waits for rank 3 in tp, so rank 0 waits for rank 2 in dp."""
    found = examined(tmp_path, step(attention=on(3, 130, 100)) * 4)
    assert (found[2].joined, found[2].last, found[2].delayed_us) == (8, 4, pytest.approx(120))
    assert reasons(found[2]) == {Label(WAITING, "", 3): pytest.approx(120)}
    assert found[2].compute_ratio == pytest.approx(1)


def test_a_rank_whose_host_launches_late(tmp_path):
    found = examined(tmp_path, step(idle=on(1, 25)) * 4)
    assert (found[1].last, found[1].delayed_us) == (8, pytest.approx(200))
    assert reasons(found[1])[LATE_HOST] == pytest.approx(200, abs=1)  # until the end of the launch
    assert found[1].compute_ratio == pytest.approx(1)


def test_idle_time_without_known_launches_is_idle(tmp_path):
    paths = write_ranks(execute(step(idle=on(1, 25)) * 4, 4), tmp_path)
    for path in paths:
        path.write_text(path.read_text().replace("cuda_runtime", "other"))
    assert {*reasons(analyze_files(paths, pictures=False).lateness[1])} == {IDLE}


def test_a_slow_rank_has_several_reasons(tmp_path):
    """Every kernel of rank 0 takes 1.2 times as long."""
    found = examined(tmp_path, step(on(0, 120, 100), on(0, 60, 50)) * 5)
    late = reasons(found[0])
    assert found[0].compute_ratio == pytest.approx(1.2)
    assert {*late} == {Label("attention", "attn"), Label("GEMM", "mlp")}
    assert late[Label("attention", "attn")] == pytest.approx(5 * 20 + 5 * 20)  # in tp, and again in dp
    assert late[Label("GEMM", "mlp")] == pytest.approx(4 * 10 + 5 * 10)  # before the first collective, none ran


def test_what_was_shorter_is_negative(tmp_path):
    found = examined(tmp_path, step(on(1, 150, 100), on(1, 30, 50)) * 4)
    late = reasons(found[1])
    assert late[Label("attention", "attn")] > 0 > late[Label("GEMM", "mlp")]
    assert sum(late.values()) == pytest.approx(found[1].delayed_us)


def test_ranks_in_step_are_not_late(tmp_path):
    found = examined(tmp_path, step() * 4)
    assert [(one.last, one.delayed_us, one.reasons, one.compute_ratio) for one in found] == [(0, 0, (), None)] * 4


def test_of_several_others_the_mean_counts(tmp_path):
    """Ranks 0, 1 and 2 wait 40, 30 and 20 us for rank 3."""
    program = [Compute({0: 60, 1: 70, 2: 80, 3: 100}), Join("all_reduce", "dp", (0, 1, 2, 3), 10)] * 3
    found = examined(tmp_path, program)
    assert [one.last for one in found] == [0, 0, 0, 3]
    assert found[3].delayed_us == pytest.approx(90)
    assert reasons(found[3]) == {Label("GEMM"): pytest.approx(90)}
    assert found[3].compute_ratio == pytest.approx(100 / 70)


def test_hidden_waits_are_no_reason(tmp_path):
    """Every rank computes beside all its transfers. Rank 2 was not late because it had waited for rank 3."""
    done = execute(step(attention=on(3, 130, 100)) * 4, 4)
    for rank, events in done.events.items():
        events.append(events[0]._replace(name="beside", start=-1, end=done.end, stream="8"))
        done.launches[rank].append((-1.0, ""))
    found = analyze_files(write_ranks(done, tmp_path), pictures=False).lateness
    assert {label.category for one in found for label in reasons(one)} == {"other"}
    assert found[3].delayed_us == pytest.approx(240)
    assert [one.exposed_us for one in found] == [0] * 4


def test_computation_beside_a_wait_belongs_to_what_follows(tmp_path):
    """Rank 0 computes its next 50 us while it waits for rank 1, whose attention takes 1.3 times as long."""
    done = execute([Compute({0: 100, 1: 130}, "flash_fwd"), Join("all_reduce", "dp", (0, 1), 40)] * 4, 2)
    for event in [event for event in done.events[0] if event.collective]:
        done.events[0].append(event._replace(name="gemm", end=event.start + 50, stream="8", collective=None))
        done.launches[0].append((-1.0, ""))
    for event in [event for event in done.events[1] if event.collective]:
        done.events[1].append(event._replace(name="gemm", start=event.start - 65, end=event.start, stream="8",
                                             collective=None))  # fmt: skip
        done.launches[1].append((-1.0, ""))
    (_, late) = analyze_files(write_ranks(done, tmp_path), pictures=False).lateness
    assert (late.last, late.delayed_us, late.exposed_us) == (4, pytest.approx(120), pytest.approx(0))
    assert late.compute_ratio == pytest.approx((4 * 130) / (4 * 100 + 3 * 50))  # each before a collective


def test_recordings_without_common_collectives(tmp_path):
    found = examined(tmp_path, step() * 2, ranks=[0, 3])
    assert [*found] == [None, None]
    assert analyze_files(write_ranks(execute(step(), 4), tmp_path, [0]), pictures=False).lateness == ()


def test_recordings_that_begin_at_different_times(tmp_path):
    """Rank 0 is recorded 100 us later. Before the first collective, both are compared from then on."""
    done = execute([Compute(100), Compute({0: 50, 1: 90}, "flash"), Join("all_reduce", "dp", (0, 1))], 2)
    del done.events[0][0], done.launches[0][0]
    paths = write_ranks(done, tmp_path)  # clocks of one host
    found = analyze_files(paths, pictures=False).lateness
    assert reasons(found[1]) == {Label("attention"): pytest.approx(40)}
    assert found[1].compute_ratio == pytest.approx(90 / 50)


def test_the_last_collective_of_all_members_is_the_one_before(tmp_path):
    """What happened before the collective of all ranks delayed that one, and not tp again."""
    tp = [Join("all_gather", "tp", ranks, 20) for ranks in TP]
    program = [*tp, Compute(on(1, 130, 100), "flash"), Join("all_reduce", "all", (0, 1, 2, 3), 10),
               Compute(on(1, 90, 50), "gemm"), *tp]  # fmt: skip
    found = examined(tmp_path, program)
    assert reasons(found[1]) == {Label("GEMM"): pytest.approx(40), Label("attention"): pytest.approx(30)}


def test_a_gap_is_the_hosts_until_the_launch(tmp_path):
    """Of a gap of 60 us, the host needs the first 20 us; then the device waits for something else."""
    program = [Compute(50), Join("all_reduce", "dp", (0, 1)), Compute(5), Idle({0: 0, 1: 60}), Compute(5),
               Join("all_reduce", "dp", (0, 1))]  # fmt: skip
    done = execute(program, 2)
    launches = done.launches[1]
    launches[-2:] = [(time - 40, phase) for time, phase in launches[-2:]]
    late = reasons(analyze_files(write_ranks(done, tmp_path), pictures=False).lateness[1])
    assert (late[LATE_HOST], late[IDLE]) == (pytest.approx(20, abs=0.1), pytest.approx(40, abs=0.1))


def test_waits_for_two_ranks_at_once_count_once():
    waits = _disjoint({2: as_intervals([(0, 10)]), 1: as_intervals([(5, 20)])})
    assert {rank: union_length(spans) for rank, spans in waits.items()} == {1: 15, 2: 5}


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(tmp_path, seed):
    """What a rank delayed others, and the reasons for it, add up, whatever happens."""
    draw = random.Random(seed)
    program, expected, last = [], Counter(), Counter()
    now = dict.fromkeys(range(4), 0.0)
    for _ in range(8):
        for groups, name in ((TP, "tp"), (DP, "dp"), (((0, 1, 2, 3),), "all")):
            us = {rank: draw.choice([draw.uniform(10, 200), 50]) for rank in range(4)}
            program += [Compute(us, draw.choice(["gemm", "flash"]), draw.choice(["", "attn", "mlp"])),
                        Idle(idle := on(draw.randrange(4), draw.choice([0, 40])))]  # fmt: skip
            for rank in now:
                now[rank] += us[rank] + idle[rank]
            for ranks in groups:
                program.append(Join("all_reduce", name, ranks, duration := draw.uniform(5, 40)))
                late = max(ranks, key=lambda rank: now[rank])
                wait = sum(now[late] - now[rank] for rank in ranks) / (len(ranks) - 1)
                if wait >= 1:
                    expected[late] += wait
                    last[late] += 1
                now |= dict.fromkeys(ranks, now[late] + duration)
    found = examined(tmp_path, program, offset=draw.choice([0, 1e5]))
    for rank, one in enumerate(found):
        assert (one.last, one.delayed_us) == (last[rank], pytest.approx(expected[rank], abs=0.01))
        assert sum(reasons(one).values()) == pytest.approx(one.delayed_us, rel=0.1)  # but for small ones
