"""For each cause: a small job that has it, and the nearest job that does not."""

import json
from dataclasses import replace

import pytest

from moe_dualpipe.tools.profiler.files import analyze_files
from tests.support.diagnosed import verdicts_of
from tests.support.faults import run, write_traces
from tests.support.faults.program import Await, Begin, Collective, End, Item, Job, Kernel, Machine, Python, Record
from tests.support.traces import kernel, write

MACHINE = Machine(
    call_us=5, launch_us=5, latency_us=3, gap_us=1, slower_beside_transfers=0, slower_beside_computation=0
)  # fmt: skip
RANKS = (0, 1)
LAYERS = 8


def kinds(layer, folder, machine=MACHINE, ranks=RANKS):
    """What is said about a job. layer: the operations of a rank in each layer."""
    programs = {rank: tuple(op for i in range(LAYERS) for op in layer(i, rank)) for rank in ranks}
    groups = dict.fromkeys(("ep", "dp"), (ranks,))
    return {verdict.kind for _, verdict in verdicts_of(Job(programs, machine, groups), folder)}


def transfer(key, us, after, group="ep", stream="ep", ranks=RANKS, elements=1000, label=""):
    return Collective(key, "all_to_allv", group, ranks, us, elements, stream, after, label)


def done(key):
    return Await(f"done {key}")


def labeled(label, us):
    return Begin(label), Kernel(f"kernel of {label}", us), End()


@pytest.mark.parametrize(("layers", "named"), [(range(LAYERS), True), ([LAYERS - 1], False)])
def test_host_sync(layers, named, tmp_path):
    """A host that reads a number in each layer, and one that reads it at the end."""

    def layer(i, _):
        return Kernel("a", 100), Kernel("b", 100), *([Item()] if i in layers else [])

    assert kinds(layer, tmp_path, ranks=(0,)) == ({"host-sync"} if named else set())


@pytest.mark.parametrize(("us", "named"), [(65, True), (150, False)])
def test_causes_of_less_than_one_percent_are_left_out(us, named, tmp_path):
    """One number that is read costs 14 us, of a window of 1,060 or of 2,430 us."""

    def layer(i, _):
        return Kernel("a", us), Kernel("b", us), *([Item()] if i == 3 else [])

    assert kinds(layer, tmp_path, ranks=(0,)) == ({"host-sync"} if named else set())


@pytest.mark.parametrize(("us", "named"), [(20, True), (60, False)])
def test_host_bound(us, named, tmp_path):
    """A host that takes 40 us for each kernel, and shorter and longer kernels."""
    found = kinds(lambda *_: [Python(30), Kernel("a", us)] * 4, tmp_path, ranks=(0,))
    assert found == ({"host-bound"} if named else set())


def test_the_gain_without_late_launches_has_no_time_in_the_calls(tmp_path):
    """Calls of 7 us launch kernels of 2 us. A host that takes no time lets them run one after another."""
    machine = replace(MACHINE, call_us=0, launch_us=7)
    job = Job({0: (Kernel("a", 2),) * 40}, machine, {})
    [(_, verdict)] = verdicts_of(job, tmp_path)
    ideal = run(job.on(launch_us=0)).window_us
    assert verdict.kind == "host-bound" and verdict.gain_us == pytest.approx(run(job).window_us - ideal, rel=0.02)


@pytest.mark.parametrize(("queues", "recorded", "found"), [
    (1, None, ["few-queues"]), (1, 1, ["few-queues"]), (1, 2, ["nothing-to-overlap"]), (2, None, []),
])  # fmt: skip
def test_few_queues(queues, recorded, found, tmp_path):
    """Kernels behind a transfer that they do not need. Ends are 1 us after the next start. recorded: the queues."""
    sums = [(Record(f"a {i}"), transfer(f"sum {i}", 200, f"a {i}", ranks=(0,))) for i in range(LAYERS)]
    ops = [op for each in sums for op in (Kernel("a", 300), *each, Kernel("b", 300))]
    [path] = write_traces(run(Job({0: tuple(ops)}, replace(MACHINE, queues=queues), {"ep": ((0,),)})), tmp_path)
    whole = json.loads(path.read_text()) | {"CUDA_DEVICE_MAX_CONNECTIONS": recorded}
    for event in whole["traceEvents"]:
        event |= {"dur": event["dur"] + 2} if event.get("cat") == "kernel" else {}
    path.write_text(json.dumps(whole))
    [device] = analyze_files([path], pictures=False).devices
    assert [verdict.kind for verdict in device.analysis.verdicts] == found


@pytest.mark.parametrize(("stream", "named"), [("ep", True), ("dp", False)])
def test_shared_stream(stream, named, tmp_path):
    """A sum of 300 us before a dispatch that computation waits for: on its stream, and on a stream of its own."""

    def layer(i, _):
        return (
            Kernel("a", 300), Record(f"a {i}"), transfer(f"sum {i}", 300, f"a {i}", "dp", stream),
            transfer(f"dispatch {i}", 200, f"a {i}"), Kernel("b", 250), done(f"dispatch {i}"), Kernel("c", 300),
        )  # fmt: skip

    assert kinds(layer, tmp_path) == ({"shared-stream"} if named else set())


