"""Traces of several ranks that join collectives late, on clocks with known offsets."""

import json
from dataclasses import replace

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.pictures.lanes import trace_pictures
from moe_dualpipe.tools.profiler.ranks import RankSkew, RankTransfers, compare_traces
from moe_dualpipe.tools.profiler.trace import DeviceEvent
from tests.support.traces import kernel, write

ARRIVALS = [[10, 50, 90, 130], [13, 50, 97, 130], [10, 61, 90, 132]]
"""When each of three ranks joins each of four collectives, on one clock. Each ends 5 after the last rank joined."""
ENDS = [18, 66, 102, 137]
WAITED = [3 + 11 + 7 + 2, 0 + 11 + 0 + 2, 3 + 0 + 7 + 0]


def skews(ranks):
    return compare_traces(ranks).skews


def transfer(name, start, end):
    return DeviceEvent(name, "kernel", start, end, "0", "20", None, 1)


def ranks(offsets, started=(0, 400, -200), names=("ncclA", "ncclB", "ncclA", "ncclB"), **more):
    """Three ranks whose clocks are `offsets` ahead and whose first events started at `started`."""
    found = []
    for arrivals, offset, start in zip(ARRIVALS, offsets, started, strict=True):
        times = zip(names, [a + offset for a in arrivals], [e + offset for e in ENDS], strict=True)
        found.append(RankTransfers([transfer(*named) for named in times], start + offset, **more))
    return found


@pytest.mark.parametrize("offsets", [(0, 0, 0), (0, 1_000, -250), (5e9, -7, 123.5)])
def test_clocks_are_aligned_by_the_ends_of_collectives(offsets):
    for hosts in (("", "", ""), ("a", "b", "c"), ("a", "", "a" if offsets[0] == offsets[2] else "c")):
        given = [replace(rank, host=host) for rank, host in zip(ranks(offsets), hosts, strict=True)]
        assert skews(given) == tuple(RankSkew(w, s) for w, s in zip(WAITED, (0, 400, -200), strict=True))


def test_ranks_of_one_host_share_a_clock():
    given = ranks((0, 0, 0), host="a")
    assert [other.shift_us for other in skews(given)] == [0, 400, -200]
    assert [other.waited_us for other in skews(given)] == WAITED
    given[1] = RankTransfers(ranks((0, -1_000, 0))[1].transfers, -600.0, base_us=1_000.0, host="a")
    assert [other.shift_us for other in skews(given)] == [0, 400, -200]
    assert [other.waited_us for other in skews(given)] == WAITED


def test_collectives_that_do_not_overlap_cannot_be_compared():
    """Of 10 collectives, one may not overlap, because clocks are not exact."""
    names = ["ncclA"] * 10
    first = [transfer(name, 100 * i, 100 * i + 10) for i, name in enumerate(names)]
    for apart, waited in ((0, 0), (1, 0), (2, None)):
        second = [work._replace(start=work.start + 11, end=work.end + 11) for work in first[:apart]] + first[apart:]
        for host in ("a", ""):
            found = skews([RankTransfers(first, 0, host=host), RankTransfers(second, 0, host=host)])
            unknown = waited is None and not host
            assert found == (RankSkew(waited, None if unknown else 0),) * 2


@pytest.mark.parametrize("host,shifts", [("", [None] * 3), ("a", [0, 400, -200])])
def test_ranks_with_different_collectives_cannot_be_compared(host, shifts):
    alike = ranks((0, 0, 0), host=host)
    others = [work._replace(name="ncclC") for work in alike[1].transfers]
    for other in (RankTransfers([], 400, host=host), RankTransfers(others, 400, host=host)):
        for given in ([alike[0], other, alike[2]], [alike[0], alike[1], other]):
            assert skews(given)[given.index(other)].waited_us is None
    assert [one.shift_us for one in skews([alike[0], RankTransfers([], 400, host=host), alike[2]])] == shifts
    assert skews([RankTransfers([], 7), RankTransfers([], 9)]) == (RankSkew(None, None),) * 2
    assert skews([RankTransfers([], 7, host="a"), RankTransfers([], 9, host="b")]) == (RankSkew(None, None),) * 2
    for alone in (RankTransfers([], 7, host="a"), RankTransfers([], 7), alike[0]):  # a single rank
        assert skews([alone]) == (RankSkew(None, 0),)


