"""Waits: all time without computation is explained, each moment exactly once."""

from collections import Counter
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.tools.profiler import analyze, read_trace
from moe_dualpipe.tools.profiler.reports.overlap import analysis_text
from moe_dualpipe.tools.profiler.trace import DeviceEvent, HostEvent, Trace
from tests.support.traces import annotation, kernel, launch, operator, write

UNKNOWN = (None,)


def waits(tmp_path, events):
    """During, before, times, total and host of each wait."""
    (analysis,) = analyze(read_trace(write(tmp_path / "trace.json", events)))
    return [(w.during, w.before, w.times, w.total_us, w.host_us) for w in analysis.waits]


def test_of_two_transfers_in_flight_the_first_one_counts(tmp_path):
    assert waits(tmp_path, [
        kernel("gemm", 0, 10), kernel("ncclA", 5, 25, stream=20), kernel("ncclB", 8, 52, stream=21),
        kernel("ncclC", 12, 5, stream=22), kernel("norm", 70, 10),
    ]) == [
        ("ncclB", "norm", 1, 30, *UNKNOWN), ("ncclA", "norm", 1, 20, *UNKNOWN), ("", "norm", 1, 10, *UNKNOWN),
    ]  # fmt: skip


def test_waits_at_the_end_have_no_next_computation(tmp_path):
    assert waits(tmp_path, [
        kernel("ncclA", 0, 5, stream=20), kernel("gemm", 5, 10), kernel("ncclB", 12, 8, stream=20),
        kernel("ncclB", 25, 5, stream=20),
    ]) == [("ncclB", "", 2, 10, *UNKNOWN), ("ncclA", "gemm", 1, 5, *UNKNOWN), ("", "", 1, 5, *UNKNOWN)]  # fmt: skip


def test_gaps_with_the_same_annotations_are_one_wait(tmp_path):
    assert waits(tmp_path, [
        annotation("dispatch(F)", 0, 10), annotation("mlp(F)", 10, 10),
        launch(1, 2), launch(2, 5), launch(3, 12), launch(4, 15),
        kernel("ncclA", 20, 10, 20, correlation=1), kernel("gemm", 30, 10, correlation=3),
        kernel("ncclB", 40, 7, 20, correlation=2), kernel("norm", 47, 10, correlation=4),
    ]) == [("dispatch(F)", "mlp(F)", 2, 17, 0)]  # fmt: skip


def test_time_before_the_launch_counts_for_the_host(tmp_path):
    """Gap 20 to 60: a transfer ends at 40, and the next launch at 50. Gap 60 to 80: the launch was early."""
    assert waits(tmp_path, [
        launch(1, 45, duration=5), launch(2, 51, duration=1),
        kernel("gemm", 0, 20), kernel("ncclA", 10, 30, stream=20), kernel("norm", 60, 5, correlation=1),
        kernel("gelu", 80, 5, correlation=2),
    ]) == [("ncclA", "norm", 1, 20, 20), ("", "norm", 1, 20, 10), ("", "gelu", 1, 15, 0)]  # fmt: skip


def test_a_copy_is_not_computation(tmp_path):
    """Nothing computes from 10 to 80. A copy counts where no transfer is in flight."""
    events = [
        launch(1, 2, name="cudaMemcpy", duration=60), launch(2, 64), kernel("gemm", 0, 10),
        kernel("ncclA", 5, 45, stream=20), kernel("norm", 80, 10, correlation=2),
        kernel("Memcpy DtoH (Device -> Pageable)", 40, 20, correlation=1, cat="gpu_memcpy"),
    ]  # fmt: skip
    assert waits(tmp_path, events) == [
        ("ncclA", "norm", 1, 40, 40), ("", "norm", 1, 20, 5),
        ("Memcpy DtoH (Device -> Pageable)", "norm", 1, 10, 10),
    ]  # fmt: skip


