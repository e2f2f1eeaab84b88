"""Ranks in several process groups: who meets whom, how long each waited for whom, and on which clock."""

import json
import random
from collections import defaultdict
from dataclasses import replace
from itertools import chain

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler import NAMES, read_trace
from moe_dualpipe.tools.profiler.account import TRANSFER, WAITING
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.host import as_device
from moe_dualpipe.tools.profiler.ranks import compare_traces
from moe_dualpipe.tools.profiler.trace import DeviceEvent, Trace
from tests.support.faults import Job, Machine, run, write_traces
from tests.support.faults.jobs import moe_training
from tests.support.faults.program import Await, Collective, Kernel, Record
from tests.support.traces import kernel, write


def groups_of(world, *strides):
    """Ranks of a grid: the sizes of its axes, the last one varies fastest. Returns the groups along each axis."""
    found, step = [], 1
    for size in reversed(strides):
        found.append([
            tuple(first + i * step for i in range(size))
            for first in range(world) if first // step % size == 0
        ])  # fmt: skip
        step *= size
    return found[::-1]


def computing(us):
    """us: the time on each rank."""
    return {rank: (Kernel("gemm", each),) for rank, each in us.items()}


def meeting(kind, group, ranks, us, number):
    """A collective or, for "p2p", a send to the second of the ranks. It is the `number`th of its group."""
    peers, key = ranks if kind == "p2p" else None, f"{group} {ranks} {number}"
    kinds = ("send", "recv") if peers else [kind] * len(ranks)
    own = {
        rank: Collective(key, name, group, ranks, us, 1000, group, f"before {key}", peers=peers, sequence=number)
        for rank, name in zip(ranks, kinds, strict=True)
    }
    return {rank: (Record(f"before {key}"), one, Await(one.done)) for rank, one in own.items()}


def layers(world, axes, kinds, repeats=6, seed=0):
    """Each rank computes for its own random time before it joins its group on each axis in turn."""
    draw = random.Random(seed)
    program = []
    for number in range(repeats):
        for groups, (kind, name) in zip(axes, kinds, strict=True):
            program.append(computing({rank: draw.randrange(1, 200) for rank in range(world)}))
            program += [meeting(kind, name, ranks, draw.randrange(5, 60), number) for ranks in groups]
    return program


def recorded(program, ranks, numbered=True):
    """A program is a list of what ranks do in this order, and of where they meet. numbered: record sequence numbers."""

    def numbered_or_not(op):
        return op if numbered or not isinstance(op, Collective) else replace(op, sequence=None)

    ops = {rank: tuple(numbered_or_not(op) for item in program for op in item.get(rank, ())) for rank in ranks}
    return run(Job(ops, Machine(0, 0, 0, gap_us=0, slower_beside_transfers=0, slower_beside_computation=0)))


def collectives_of(recording) -> dict[int, list]:
    """For each rank, its collectives and when they started and ended."""
    return {rank: [span for span in one.device if isinstance(span.op, Collective)] for rank, one in recording.items()}


def true_waits(recording):
    """How long each rank waited in collectives until the last one had joined."""
    spans, last = collectives_of(recording), defaultdict(float)
    for span in chain(*spans.values()):
        last[span.op.key] = max(last[span.op.key], span.start)
    return {rank: sum(last[span.op.key] - span.start for span in own) for rank, own in spans.items()}


def transfers_of(recording, folder):
    """The traces of the ranks with their collectives alone."""
    traces = [as_device(read_trace(path), NAMES) for path in write_traces(recording, folder)]
    return [replace(one, device_events=[e for e in one.device_events if e.collective]) for one in traces]


TP_DP = layers(4, groups_of(4, 2, 2), [("all_reduce", "dp"), ("_allgather_base", "tp")])
PP_EP_TP = layers(8, groups_of(8, 2, 2, 2), [("p2p", "pp"), ("all_to_allv", "ep"), ("_reduce_scatter_base", "tp")])
CHAIN = layers(3, [[(0, 2)], [(1, 2)]], [("all_reduce", "dp"), ("_allgather_base", "tp")])
"""The clock of rank 1 is known through rank 2."""


def waited(ranks):
    """How much longer the collectives of each rank were than on the last rank to join."""
    found = [0.0] * len(ranks)
    for meeting in compare_traces(ranks).meetings:
        for member, event in zip(meeting.members, meeting.events, strict=True):
            found[member] += event.end - event.start - meeting.shortest_us
    return found


