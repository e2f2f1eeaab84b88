"""Which fields of a trace the events and values of torch.profiler fill."""

import pytest

from moe_dualpipe.tools.profiler import read_trace
from moe_dualpipe.tools.profiler.trace import Collective, HostEvent
from tests.support.traces import annotation, kernel, launch, operator, write

HOST = ("9", "1")


def read(path, *events, **header):
    return read_trace(write(path / "t.json", list(events), **header))


def test_work_of_a_device(tmp_path):
    copy = kernel("Memcpy HtoD", 3, 4, 8, 6, device=1, cat="gpu_memcpy")
    copy["args"] |= {"bytes": 640, "grid": "wide"}
    elsewhere = {"ph": "X", "cat": "hpu_op", "name": "g", "ts": "5.5", "dur": "2", "pid": 3, "tid": 4, "args": None}
    trace = read(tmp_path, kernel("gemm", 10, 30, 7, 5, grid=(2, 3, 4)), copy, elsewhere)
    assert [event[:10] for event in trace.device_events] == [
        ("gemm", "kernel", 10, 40, "0", "7", 5, 24, 0, None),
        ("Memcpy HtoD", "gpu_memcpy", 3, 7, "1", "8", 6, 0, 640, None),
        ("g", "kernel", 5.5, 7.5, "3", "4", None, 0, 0, None),
    ]  # fmt: skip
    assert (trace.num_events, trace.truncated) == (3, False)


@pytest.mark.parametrize(
    "category", ["cuda_runtime", "cuda_driver", "hip_driver", "xpu_runtime", "privateuse1_runtime"]
)
def test_launches_of_all_runtimes(tmp_path, category):
    events = [launch(3, 1) | {"cat": category}, launch(4, 2) | {"cat": category, "args": {"correlation": "9"}}]
    assert read(tmp_path, *events, kernel("gemm", 5, 10, correlation=3)).launches == {
        3: HostEvent("cudaLaunchKernel", 1, 2, HOST), 9: HostEvent("cudaLaunchKernel", 2, 3, HOST),
    }  # fmt: skip


def test_steps_modules_and_events_that_are_not_needed(tmp_path):
    python = annotation("nn.Module: Linear_3", 5, 9) | {"cat": "python_function"}
    other = annotation("train.py(3): step", 5, 9) | {"cat": "python_function"}
    arrow, meta = {"ph": "s", "id": 3, "ts": 3, "cat": "kernel", "name": "x"}, {"ph": "M", "name": "n"}
    trace = read(tmp_path, annotation("ProfilerStep#4", 1, 50), python, other, arrow, meta, kernel("gemm", 9, 5))
    assert trace.steps == [HostEvent("ProfilerStep#4", 1, 51, HOST)] and trace.annotations == []
    assert trace.modules == [HostEvent("Linear_3", 5, 14, HOST)]
    assert (trace.num_events, len(trace.device_events), trace.skipped) == (6, 1, 0)


def test_waits_of_the_host_need_no_number(tmp_path):
    waits = [launch(number, at, name="cudaStreamSynchronize") for number, at in ((4, 20), (4, 22), (None, 24))]
    trace = read(tmp_path, *waits, launch(3, 26, name="cudaMemcpyAsync"), launch(None, 28, name="cudaMemcpyAsync"))
    assert [call.start for call in trace.launches.values()] == [20, 22, 24, 26] and {3, 4} < {*trace.launches}