def test_known_waits_of_a_cpu_do_not_count_for_the_host(tmp_path):
    """No computation from 10 to 50. Of this, only the wait from 20 to 40 does not count for the host."""
    events = [
        operator("aten::mm", 0, 10), annotation("dispatch(F)", 2, 5), operator("c10d::alltoall_base_", 4, 1),
        annotation("gloo:all_to_all", 5, 30, thread=5), annotation("wait for dispatch(F)", 20, 20),
        annotation("mlp(F)", 50, 10), operator("aten::mm", 50, 10),
    ]  # fmt: skip
    assert waits(tmp_path, events) == [
        ("dispatch(F)", "mlp(F)", 1, 25, 10), ("", "mlp(F)", 1, 15, 10), ("", "dispatch(F)", 1, 1, 0),
    ]  # fmt: skip


def test_unpacking_is_not_the_next_computation(tmp_path):
    """An operator without annotation is not the next computation either, if an annotation follows soon."""
    events = [
        annotation("mlp(B)", 0, 10), annotation("dispatch(B)", 10, 5), operator("c10d::alltoall_base_", 11, 1),
        annotation("gloo:all_to_all", 12, 38, thread=5), annotation("wait for dispatch(B)", 15, 45),
        operator("aten::index_add", 50, 10), operator("aten::add", 62, 3), annotation("attn(B)", 70, 20),
        operator("aten::mm", 70, 20),
    ]  # fmt: skip
    assert waits(tmp_path, events)[0] == ("dispatch(B)", "attn(B)", 1, 35, 0)
    assert waits(tmp_path, events[:-2])[0] == ("dispatch(B)", "aten::index_add", 1, 35, 0)
    (analysis,) = analyze(read_trace(write(tmp_path / "trace.json", events)))
    assert [(p.name, p.times, p.compute_us, p.comm_us) for p in analysis.phases] == [
        ("mlp(B)", 1, 10, 0), ("dispatch(B)", 1, 4 + 10, 38), ("attn(B)", 1, 20, 0),
    ]  # fmt: skip


def test_a_transfer_in_an_annotation_that_is_not_a_phase_keeps_its_name(tmp_path):
    events = [
        operator("aten::mm", 0, 10), annotation("Model.forward", 8, 4), operator("c10d::broadcast_", 10, 1),
        annotation("gloo:broadcast", 10, 20, thread=5),
        operator("autograd::engine::evaluate_function: MmBackward0", 30, 5),
    ]  # fmt: skip
    assert waits(tmp_path, events)[0][:2] == (
        "gloo:broadcast in Model.forward", "autograd::engine::evaluate_function: MmBackward0",
    )  # fmt: skip
    (analysis,) = analyze(read_trace(write(tmp_path / "trace.json", events)))
    assert "| gloo:broadcast in Model.forward | MmBackward0 |" in analysis_text(analysis)


def test_no_waits_without_gaps(tmp_path):
    assert waits(tmp_path, [kernel("gemm", 0, 10), kernel("ncclA", 2, 5)]) == []
    assert waits(tmp_path, [kernel("gemm", 0, 0)]) == []


def test_without_a_launch_the_hosts_part_is_unknown(tmp_path):
    """The kernel at 20 has no launch, that at 40 was launched at 35, and gelu has no launch."""
    events = [
        annotation("mlp(F)", 1, 40), launch(1, 2), launch(2, 33, duration=2), kernel("gemm", 0, 10),
        kernel("gemm", 20, 5), kernel("norm", 26, 4, correlation=1), kernel("norm", 40, 10, correlation=2),
        kernel("gelu", 63, 7),
    ]  # fmt: skip
    assert waits(tmp_path, events) == [("", "mlp(F)", 3, 21, 5), ("", "gelu", 1, 13, *UNKNOWN)]
    (analysis,) = analyze(read_trace(tmp_path / "trace.json"))
    assert [row.split("|")[-2].strip() for row in analysis_text(analysis).splitlines() if "(nothing)" in row] == [
        "5", "-",
    ]  # fmt: skip