@pytest.mark.parametrize(
    "program,world", [(TP_DP, 4), (PP_EP_TP, 8), (CHAIN, 3)], ids=["tp x dp", "tp x ep x pp", "chain"]
)
@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("offset", [0.0, 3e6])
def test_waits_are_in_the_account_with_the_rank_that_was_late(program, world, numbered, offset, tmp_path):
    """On one host and on one each, whose clocks are seconds apart. The first and the last rank share no group."""
    recording = recorded(program, range(world), numbered)
    files, waits = analyze_files(write_traces(recording, tmp_path, offset)), true_waits(recording)
    first = [min(span.start for span in recording[rank].device) for rank in range(world)]
    for rank, (device, shift) in enumerate(zip(files.devices, files.comparison.shifts_us, strict=True)):
        assert shift == pytest.approx(first[rank] - first[0], abs=1e-2)
        assert device.analysis.time_of(WAITING) == pytest.approx(waits[rank], abs=0.05)
        spans = collectives_of(recording)[rank]
        sent = sum(span.end - span.start for span in spans)
        assert device.analysis.time_of(TRANSFER) == pytest.approx(sent - waits[rank], abs=0.1)
        assert device.analysis.exposed_comm_us == pytest.approx(sent, abs=0.1)
        late = {entry.detail.partition(", ")[0] for entry in device.analysis.account if entry.kind == WAITING}
        assert late <= {f"rank {one}" for span in spans for one in span.op.ranks if one != rank}
    assert files.comparison.sentences == [] and len({*waits.values()}) == world


def test_recordings_that_begin_at_different_collectives(tmp_path):
    """Sequence numbers tell which collectives are the same."""
    whole, late = transfers_of(recorded(TP_DP, range(4)), tmp_path), (0, 3, 5, 1)
    cut = [replace(own, device_events=own.device_events[since:]) for own, since in zip(whole, late, strict=True)]
    compared, every = compare_traces(cut), compare_traces(whole).meetings
    same = [m for m in every if all(e in cut[i].device_events for i, e in zip(m.members, m.events, strict=True))]
    assert sorted(m.events for m in compared.meetings) == sorted(m.events for m in same)
    assert 0 < len(same) < len(every) and not compared.sentences


@pytest.mark.parametrize("cut", [slice(None, -1), slice(None, -4)], ids=str)
def test_unequal_counts_without_numbers_are_compared_in_order(cut, tmp_path):
    """The last collectives of one rank are missing: the others are those that numbers would have told."""
    whole = transfers_of(recorded(TP_DP, range(4), numbered=False), tmp_path)
    tp = [event for event in whole[0].device_events if event.collective.description == "tp"]
    kept = [event for event in whole[0].device_events if event.collective.description == "dp" or event in tp[cut]]
    compared = compare_traces([replace(whole[0], device_events=kept), *whole[1:]])
    assert compared.sentences == [
        f"Not compared: tp of ranks 0, 1: some ranks recorded more collectives than others, without numbers "
        f"(the first {len(tp[cut])} of each are compared in their order)."
    ]
    same = [m.events for m in compare_traces(whole).meetings if 0 not in m.members or m.events[0] in kept]
    assert sorted(m.events for m in compared.meetings) == sorted(same)


def test_sends_meet_receives_by_their_order(tmp_path):
    """The peer is a global rank. Rank 1 receives from rank 0 and sends to rank 3; each rank has its own numbers."""
    program = [computing({0: 30, 1: 5, 3: 7})]
    for i in range(4):
        program += [meeting("p2p", "pp", (0, 1), 10, i), computing({1: 20}), meeting("p2p", "pp", (1, 3), 10, i)]
    recording, ranks = recorded(program, (0, 1, 3), numbered=False), []
    for own in transfers_of(recording, tmp_path):
        numbered = [e._replace(collective=e.collective._replace(sequence=n)) for n, e in enumerate(own.device_events)]
        ranks.append(replace(own, device_events=numbered))
    assert waited(ranks) == pytest.approx([*true_waits(recording).values()], abs=0.05)
    fewer = compare_traces([*ranks[:2], replace(ranks[2], device_events=ranks[2].device_events[1:])])
    assert fewer.sentences[:-1] == [
        "Not compared: 1 -> 3: some ranks recorded more collectives than others, without numbers (the first 3 of each "
        "are compared in their order)."
    ]
    assert not compare_traces([replace(rank, rank=None) for rank in ranks]).meetings


