"""Which fields of a trace the events of torch.profiler fill, beyond kernels."""

import tracemalloc

from moe_dualpipe.tools.profiler import read_trace
from moe_dualpipe.tools.profiler.reading import pieces
from moe_dualpipe.tools.profiler.trace import Collective, HostEvent, MemoryPoint, StreamWait, SyncCall
from tests.support.traces import annotation, kernel, launch, operator, write

HOST = ("9", "1")


def read(path, *events, **header):
    return read_trace(write(path / "t.json", list(events), **header))


def wait_for(name, correlation, **arguments):
    return {"ph": "X", "cat": "cuda_sync", "name": name, "ts": 30, "dur": 5, "pid": 0, "tid": 7,
            "args": {"correlation": correlation, "device": 0} | arguments}  # fmt: skip


def test_steps_modules_and_queues(tmp_path):
    python = annotation("nn.Module: Linear_3", 5, 9) | {"cat": "python_function"}
    other = annotation("train.py(3): step", 5, 9) | {"cat": "python_function"}
    trace = read(tmp_path, annotation("ProfilerStep#4", 1, 50), python, other, kernel("gemm", 9, 5),
                 CUDA_DEVICE_MAX_CONNECTIONS="1")  # fmt: skip
    assert trace.steps == [HostEvent("ProfilerStep#4", 1, 51, HOST)] and trace.annotations == []
    assert trace.modules == [HostEvent("Linear_3", 5, 14, HOST)]
    assert trace.queues == 1 and read(tmp_path, kernel("gemm", 9, 5)).queues is None


def test_waits_of_the_host_and_of_streams(tmp_path):
    wait = wait_for("Stream Wait Event", 6, stream=9, wait_on_stream=7, wait_on_cuda_event_record_corr_id=2)
    unknown = wait_for("Stream Wait Event", 8, stream=9, wait_on_stream=-1)
    trace = read(
        tmp_path, launch(4, 20, name="cudaStreamSynchronize"), wait_for("Stream Sync", 4, stream=7),
        launch(5, 25, name="cudaDeviceSynchronize"), wait_for("Context Sync", 5, stream=-1),
        launch(3, 26, name="cudaMemcpyAsync"), wait, wait, unknown,
    )  # fmt: skip
    assert trace.syncs == [
        SyncCall("cudaStreamSynchronize", 20, 21, HOST, 4, "7"),
        SyncCall("cudaDeviceSynchronize", 25, 26, HOST, 5, None),
    ]  # fmt: skip
    assert trace.stream_waits == [StreamWait(30, "0", "9", "7", 2, 6), StreamWait(30, "0", "9", None, None, 8)]


def test_memory(tmp_path):
    def point(time, kind, **sizes):
        return {"ph": "i", "name": "[memory]", "ts": time, "args": {"Device Type": kind, "Device Id": 3} | sizes}

    sizes = {"Total Allocated": 5, "Total Reserved": 8}
    trace = read(
        tmp_path, point(1, 1, **sizes), point(2, 0, **sizes), point(3, 1), point("x", 1, **sizes), kernel("g", 1, 1)
    )
    assert trace.memory == [MemoryPoint(1, "3", 5, 8), MemoryPoint(2, "cpu", 5, 8)]


def test_collectives_of_kernels_and_of_calls(tmp_path):
    arguments = {
        "Collective name": "all_to_allv", "Process Group Name": "7", "Process Group Description": "ep", "Group size": 4,
        "Process Group Ranks": "[0, 2, 4, 6]", "In msg nelems": 10, "Out msg nelems": 12, "dtype": "BFloat16", "Seq": 5,
    }  # fmt: skip
    all_to_all = Collective("all_to_allv", "7", "ep", (0, 2, 4, 6), 4, 10, 12, "BFloat16", 5, None)
    own, plain = kernel("ncclDevKernel_SendRecv", 10, 5, 9, 1), kernel("ncclDevKernel_SendRecv", 20, 5, 9, 2)
    own["args"] |= arguments
    call = operator("record_param_comms", 3, 4) | {"args": arguments | {"Seq": 6, "Process Group Ranks": "[0, ..., 6]"}}
    waiting = operator("record_param_comms", 20, 9) | {"args": arguments | {"Collective name": "wait"}}
    other = kernel("ncclDevKernel_SendRecv", 40, 5, 9, 4)
    trace = read(tmp_path, own, call, launch(1, 4), launch(2, 5), plain, kernel("gemm", 30, 5, 7, 3), launch(3, 6),
                 waiting, launch(4, 25), other,
                 distributedInfo={"rank": 2, "pg_config": [{"pg_name": "7", "ranks": [0, 2, 4, 6]}]})  # fmt: skip
    assert [e.collective for e in trace.device_events] == [
        all_to_all, all_to_all._replace(sequence=6), None, None,
    ]  # fmt: skip