def test_collectives_of_kernels_and_of_calls(tmp_path):
    """A kernel has its own, or that of the call around its launch; elided ranks are those of the group."""
    arguments = {
        "Collective name": "all_to_allv", "Process Group Name": "7", "Process Group Description": "ep", "Group size": 4,
        "Process Group Ranks": "[0, 2, 4, 6]", "In msg nelems": 10, "Out msg nelems": 12, "dtype": "BFloat16", "Seq": 5,
    }  # fmt: skip
    all_to_all = Collective("all_to_allv", "7", "ep", (0, 2, 4, 6), 4, 10, 12, "BFloat16", 5, None)
    own, plain = kernel("ncclDevKernel_SendRecv", 10, 5, 9, 1), kernel("ncclDevKernel_SendRecv", 20, 5, 9, 2)
    own["args"] |= arguments
    call = operator("record_param_comms", 3, 4) | {"args": arguments | {"Seq": 6, "Process Group Ranks": "[0, ..., 6]"}}
    waiting = operator("record_param_comms", 20, 9) | {"args": arguments | {"Collective name": "wait"}}
    named = [operator("nccl:_all_gather_base", 40, 9), launch(5, 41), kernel("ncclDevKernel_Generic", 60, 5, 9, 5)]
    other = kernel("ncclDevKernel_SendRecv", 40, 5, 9, 4)
    peers = [kernel("ncclDevKernel_SendRecv", 70 + i, 1, 9) for i in range(2)]
    for event, name in zip(peers, ("send", "recv"), strict=True):
        event["args"] |= {"Collective name": name, "Dst Rank": 3, "Src Rank": 4}
    trace = read(tmp_path, own, call, launch(1, 4), launch(2, 5), plain, kernel("gemm", 30, 5, 7, 3), launch(3, 6),
                 waiting, launch(4, 25), other, *named, *peers,
                 distributedInfo={"rank": 2, "pg_config": [{"pg_name": "7", "ranks": [0, 2, 4, 6]}]})  # fmt: skip
    found = [e.collective for e in trace.device_events]
    assert found[:5] == [all_to_all, all_to_all._replace(sequence=6), None, None, Collective("_all_gather_base")]
    assert [one.peer for one in found[5:]] == [3, 4]


@pytest.mark.parametrize("more,ranks", [
    ({"Global rank start": 1, "Global rank stride": 4}, (1, 5, 9, 13)), ({}, ()),
    ({"Global rank start": 1, "Global rank stride": 0}, ()), ({"Process Group Ranks": "[1, 2]"}, ()),
    ({"Process Group Ranks": "[4, 3, 2, 1]", "Global rank start": 1, "Global rank stride": 4}, (4, 3, 2, 1)),
])  # fmt: skip
def test_ranks_of_a_group_that_is_recorded_as_a_range(tmp_path, more, ranks):
    """Of long lists, kineto writes the first and the last rank. Recent versions add where the list starts, and its
    step."""
    event = kernel("ncclDevKernel_AllReduce", 10, 5)
    event["args"] |= {"Collective name": "allreduce", "Group size": 4, "Process Group Ranks": "[1, ..., 13]"} | more
    (found,) = read(tmp_path, event).device_events
    assert found.collective is not None and found.collective.ranks == ranks


def test_operators_are_kept_only_where_the_cpu_is_the_device(tmp_path):
    work = [operator("aten::mm", 5, 10), operator("aten::add", 20, 4, thread=2)]
    assert read(tmp_path, *work).operators == [
        HostEvent("aten::mm", 5, 15, HOST), HostEvent("aten::add", 20, 24, ("9", "2")),
    ]  # fmt: skip
    assert read(tmp_path, *work, kernel("gemm", 5, 1)).operators == []


def test_the_machine_and_the_rank(tmp_path):
    groups = [{"pg_name": "0", "ranks": [0, "1"]}, {"ranks": [-1]}]
    trace = read(
        tmp_path, kernel("gemm", 9, 5), CUDA_DEVICE_MAX_CONNECTIONS="1", host_name="h", baseTimeNanoseconds=5_000,
        deviceProperties=[{"numSms": 132, "name": "H800"}, {"numSms": 1}],
        distributedInfo={"rank": 3, "world_size": 8, "pg_config": groups},
    )  # fmt: skip
    assert (trace.rank, trace.world_size, trace.groups) == (3, 8, {"0": (0, 1)})
    assert (trace.num_sms, trace.gpu, trace.base_us, trace.host, trace.queues) == (132, "H800", 5.0, "h", 1)
