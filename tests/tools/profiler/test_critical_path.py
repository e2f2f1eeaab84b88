"""The critical path through ranks, against one that is followed forward while the program is executed."""

import random
from collections import Counter

import pytest

from moe_dualpipe.tools.profiler.files import analyze_files
from tests.support.rank_programs import Compute, Idle, Join, execute, write_ranks
from tests.tools.profiler.test_lateness import DP, TP, on, step


def expected(program, world):
    """The time of each rank and phase on the path to the end of the program."""
    now, path = dict.fromkeys(range(world), 0.0), {rank: Counter() for rank in range(world)}
    for item in program:
        if isinstance(item, Join):
            last = max(item.ranks, key=lambda rank: now[rank])
            begin, before = now[last], path[last]
            for rank in item.ranks:
                now[rank] = begin + item.duration
                path[rank] = before + Counter({(rank, item.phase or item.kind): item.duration})
            continue
        for rank in range(world):
            us = item.us.get(rank, 0.0) if isinstance(item.us, dict) else item.us
            name = "idle" if isinstance(item, Idle) else item.phase or "GEMM"
            now[rank] += us
            path[rank] = path[rank] + Counter({(rank, name): us})
    return path[max(now, key=lambda rank: now[rank])]


def found(tmp_path, program, world=4, **options):
    path = analyze_files(write_ranks(execute(program, world), tmp_path, **options), pictures=False).critical_path
    times = Counter()
    for part in path:
        times[part.rank, part.label.phase or part.label.category.replace("not launched", "idle")] += part.us
    return times


def assert_near(one, other):
    assert {key: one[key] - other[key] for key in {*one, *other} if abs(one[key] - other[key]) > 0.1} == {}


def test_the_path_goes_through_the_late_rank(tmp_path):
    """Ranks 1 and 3 end last, after dp. Rank 2 only waited for rank 3 in tp, and so rank 0 for rank 2."""
    program = [*step(attention=on(3, 130, 100)) * 2, Compute(on(0, 7, 1), phase="end")]
    times = found(tmp_path, program)
    assert_near(times, expected(program, 4))
    assert times[0, "end"] == pytest.approx(7)
    assert times[3, "attn"] > 250 and not times[1, "attn"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("offset", [0.0, 12_345.0])
def test_random_programs(tmp_path, seed, offset):
    draw = random.Random(seed)
    program = []
    for _ in range(6):
        for groups, name in ((TP, "tp"), (DP, "dp")):
            us = {rank: draw.uniform(10, 200) for rank in range(4)}
            program += [Compute(us, "gemm", draw.choice(["", "attn", "mlp"])), Idle(on(draw.randrange(4), 40.0))]
            program += [Join("all_reduce", name, ranks, draw.uniform(5, 40), phase=name) for ranks in groups]
    program.append(Compute({rank: draw.uniform(10, 50) for rank in range(4)}, phase="end"))  # one rank ends last
    times = found(tmp_path, program, offset=offset)
    assert_near(times, expected(program, 4))
    assert len({rank for rank, _ in times}) > 1


def test_the_length_is_the_time_to_the_last_end(tmp_path):
    program = step(attention=on(2, 150, 100)) * 3
    done = execute(program, 4)
    assert sum(found(tmp_path, program).values()) == pytest.approx(done.end)


def test_a_hidden_collective_is_not_on_the_path(tmp_path):
    """Rank 0 computes beside its transfer until after its end, so it does not depend on rank 1."""
    done = execute([Compute({0: 10, 1: 60}), Join("all_reduce", "dp", (0, 1), 20, phase="sum")], 2)
    end = done.events[0][1].end
    beside = done.events[0][0]._replace(start=10, end=end + 15, stream="8")
    done.events[0].append(beside)
    done.launches[0].append((-1.0, "long"))
    path = analyze_files(write_ranks(done, tmp_path), pictures=False).critical_path
    assert [(part.rank, part.label.phase, part.us) for part in path] == [(0, "long", 85), (0, "", 10)]


def test_ranks_without_a_common_clock_have_no_path(tmp_path):
    program = [Compute(10), Join("all_reduce", "a", (0, 2), 10), Join("all_reduce", "b", (1, 3), 10)]
    assert found(tmp_path, program, ranks=[0, 1], offset=5.0) == {}
    assert found(tmp_path, program, ranks=[0, 2], offset=5.0) != {}
    three = found(tmp_path, [*program, Compute(on(1, 500))], ranks=[0, 1, 2], offset=5.0)
    assert {rank for rank, _ in three} <= {0, 2}  # positions; rank 1 ends later, on an unknown clock