def test_operators_are_kept_only_where_the_cpu_is_the_device(tmp_path):
    work = [operator("aten::mm", 5, 10), operator("aten::add", 20, 4, thread=2), operator("aten::mm", 30, 2)]
    assert read(tmp_path, *work).operators == [
        HostEvent("aten::mm", 5, 15, HOST), HostEvent("aten::add", 20, 24, ("9", "2")),
        HostEvent("aten::mm", 30, 32, HOST),
    ]  # fmt: skip
    assert read(tmp_path, *work, kernel("gemm", 5, 1)).operators == []


def test_old_versions_write_annotations_as_operators(tmp_path):
    """PyTorch 1.8 wrote both with the category "Operator", and kernels with "Kernel"."""
    names = (
        "ProfilerStep#4", "Optimizer.step#SGD.step", "nccl:all_reduce", "aten::mm", "detach_", "AddmmBackward",
        "torch::autograd::AccumulateGrad",
    )  # fmt: skip
    old = [operator(name, 10 * i, 5) | {"cat": "Operator"} for i, name in enumerate(names)]
    trace = read(tmp_path, *old, kernel("gemm", 5, 1) | {"cat": "Kernel"})
    assert [e.name for e in (*trace.steps, *trace.annotations, *trace.transfers)] == [*names[:3]]
    assert [e.name for e in read(tmp_path, *old).operators] == [*names[3:]]


def test_times_as_texts(tmp_path):
    texts = [kernel("gemm", 1, 2) | {"ts": ts, "dur": "2"} for ts in ("10", "20.5", "30,5", "4e1", "1,000.5", "")]
    trace = read(tmp_path, *texts)
    assert [(e.start, e.end) for e in trace.device_events] == [(10, 12), (20.5, 22.5), (30.5, 32.5), (40, 42)]
    assert trace.skipped == {"no valid time": 2}


def test_ranks_of_a_group_that_is_recorded_as_a_range(tmp_path):
    """Of long lists, kineto writes the first and the last rank. Recent versions add where the list starts, and its
    step."""
    arguments = {"Collective name": "allreduce", "Group size": 4, "Process Group Ranks": "[1, ..., 13]"}
    ranged = {"Global rank start": 1, "Global rank stride": 4}
    for more, ranks in ((ranged, (1, 5, 9, 13)), ({}, ()), (ranged | {"Global rank stride": 0}, ())):
        event = kernel("ncclDevKernel_AllReduce", 10, 5)
        event["args"] |= arguments | more
        (found,) = read(tmp_path, event).device_events
        assert found.collective is not None and found.collective.ranks == ranks


def test_an_operator_far_away_in_time_is_left_out(tmp_path):
    work = [operator("aten::mm", 10 * i, 5) for i in range(20)]
    trace = read(tmp_path, *work[:7], operator("aten::mm", 4.4e12, 5), *work[7:])
    assert len(trace.operators) == 20 and trace.skipped.total() == 1


def test_only_what_the_analysis_needs_is_held_in_memory(tmp_path, monkeypatch):
    """A kernel and its launch take 430 bytes. The text and all other events are read in pieces and forgotten."""
    monkeypatch.setattr(pieces, "CHUNK", 1 << 14)

    def events(i):
        yield operator("aten::linear", 20 * i, 5) | {"args": {"External id": i, "Concrete Inputs": "x" * 200}}
        yield from ({"ph": ph, "id": i, "pid": 1, "tid": 1, "ts": 20 * i, "cat": "ac2g", "name": "ac2g"} for ph in "sf")
        yield operator("f" * 300, 20 * i, 5) | {"cat": "python_function"}
        yield from (launch(i + 1, 20 * i), kernel("gemm", 20 * i + 5, 9, correlation=i + 1))

    path = write(tmp_path / "trace.json", [event for i in range(1000) for event in events(i)])
    tracemalloc.start()
    try:
        trace = read_trace(path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trace.device_events) == 1000
    assert held < 600 * 1000 and peak < held + 10 * pieces.CHUNK
