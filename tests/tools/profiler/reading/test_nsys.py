"""Exports of Nsight Systems are read like traces of torch.profiler; what a version does not have is not recorded."""

import json
import sqlite3
from contextlib import closing

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler import NAMES, TraceError, analyze, read_trace, read_traces
from moe_dualpipe.tools.profiler.host import as_device
from tests.support import traces
from tests.support.nsys_files import (
    DOMAIN,
    GRAPH,
    KERNEL,
    MEMCPY,
    RANGES,
    RUNTIME,
    call,
    copy,
    kernel,
    nvtx,
    write_export,
)

GEMM, ALL_REDUCE = "void gemm<float>(float*)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"


def read(path, **tables):
    [trace] = read_ranks(path, **tables)
    return trace


def read_ranks(path, **tables):
    return read_traces(write_export(path / "report.sqlite", **tables))


def test_a_recording_gives_the_same_numbers_in_both_formats(tmp_path, capsys):
    work = [(GEMM, 5_000, 15_000, 3, 7), (ALL_REDUCE, 12_000, 30_500, 4, 9), (GEMM, 40_000, 44_000, 5, 7)]
    calls = [("cudaLaunchKernel_v7000", 1_000, 2_000, 3), ("cudaLaunchKernelExC_v11060", 3_000, 4_000, 4),
             ("cudaStreamSynchronize_v3020", 20_000, 35_000, 6), ("cuLaunchKernel", 36_000, 39_000, 5)]  # fmt: skip
    export = write_export(
        tmp_path / "report.sqlite",
        **{KERNEL: [kernel(name, start, end, number, stream=stream) for name, start, end, number, stream in work],
           MEMCPY: [copy(45_000, 46_500, 8, srcKind=2, dstKind=2, size=0),
                    copy(47_000, 48_000, 8, srcDeviceId=0, dstDeviceId=1, size=0)],
           RUNTIME: [call(*one) for one in calls],
           RANGES: [nvtx("forward", 500, 5_000), nvtx("optimizer", 35_500, 40_000, registered=True)]},
    )  # fmt: skip
    events = [
        *(traces.kernel(name, start / 1e3, (end - start) / 1e3, stream, number, grid=(2, 3, 1))
          for name, start, end, number, stream in work),
        *(traces.launch(number, start / 1e3, 1, name.partition("_")[0], (end - start) / 1e3)
          for name, start, end, number in calls),
        traces.kernel("Memcpy DtoD (Device -> Device)", 45, 1.5, cat="gpu_memcpy"),
        traces.kernel("Memcpy PtoP", 47, 1, cat="gpu_memcpy"),
        traces.annotation("forward", 0.5, 4.5), traces.annotation("optimizer", 35.5, 4.5),
    ]  # fmt: skip
    chrome = traces.write(tmp_path / "trace.json", events)
    assert analyze(read_trace(export)) == analyze(read_trace(chrome))
    assert main(["profile", "analyze", str(export), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kernel_compute_us"], found["comm_us"], found["exposed_comm_us"]) == (14.0, 19.5, 16.5)
    assert [phase["name"] for phase in found["phases"]] == ["forward", "optimizer"]


def test_processes_have_their_own_correlation_ids(tmp_path):
    """Two ranks in one file: the same ids mean different calls."""
    tables = {
        KERNEL: [kernel("a", 10, 11, 6, device=0, pid=100), kernel("a", 11, 12, 5, device=0, pid=100),
                 kernel("b", 20, 21, 5, device=1, pid=70_000)],
        RUNTIME: [call("cudaLaunchKernel", 2_000, 3_000, 5, 70_000, 2), call("cudaLaunchKernel", 0, 1, 5, 100, 1),
                  call("cudaLaunchKernel", 1_000, 2_000, 6, 100, 1)],
        RANGES: [nvtx("first", 500, 5_000, 100, 1), nvtx("second", 500, 5_000, 70_000, 2)],
        "META_DATA_CAPTURE": [{"name": "PROCESS_0:ENVIRONMENT_VARIABLE", "value": 'RANK="0"'}],
    }  # fmt: skip
    every = read_ranks(tmp_path, **tables)
    assert [(trace.label, trace.rank) for trace in every] == [("process 100", None), ("process 70000", None)]
    places = [(e.device, e.phase) for trace in every for e in as_device(trace, NAMES).device_events]
    assert places == [("0", "first"), ("0", ""), ("1", "second")]
    calls = [trace.launches[e.correlation or 0] for trace in every for e in trace.device_events]
    assert [(one.start, one.thread[1]) for one in calls] == [(1.0, "1"), (0.0, "1"), (2.0, "2")]
    with pytest.raises(
        TraceError, match=r"holds the traces of 2 ranks \(process 100, process 70000\): use read_traces"
    ):
        read_trace(tmp_path / "report.sqlite")


def test_processes_that_call_their_gpu_0(tmp_path):
    """With CUDA_VISIBLE_DEVICES, each process has a device 0. Which GPU that is, a table says, if it was exported."""
    kernels = {KERNEL: [kernel("a", 0, 9_000, pid=100), kernel(ALL_REDUCE, 5_000, 9_000, pid=200)]}
    gpus = [{"gpuId": 3, "cudaId": 0, "pid": 100, "numMultiprocessors": 132}, {"gpuId": 2, "cudaId": 0, "pid": 200}]
    for number, (tables, devices) in enumerate([({"TARGET_INFO_CUDA_DEVICE": gpus}, ["3", "2"]), ({}, ["0", "0"])]):
        (folder := tmp_path / str(number)).mkdir()
        one, other = read_ranks(folder, **kernels, **tables)
        assert [event.device for trace in (one, other) for event in trace.device_events] == devices
        assert one.num_sms == (132 if tables else 0) and analyze(other)[0].hidden_fraction == 0


def test_an_export_with_almost_no_columns(tmp_path):
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.execute(f'CREATE TABLE {KERNEL} (start, "end", deviceId, streamId, demangledName)')
        rows = "(1000, 3000, 0, 7, 1), (4000, 5000, 0, 7, 2), (8000, 9000, 0, 7, 4)"
        file.execute(f"INSERT INTO {KERNEL} VALUES {rows}")
        file.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        file.execute("INSERT INTO StringIds VALUES (1, CAST(X'61FF62' AS TEXT)), (4, NULL)")
        file.commit()
    trace = read_trace(path)
    assert [(e.name, e.start, e.end, e.correlation) for e in trace.device_events] == [
        ("a\ufffdb", 1.0, 3.0, None), ("unnamed kernel", 4.0, 5.0, None), ("unnamed kernel", 8.0, 9.0, None),
    ]  # fmt: skip


def test_ranges(tmp_path):
    """A kernel says only that it sends and receives: the range around its launch names it."""
    ranges = [
        nvtx("train_step", 0, 1_000), nvtx("ProfilerStep#4", 0, 900), nvtx("aten::linear, seq = 3, op_id = 8", 10, 100),
        nvtx("nccl:all_to_all, op_id = 12", 220, 280), nvtx("cublasLtMatmul", 330, 340, domain=5),
        nvtx("mine", 350, 360, domain=6), nvtx("never ended", 370, None),
        nvtx("cuBLASLt", 0, None, domain=5, kind=DOMAIN), nvtx("MyLibrary", 0, None, domain=6, kind=DOMAIN),
        nvtx("cuBLAS", 355, None, domain=6, kind=34),
    ]  # fmt: skip
    sends = [kernel("ncclDevKernel_SendRecv(x)", 400, 900, 1), kernel("ncclDevKernel_SendRecv(x)", 900, 990, 2)]
    calls = [call("cudaLaunchKernel", 240, 245, 1), call("cudaLaunchKernel", 600, 605, 2)]
    trace = read(tmp_path, **{KERNEL: sends, RUNTIME: calls, RANGES: ranges})
    assert [e.name for e in trace.annotations] == ["train_step", "mine"] and trace.skipped == 0
    assert [e.name for e in trace.steps] == ["ProfilerStep#4"]
    assert [e.collective and e.collective.name for e in trace.device_events] == ["all_to_all", None]


def test_graphs_that_were_recorded_as_a_whole(tmp_path, capsys):
    path = write_export(tmp_path / "a.sqlite", **{GRAPH: [{**kernel("", 0, 9_000, 3), "graphId": 12}]})
    assert [e.name for e in read_trace(path).device_events] == ["CUDA graph 12"]
    assert main(["profile", "analyze", str(path)]) == 0
    assert "record with --cuda-graph-trace=node" in capsys.readouterr().err


def test_the_machine_and_the_rank(tmp_path):
    environment = ['RANK="3"', 'WORLD_SIZE="16"', 'CUDA_DEVICE_MAX_CONNECTIONS="1"', 'RANK="9"', "PATH"]
    trace = read(
        tmp_path, **{KERNEL: [kernel("a", 10, 20)]},
        META_DATA_CAPTURE=[{"name": "PROCESS_0:ENVIRONMENT_VARIABLE", "value": value} for value in environment],
        TARGET_INFO_SESSION_START_TIME=[{"utcEpochNs": 5_000}], TARGET_INFO_GPU=[{"smCount": 132}],
        TARGET_INFO_SYSTEM_ENV=[{"name": "Hostname", "value": "node7"}, {"name": "CPU", "value": "x"}],
    )  # fmt: skip
    assert (trace.rank, trace.world_size, trace.queues) == (3, 16, 1)
    assert (trace.base_us, trace.num_sms, trace.host) == (5.0, 132, "node7")


@pytest.mark.parametrize("content,message", [
    ({}, "not a usable SQLite file"),
    ({RUNTIME: [call("cudaLaunchKernel", 0, 1, 1)]}, "recorded no work on a GPU: run it with --trace=cuda,nvtx"),
])  # fmt: skip
def test_what_is_not_an_export_with_work(tmp_path, capsys, content, message):
    path = tmp_path / "a.sqlite"
    if content:
        write_export(path, **content)
    else:
        write_export(path, **{KERNEL: [kernel("a" * 500, i, i + 1) for i in range(300)]})
        path.write_bytes(path.read_bytes()[:6000])
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    assert main(["profile", "analyze", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