def test_collectives_that_do_not_overlap_cannot_be_compared():
    """Of 10 collectives, one may not overlap, because clocks are not exact. gloo's sends and broadcasts never meet."""
    first = [DeviceEvent("ncclA", "kernel", 100 * i, 100 * i + 10, "0", "20", None, 1, kind="comm") for i in range(10)]
    sends = [first[0]._replace(name=name, end=90) for name in ("gloo:send", "gloo:recvAnySource", "gloo:broadcast")]
    for apart, found in ((0, 10), (1, 10), (2, 0)):
        second = [work._replace(start=work.start + 11, end=work.end + 11) for work in first[:apart]] + first[apart:]
        for host in ("a", ""):
            pair = [Trace([*own, *sends], host=host) for own in (first, second)]
            compared = compare_traces(pair)
            assert (len(compared.meetings), len(compared.sentences)) == (found, found == 0)
            assert compared.shifts_us == ([0, 0] if found or host else [None, None])
    other = [work._replace(name="ncclB") for work in first]
    assert not compare_traces([Trace(first), Trace(other)]).meetings
    assert compare_traces([Trace(first)]).shifts_us == [0]


def test_ranks_without_a_trace_are_said(tmp_path):
    """The others are compared among themselves."""
    first, second, _, last = write_traces(recorded(TP_DP, range(4)), tmp_path)
    found = analyze_files([last, first, second])
    assert found.names == ["rank 0", "rank 1", "rank 3"]
    missing = "1 of 4 ranks have no trace here (rank 2): waits for them count as communication."
    assert found.comparison.sentences == [missing] and found.as_objects()[2]["problems"] == [missing]
    assert {m.group.ranks for m in found.comparison.meetings} == {(0, 1), (1, 3)}
    assert analyze_files([last]).comparison.sentences == []  # a single trace is compared with nothing


def files(tmp_path, offset=0, base=0, hosts=("a", "a"), numbers=(0, 1)):
    """Files of two ranks. The second rank starts 30 before the first, and joins the only collective 20 late."""
    first = [kernel("gemm", 1000, 40), kernel("ncclA", 1020, 50, stream=20), kernel("gemm", 1070, 30)]
    second = [kernel("gemm", 970, 60), kernel("ncclA", 1040, 30, stream=20), kernel("gemm", 1070, 30)]
    for event in second:
        event["ts"] += offset
    return [
        write(tmp_path / f"{rank}.json", events, host_name=host, baseTimeNanoseconds=base_us * 1000,
              **({} if rank is None else {"distributedInfo": {"rank": rank}}))
        for rank, events, host, base_us in zip(numbers, (first, second), hosts, (0, base), strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("offset,base,hosts", [
    (0, 0, ("a", "a")), (-5_000, 5_000, ("a", "a")), (700, 9_999, ("a", "b")), (-5_000, 0, ("", "")),
])  # fmt: skip
def test_the_command_and_the_pictures_put_ranks_on_one_clock(tmp_path, capsys, offset, base, hosts):
    """In both pictures the collective ends at the same place, 100 after the start of the second rank."""
    paths = files(tmp_path, offset, base, hosts)
    first, second = analyze_files(paths).pictures()
    assert (first.start_us + first.shift_us, second.start_us + second.shift_us) == (30, 0)
    assert [[one.end + own.shift_us for one in own.of_kind("comm")] for own in (first, second)] == [[100], [100]]
    assert first.title == "rank 0: 40.0% of the communication is hidden (1 kernel, on up to 1 thread blocks)."
    assert main(["profile", "analyze", *map(str, paths)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith("waiting for a rank |"))
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in lines[at + 2 : at + 4]]
    assert rows == [["rank 0", "100", "70", "50", "30", "40.0%", "0"], ["rank 1", "130", "90", "30", "30", "0.0%", "0"]]


@pytest.mark.parametrize("label", ["[TP0{}] ", "rank{}: ", "[DP00-TP0{}] "])
def test_merged_traces_give_the_reports_of_the_ranks(label, tmp_path):
    """A merger writes the rank before each process. Devices, launches and annotations have the same numbers."""
    paths = write_traces(run(moe_training(layers=2)), tmp_path / "apart")
    merged, events = {}, []
    for rank, path in enumerate(paths):
        found = json.loads(path.read_text())
        events += [one | {"pid": f"{label.format(rank)}{one['pid']}"} for one in found.pop("traceEvents")]
        merged = found | merged
    (tmp_path / "merged.json").write_text(json.dumps({**merged, "traceEvents": events}))
    apart, together = analyze_files(paths).as_objects(), analyze_files([tmp_path / "merged.json"]).as_objects()
    assert len(apart) == len(together) > 1
    numbered = "DP" not in label
    for one, other in zip(apart, together, strict=True):
        one["trace"] = other["trace"]
        one["rank"] = one["rank"] if numbered else None
        text = json.dumps(one)
        for rank in range(len(paths)) if not numbered else ():
            text = text.replace(f"rank {rank}", f"{tmp_path / 'merged.json'}, [DP00-TP0{rank}], device {rank}")
        assert json.loads(text) == json.loads(json.dumps(other))