@pytest.mark.parametrize("late", [True, False])
def test_late_launch(late, tmp_path):
    """A dispatch behind weight gradients, which it does not need, and directly after its input."""

    def layer(i, _):
        dispatch = transfer(f"dispatch {i}", 300, f"{'W' if late else 'F'} {i}", label="dispatch(F)")
        return (
            *labeled("attn(F)", 300), Record(f"F {i}"), *([] if late else [dispatch]),
            *labeled("mlp(W)", 310), Record(f"W {i}"), *([dispatch] if late else []),
            *labeled("mlp(B)", 50), done(f"dispatch {i}"), *labeled("mlp(F)", 300),
        )  # fmt: skip

    assert ("late-launch" in kinds(layer, tmp_path)) == late


@pytest.mark.parametrize("late", [True, False])
def test_late_launch_behind_a_transfer_whose_data_came_later(late, tmp_path):
    """A dispatch behind the long dispatch of the other chunk, and before it."""

    def layer(i, _):
        own = transfer(f"own {i}", 200, f"F {i}", label="dispatch(F)")
        other = transfer(f"other {i}", 600, f"B {i}", label="dispatch(B)", elements=3000)
        sent = (*labeled("mlp(B)", 50), Record(f"B {i}"), *((other, own) if late else (own, other)))
        return (
            *labeled("attn(F)", 300), Record(f"F {i}"), *sent, *labeled("mlp(W)", 310), done(f"own {i}"),
            *labeled("mlp(F)", 300), done(f"other {i}"), *labeled("attn(B)", 300),
        )  # fmt: skip

    assert ("late-launch" in kinds(layer, tmp_path)) == late


def test_a_launch_is_not_late_by_itself_while_the_host_waits(tmp_path):
    """A combine that is launched after a number was read: it is late because of that. It is hidden without it."""

    def layer(i, _):
        sent = transfer(f"t {i}", 300, f"F {i}", label="combine(F)")
        return (
            *labeled("mlp(F)", 300), Record(f"F {i}"), *labeled("attn(B)", 400), Item(), sent,
            *labeled("attn(W)", 100), done(f"t {i}"), *labeled("attn(F)", 300),
        )  # fmt: skip

    found = kinds(layer, tmp_path)
    assert "host-sync" in found and "late-launch" not in found


@pytest.mark.parametrize(("factor", "named"), [(1.3, True), (1.0, False)])
def test_imbalance(factor, named, tmp_path):
    """A rank whose kernels take longer. The transfers are hidden where both are equal."""

    def layer(i, rank):
        us = 300 * (factor if rank else 1)
        return (
            Kernel("a", us), Record(f"a {i}"), transfer(f"t {i}", 100, f"a {i}"), Kernel("b", 150), done(f"t {i}"),
            Kernel("c", 100),
        )  # fmt: skip

    assert kinds(layer, tmp_path) == ({"imbalance"} if named else set())


@pytest.mark.parametrize(("later_us", "named"), [(15, False), (40, True)])
def test_waits_for_ranks_that_are_short_beside_the_transfers_are_ordinary(later_us, named, tmp_path):
    """One rank joins later in transfers of 1,000 us. 15 us are more than 1% of the window, and less than 2% of them."""

    def layer(i, rank):
        return Kernel("a", 100 + later_us * rank), Record(f"a {i}"), transfer(f"t {i}", 1000, f"a {i}"), done(f"t {i}")

    assert ("imbalance" in kinds(layer, tmp_path)) == named


@pytest.mark.parametrize(("slow", "elements", "named"), [(300, 1000, True), (300, 3000, False), (130, 1000, False)])
def test_slow_transfer(slow, elements, named, tmp_path):
    """Every fourth transfer takes longer: with the same size, with a larger size, and only a little."""

    def layer(i, _):
        chosen = i % 4 == 3
        sent = transfer(f"t {i}", slow if chosen else 100, f"a {i}", elements=elements if chosen else 1000)
        return Kernel("a", 300), Record(f"a {i}"), sent, Kernel("b", 150), done(f"t {i}"), Kernel("c", 100)

    assert ("slow-transfer" in kinds(layer, tmp_path)) == named


def half_beside(i, _):
    """A transfer beside computation in every other layer, otherwise alone."""
    wait, beside = done(f"t {i}"), Kernel("b", 300)
    sent = transfer(f"t {i}", 300, f"a {i}")
    return Kernel("a", 100), Record(f"a {i}"), sent, *((beside, wait) if i % 2 else (wait, beside))


@pytest.mark.parametrize(("slower", "named"), [(0.5, True), (0.05, False)])
def test_starved_transfer(slower, named, tmp_path):
    found = kinds(half_beside, tmp_path, replace(MACHINE, slower_beside_computation=slower))
    assert ("starved-transfer" in found, "starved-computation" in found) == (named, False)


@pytest.mark.parametrize(("slower", "named"), [(0.5, True), (0.05, False)])
def test_starved_computation(slower, named, tmp_path):
    found = kinds(half_beside, tmp_path, replace(MACHINE, slower_beside_transfers=slower))
    assert ("starved-computation" in found, "starved-transfer" in found) == (named, False)