def test_the_table_has_the_longest_waits_and_the_sum_of_the_rest(tmp_path):
    events = [kernel(f"gemm{i}", 100 * i, 100 - i) for i in range(12)]
    (analysis,) = analyze(read_trace(write(tmp_path / "trace.json", events)))
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in analysis_text(analysis).splitlines()
        if "| (no" in row
    ]
    assert rows == [["(nothing)", f"gemm{i + 1}", "1", str(i), "-"] for i in range(10, 2, -1)]
    (others,) = [row.split("|")[1:-1] for row in analysis_text(analysis).splitlines() if " more " in row]
    assert [cell.strip() for cell in others] == ["2 more", "", "2", "3", "-"]


spans = st.tuples(st.integers(0, 40), st.integers(1, 8))
works = st.lists(
    st.tuples(st.sampled_from(["gemm", "norm", "Memcpy", "ncclA", "ncclB"]), spans), min_size=1, max_size=12
)
launches = st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 45), st.integers(0, 6))), min_size=12, max_size=12)


@settings(max_examples=200, deadline=None)
@given(works, launches, st.lists(spans, max_size=4), st.lists(spans, max_size=3), st.booleans())
def test_waits_agree_with_a_check_of_every_moment(drawn, called, annotated, calls, cpu):
    """`calls` are waits of a CPU that acts as the device, or of a host that waits for the device."""
    thread, numbers = ("9", "1"), count(100)
    waiting = [HostEvent("cudaStreamSynchronize", at, at + length, thread) for at, length in calls]
    trace = Trace(
        device_events=[
            DeviceEvent(name, "gpu_memcpy" if name == "Memcpy" else "kernel", at, at + length, "0", "7", i, 1)
            for i, (name, (at, length)) in enumerate(drawn)
        ],
        launches={i: HostEvent("cudaLaunch", c[0], c[0] + c[1], thread) for i, c in enumerate(called) if c is not None},
        annotations=[HostEvent(f"part{i % 2}(F)", at, at + length, thread) for i, (at, length) in enumerate(annotated)],
        waits=waiting if cpu else [],
    )
    if not cpu:
        trace.launches |= {next(numbers): event for event in waiting}
    (analysis,) = analyze(trace)

    def name(work):
        event = trace.annotation_of(work) if work else None
        return event.name if event else work.name if work else ""

    def until(nearby, during):
        named = [event.name for event in map(trace.annotation_of, nearby) if event]
        return next((other for other in named if other != during), nearby[0].name if nearby else "")

    every = sorted(trace.device_events, key=lambda work: work.start)
    comm = [work for work in every if work.name.startswith("nccl")]
    copies = [work for work in every if work.name == "Memcpy"]
    compute = [work for work in every if work not in comm and work not in copies]
    times, total, host, known = Counter(), Counter(), Counter(), set()
    before: object = "computing"
    for at in range(int(every[0].start), int(max(work.end for work in every))):
        if any(work.start <= at < work.end for work in compute):
            before = "computing"
            continue
        owner = next((work for work in [*comm, *copies] if work.start <= at < work.end), None)
        follower = next((work for work in compute if work.start > at), None)
        key = name(owner), until(compute[compute.index(follower) :] if follower else [], name(owner))
        kind = name(owner), owner in comm
        times[key] += kind != before
        total[key] += 1
        before = kind
        event = trace.launches.get(follower.correlation) if follower else None
        if event is not None:
            known.add(key)
        late = event is not None and at < event.end
        in_call = any(event.start <= at < event.end for event in waiting)
        host[key] += late and not (cpu and in_call)
    assert {(w.during, w.before): (w.times, w.total_us, w.host_us) for w in analysis.waits} == {
        key: (times[key], total[key], host[key] if key in known else None) for key in total
    }
    assert [w.total_us for w in analysis.waits] == sorted(total.values(), reverse=True)
    assert sum(w.total_us for w in analysis.waits) == analysis.window_us - analysis.kernel_compute_us
    assert sum(w.total_us for w in analysis.waits if not w.during) == analysis.idle_us
    assert all(0 <= (w.host_us or 0) <= w.total_us for w in analysis.waits)