def test_point_to_point_transfers_are_left_out():
    given = ranks((0, 30, 0))
    sends = [transfer("gloo:send", 1, 40), transfer("gloo:recv", 2, 90), transfer("gloo:recvAnySource", 3, 9)]
    extra = [RankTransfers([*rank.transfers, *sends[:n]], rank.start_us) for n, rank in enumerate(given, 1)]
    assert skews(extra) == skews(given)
    assert skews([RankTransfers(sends, 0), RankTransfers(sends, 0)]) == (RankSkew(None, None),) * 2


# ---- Files ----


def files(tmp_path, offset=0, base=0, hosts=("a", "b"), numbers=(0, 1), names=("ncclA", "ncclA")):
    """Files of two ranks. The second rank starts 30 before the first, and joins the only collective 20 late."""
    first = [kernel("gemm", 1000, 40), kernel(names[0], 1020, 50, stream=20), kernel("gemm", 1070, 30)]
    second = [kernel("gemm", 970, 60), kernel(names[1], 1040, 30, stream=20), kernel("gemm", 1070, 30)]
    for event in second:
        event["ts"] += offset
    return [
        str(write(tmp_path / f"{rank}.json", events, host_name=host, baseTimeNanoseconds=base_us * 1000,
                  **({} if rank is None else {"distributedInfo": {"rank": rank}})))
        for rank, events, host, base_us in zip(numbers, (first, second), hosts, (0, base), strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("offset,base,hosts", [
    (0, 0, ("a", "a")),
    (-5_000, 5_000, ("a", "a")),  # another origin, the same clock
    (700, 0, ("a", "b")), (700, 9_999, ("a", "b")), (-5_000, 0, ("", "")),  # another clock
])  # fmt: skip
def test_the_command_compares_ranks(tmp_path, capsys, offset, base, hosts):
    paths = files(tmp_path, offset, base, hosts)
    assert main(["profile", "analyze", *paths]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if "waited for others" in line)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in lines[at : at + 4]]
    assert rows[0] == ["", "window, us", "computation", "communication", "exposed", "hidden", "waited for others"]
    assert rows[2:] == [
        ["rank 0", "100", "70", "50", "30", "40.0%", "20"], ["rank 1", "130", "90", "30", "30", "0.0%", "0"],
    ]  # fmt: skip
    assert main(["profile", "analyze", *paths, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["rank"], first["waited_us"], first["shift_us"]) == (0, 20, 0)
    assert (second["rank"], second["waited_us"], second["shift_us"]) == (1, 0, -30)


def test_pictures_share_a_time_axis(tmp_path):
    """In both pictures the collective ends at the same place, 100 after the start of the second rank."""
    first, second = trace_pictures(analyze_files([*map(tmp_path.joinpath, files(tmp_path, offset=700))]))
    assert (first.start_us + first.shift_us, second.start_us + second.shift_us) == (30, 0)
    assert (first.end_us, second.end_us) == (130, 130)
    assert first.title == "rank 0: 40.0% of the communication is hidden (1 kernel, on up to 1 thread blocks)."
    ends = [[one.event.end + picture.shift_us for one in picture.of_kind("comm")] for picture in (first, second)]
    assert ends == [[100], [100]]


def test_names_of_devices_are_distinct(tmp_path):
    def names(*numbers):
        paths = [tmp_path.joinpath(path) for path in files(tmp_path, numbers=numbers)]
        return paths, analyze_files(paths).names

    assert names(3, 1)[1] == ["rank 3", "rank 1"]
    paths, found = names(None, 1)  # one file has no rank
    assert found == [f"{path}, device 0" for path in paths]
    paths, found = names(2, 2)
    assert found == [f"{i}: {path}, device 0" for i, path in enumerate(paths)]
    two = write(
        tmp_path / "two.json", [kernel("gemm", 0, 1), kernel("gemm", 0, 1, device=1)], distributedInfo={"rank": 0}
    )
    found = analyze_files([two])
    assert found.names == ["device 0", "device 1"]
    assert [picture.title.split(":")[0] for picture in trace_pictures(analyze_files([paths[0]]))] == ["device 0"]


def test_traces_of_different_runs_do_not_wait_for_each_other(tmp_path):
    """Two runs of one program: the same transfers, at other times. A slower rank is not a cause of lost time."""
    paths = []
    for name, apart, duration in (("slow", 2000, 1500), ("fast", 1000, 300)):
        events = [kernel("gemm", apart * i, 200) for i in range(8)]
        events += [kernel("ncclDevKernel_AllGather", apart * i + 200, duration, 20) for i in range(8)]
        paths.append(write(tmp_path / f"{name}.json", events))
    found = analyze_files(paths, pictures=False)
    assert "do not overlap in time" in found.problems[0]
    assert {verdict.kind for device in found.devices for verdict in device.analysis.verdicts} == {"exposed-weights"}