@pytest.mark.parametrize(("ahead", "queues", "found"), [
    (0, 32, {"exposed-pipeline"}), (1, 32, set()), (LAYERS, 1, {"few-queues"}),
])  # fmt: skip
def test_exposed_pipeline(ahead, queues, found, tmp_path):
    """Computation that needs what arrives now, what arrived one micro-batch before, and nothing, in the same queue."""

    def layer(i, rank):
        sent = Collective(f"p {i}", "recv" if rank else "send", "ep", RANKS, 100, 1, "ep", f"a {i}", peers=(0, 1))
        return Kernel("a", 300), Record(f"a {i}"), sent, *([done(f"p {i - ahead}")] if rank and i >= ahead else [])

    assert kinds(layer, tmp_path, replace(MACHINE, queues=queues)) == found


@pytest.mark.parametrize("beside", [0, 150])
def test_nothing_to_overlap(beside, tmp_path):
    """Computation waits for a transfer directly, and after other computation that covers it."""

    def layer(i, _):
        others = [Kernel("b", beside)] if beside else []
        sent = transfer(f"t {i}", 100, f"a {i}")
        return Kernel("a", 300), Record(f"a {i}"), sent, *others, done(f"t {i}"), Kernel("c", 100)

    assert kinds(layer, tmp_path) == (set() if beside else {"nothing-to-overlap"})


@pytest.mark.parametrize(("tail", "named"), [(150, True), (10, False)])
def test_nothing_to_overlap_at_the_end_of_a_transfer(tail, named, tmp_path):
    """A transfer that is hidden at first, as a sum of gradients, and lasts longer than the computation beside it."""

    def layer(i, _):
        sent = transfer(f"t {i}", 300 + tail, f"a {i}")
        return Kernel("a", 300), Record(f"a {i}"), sent, Kernel("b", 300), done(f"t {i}"), Kernel("c", 100)

    assert kinds(layer, tmp_path) == ({"nothing-to-overlap"} if named else set())


@pytest.mark.parametrize(("after_us", "named"), [(10, True), (50, False)])
def test_nothing_to_overlap_if_computation_starts_soon_after_the_transfer(after_us, named, tmp_path):
    """Launches are unknown. Later, the computation waits for something else."""
    starts = [i * (400 + after_us) for i in range(LAYERS)]
    events = [kernel("a", start, 300) for start in starts]
    events += [kernel("ncclDevKernel", start + 300, 100, stream=8) for start in starts]
    files = analyze_files([write(tmp_path / "t.json", events)], pictures=False)
    found = {verdict.kind for verdict in files.devices[0].analysis.verdicts}
    assert found == ({"nothing-to-overlap"} if named else set())


def test_time_in_which_two_streams_wait_for_the_host_counts_once(tmp_path):
    ops = [op for _ in range(40) for op in (Python(60), Kernel("a", 20), Kernel("b", 20, "other"))]
    [(_, verdict)] = verdicts_of(Job({0: tuple(ops)}, MACHINE, {}), tmp_path)
    idle = 60 + 2 * 10 - 2 * 20  # a turn of the host takes 80 us; the kernels share the device for 40
    assert verdict.kind == "host-bound" and verdict.cost_us == pytest.approx(39 * idle, rel=0.02)


def evidence(job, kind, folder):
    return next(" ".join(verdict.evidence) for _, verdict in verdicts_of(job, folder) if verdict.kind == kind)


def test_evidence_has_the_queue_and_the_bandwidth(tmp_path):
    """A host that is late for each kernel; then every fourth transfer of 2 MB takes 300 instead of 100 us."""
    host = Job({0: (Python(30), Kernel("a", 20)) * 40}, MACHINE, {})
    said = evidence(host, "host-bound", tmp_path)
    assert "A kernel starts 8.0 us or more after its launch." in said
    ops = [
        op for i in range(8)
        for op in (Record(f"a {i}"), transfer(f"t {i}", 100 if i % 4 else 300, f"a {i}", elements=1_000_000),
                   done(f"t {i}"), Kernel("b", 50))
    ]  # fmt: skip
    said = evidence(Job(dict.fromkeys(RANKS, tuple(ops)), MACHINE, {"ep": (RANKS,)}), "slow-transfer", tmp_path)
    assert "The longest takes 300 us instead of 100: 2.0 MB at 6.7 instead of 20.0 GB/s." in said


def test_imbalance_names_the_rank_that_is_waited_for(tmp_path):
    ranks = (0, 1, 2)

    def ops(rank):
        for i in range(LAYERS):
            yield from (Kernel("a", 500 if rank == 1 else 300 - 50 * rank), Record(f"a {i}"))
            yield from (transfer(f"t {i}", 100, f"a {i}", ranks=ranks), done(f"t {i}"))

    job = Job({rank: tuple(ops(rank)) for rank in ranks}, MACHINE, {"ep": (ranks,)})
    assert "100% of that was for rank 1." in evidence(job, "imbalance", tmp_path)
