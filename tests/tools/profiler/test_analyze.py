"""Analyses of constructed traces and of DeepSeek's published trace; the report of a device; two recordings compared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler import analyze, read_trace
from moe_dualpipe.tools.profiler.account import COMPUTATION, COPY, IDLE, KINDS, LOST, TRANSFER, Total
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.reading import trace_paths
from moe_dualpipe.tools.profiler.report import (
    HEALTHY,
    account_rows,
    analysis_text,
    compare,
    comparison_text,
    verdicts_text,
)
from tests.support.faults import FAULTS, run, write_traces
from tests.support.faults.jobs import moe_training
from tests.support.traces import annotation, kernel, launch, write

PUBLISHED = Path(__file__).parents[4] / "shared" / "data" / "deepseek_v3_train_trace.json.gz"


def analysis_of(tmp_path, events, **options):
    (analysis,) = analyze(read_trace(write(tmp_path / "trace.json", events)), **options)
    return analysis


# ---- Constructed traces ----


def test_overlapping_events_count_once(tmp_path):
    """Computation at 0-40 (nested, adjacent and parallel) and 70-82; communication at 30-60 (parallel) and 75-90."""
    a = analysis_of(tmp_path, [
        kernel("gemm", 1000, 30), kernel("gemm", 1005, 10, stream=8), kernel("norm", 1030, 10),
        kernel("empty", 1050, 0), kernel("gemm", 1070, 10),
        kernel("ncclDevKernel_SendRecv", 1030, 30, stream=20, grid=(24, 1, 1)),
        kernel("void deep_ep::internode::combine<1>", 1035, 20, stream=21, grid=(4, 5, 1)),
        kernel("Memset (Device)", 1078, 4, cat="gpu_memset"), kernel("nvshmem_barrier", 1075, 15, stream=20),
    ])  # fmt: skip
    assert a.window_us == 90
    assert a.idle_us == 10
    assert a.compute_us == 40 + 12  # the memset ends 2 us after the last kernel
    assert a.kernel_compute_us == 40 + 10
    assert a.time_of("copies") == 2
    assert a.comm_us == 30 + 15
    assert a.exposed_comm_us == 20 + 8
    assert a.hidden_kernels_us == 10 + 5
    assert a.hidden_fraction == 15 / 45
    assert (a.num_comm, a.comm_blocks, a.copy_engine_us) == (3, 24, 0)
    assert "copy engine" not in analysis_text(a)


def copy(name, start, duration, correlation=None, **arguments):
    event = kernel(name, start, duration, stream=20, correlation=correlation, cat="gpu_memcpy")
    return event | {"args": event["args"] | arguments}


def test_copies_to_other_devices_are_communication_on_copy_engines(tmp_path):
    """A dispatch copies at 10-30, of which computation hides 10; a combine at 50-65, an unnamed peer at 70-80."""
    inside = [annotation("dispatch(F)", 0, 5), annotation("combine(F)", 6, 4), annotation("prepare dispatch(F)", 12, 4),
              annotation("mlp(F)", 17, 8)]  # fmt: skip
    launches = [launch(number, at) for number, at in enumerate((1, 2, 7, 13, 18, 3, 19), 1)]
    local, down = "Memcpy DtoD (Device -> Device)", "Memcpy DtoH (Device -> Pinned)"
    a = analysis_of(tmp_path, [
        *inside, *launches, kernel("gemm", 0, 20, correlation=7), copy(local, 10, 10, 1), copy(local, 20, 10, 2),
        copy("CopyDeviceToDevice", 50, 15, 3), copy(local, 70, 10, fromDevice=0, toDevice=3),
        copy(local, 30, 5, 4), copy(local, 35, 5, 5, fromDevice=0, toDevice=0), copy(down, 40, 5, 6),
        kernel("ncclDevKernel_SendRecv", 80, 20, stream=21, grid=(24, 1, 1)),
    ])  # fmt: skip
    assert (a.num_comm, a.comm_us, a.copy_engine_us) == (5, 65, 45)
    assert (a.hidden_kernels_us, a.exposed_comm_us, a.time_of("copies")) == (10, 10 + 15 + 10 + 20, 15)
    exposed = {entry.detail.partition(" before")[0]: entry.us for entry in a.account if "exposed" in entry.kind}
    assert exposed == {"dispatch(F)": 10, "combine(F)": 15, local: 10, "ncclDevKernel_SendRecv": 20}
    assert {phase.name: phase.comm_us for phase in a.phases if phase.comm_us} == {"dispatch(F)": 20, "combine(F)": 15}
    rows = account_rows({"it": a})
    assert ["- on copy engines, with 0 SMs", "45"] in rows and ["- hidden behind computation", "10"] in rows
    assert analysis_text(a).endswith("15.4% of the communication is hidden (5 transfers, on up to 24 thread blocks).")


# ---- DeepSeek's published trace ----

published = pytest.mark.skipif(not PUBLISHED.exists(), reason="DeepSeek's trace is not here")


@published
def test_the_published_trace():
    (a,) = analyze(read_trace(PUBLISHED))
    assert (a.window_us, a.compute_us, a.comm_us) == (129_012, 124_338, 113_440)
    assert (a.exposed_comm_us, a.num_comm, a.hidden_kernels_us) == (4_177, 36, 109_250)
    assert a.hidden_fraction == pytest.approx(0.963, abs=0.0005) and a.copy_engine_us == 0
    per_layer = {p.name: (p.comm_us if "c" in p.name else p.compute_us) / 4000 for p in a.phases}
    assert {name: round(ms, 2) for name, ms in per_layer.items()} == {
        "attn(F)": 4.36, "mlp(B)": 5.31, "mlp(W)": 6.38, "mlp(F)": 4.60, "attn(B)": 9.34, "attn(W)": 2.39,
        "dispatch(F)": 6.69, "dispatch(B)": 7.49, "combine(F)": 8.68, "combine(B)": 5.50,
    }  # fmt: skip


# ---- The command ----


def test_the_command_prints_tables_or_json(tmp_path, capsys):
    events = [annotation("dispatch(F)", 0, 10), annotation("dispatch(F)", 20, 10), launch(1, 5), launch(2, 25),
              kernel("gemm", 10, 30), kernel("ncclX", 30, 20, correlation=1, grid=(8, 1, 1)),
              kernel("ncclX", 50, 10, correlation=2)]  # fmt: skip
    paths = [str(write(tmp_path / f"rank{rank}.json", events)) for rank in range(2)]
    assert main(["profile", "analyze", *paths, "--phases"]) == 0
    expected = analysis_text(analyze(read_trace(paths[0]))[0], phases=True)
    assert capsys.readouterr().out.count(f"{expected}\n\n") == 2
    assert main(["profile", "analyze", *paths, "--json"]) == 0
    found, other = json.loads(capsys.readouterr().out)
    assert [found["trace"], other["trace"]] == paths and found["comm_blocks"] == 8 and found["num_sms"] is None
    assert sum(row["us"] for row in found["account"]) == found["window_us"] == 50
    phase = {"name": "dispatch(F)", "times": 2, "compute_us": 0, "comm_us": 30, "copy_us": 0, "exposed_comm_us": 20}
    assert found["phases"] == [phase]


@pytest.mark.parametrize("options,problem", [
    (["--comm", "("], "--comm '(' is not a regular expression"),
    (["--compute", "[z-a]"], "--compute '[z-a]' is not a regular expression"),
])  # fmt: skip
def test_invalid_options(tmp_path, capsys, options, problem):
    path = write(tmp_path / "trace.json", [kernel("gemm", 0, 1)])
    assert main(["profile", "analyze", str(path), *options]) == 2
    err = capsys.readouterr().err
    assert problem in err and err.count("\n") == 1


# ---- The report of one device: its account adds up, causes are sentences, and what they leave is said ----


@pytest.fixture
def analysis(tmp_path):
    """Computation 0-30 and 75-100, a transfer 20-50, a copy 60-65, and the next launch from 68 to 70."""
    events = [
        annotation("mlp(F)", 66, 10), launch(1, 68, duration=2), launch(2, 52, duration=2), kernel("gemm", 0, 30),
        kernel("nccl", 20, 30, stream=9), kernel("Memcpy DtoH", 60, 5, correlation=2, cat="gpu_memcpy"),
        kernel("gemm", 75, 25, correlation=1),
    ]  # fmt: skip
    (found,) = analyze(read_trace(write(tmp_path / "t.json", events)))
    return found


def test_the_rows_of_the_account_add_up_to_the_window(analysis):
    heading, window, *rows = account_rows({"it": analysis}, details=True)
    assert heading == ["", "it, us", "of the window"] and window == ["window", "100", "100.0%"]
    kinds = {name: float(us) for name, us, _ in rows if name in KINDS}
    assert sum(kinds.values()) == 100
    assert kinds == {
        "computation": 55, "copies": 5, "exposed communication": 20, "idle: queued": 11, "idle: launching": 4,
        "idle: Python": 5,
    }  # fmt: skip
    details = [(name, float(us)) for name, us, _ in rows if name.startswith("- ") and "hidden" not in name]
    assert sum(us for _, us in details) == 45 and ("- nccl before mlp(F)", 20) in details
    assert rows[-2][1:] == ["30", "30.0%"] and rows[-1] == ["- hidden behind computation", "10", "10.0%"]


@given(st.lists(st.tuples(st.sampled_from(LOST), st.integers(1, 40)), max_size=6))
def test_nothing_found_is_never_printed_beside_lost_time(tmp_path_factory, lost):
    """More than 1% of the window without an explanation is printed with its three largest places."""
    (analysis,) = analyze(read_trace(write(tmp_path_factory.mktemp("t") / "t.json", [kernel("gemm", 0, 1000)])))
    left = tuple(sorted((Total(kind, f"place {us}", 1, float(us)) for kind, us in lost), key=lambda one: -one.us))
    text = verdicts_text(replace(analysis, unexplained=left))
    shown = replace(analysis, unexplained=left).as_object()["unexplained"]
    assert shown == [{"kind": one.kind, "detail": one.detail, "times": 1, "us": one.us} for one in left]
    if sum(one.us for one in left) < 10:
        assert text == HEALTHY
    else:
        assert text.startswith("Not explained: ") and all(f"{one.kind}, {one.detail} (" in text for one in left[:3])


# ---- Two recordings compared: the account of a step twice, whose differences add up ----


GEMM, ATTENTION, ADD = "ampere_sgemm_128x64_nn", "flash_fwd_kernel", "vectorized_elementwise_kernel"
STEP = [  # name, start, duration, stream: 10 us idle, 5 us of the copy, 25 of the transfer exposed, 15 hidden
    (GEMM, 10, 40, 7), (ATTENTION, 40, 20, 7), ("ncclDevKernel_AllReduce", 45, 40, 8), ("Memcpy HtoD", 85, 5, 7),
    (ADD, 90, 10, 7),
]  # fmt: skip
GPU = {"deviceProperties": [{"id": 0, "name": "H100", "numSms": 132}]}


def record(path, steps, works=STEP, length=100, lag=0.0, named="ProfilerStep#{}", **more):
    """Write equal steps. lag: how much later than its launch a device runs everything."""
    events = []
    for step in range(steps):
        at = step * length
        events += [annotation(named.format(step), at, length)] if named else []
        for name, start, duration, stream in works:
            correlation = len(events) + 1
            category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
            events.append(launch(correlation, at + max(start - 5, 0), duration=1))
            events.append(kernel(name, at + start + lag, duration, stream, correlation, cat=category))
    return write(path, events, **GPU | more)


def compared(*recordings):
    files = [analyze_files(trace_paths([path]), causes=False) for path in recordings]
    return compare(*([device.analysis for device in one.devices] for one in files))


@pytest.mark.parametrize("lag", [0.0, 300.0])
@pytest.mark.parametrize("named", ["ProfilerStep#{}", "step {}"])
def test_recordings_of_different_lengths_have_the_same_steps(lag, named, tmp_path):
    """A GEMM and attention at once: the moment belongs to the GEMM, which started first."""
    found = compared(record(tmp_path / "a.json", 2, lag=lag, named=named), record(tmp_path / "b.json", 7))
    assert found["by_step"] and (found["a"]["steps"], found["b"]["steps"]) == (2, 7)
    for side in "ab":
        times = {(row["kind"], row["detail"]): row[f"{side}_us"] for row in found["account"]}
        assert sum(us for (kind, _), us in times.items() if kind in IDLE) == pytest.approx(10)
        assert found[side]["step_us"] == pytest.approx(100)
        busy = {key: us for key, us in times.items() if key[0] not in IDLE}
        assert busy == pytest.approx({
            (COMPUTATION, "GEMM"): 40, (COMPUTATION, "attention"): 10, (COMPUTATION, "elementwise"): 10,
            (TRANSFER, "ncclDevKernel_AllReduce"): 25, (COPY, "Memcpy HtoD"): 5,
        })  # fmt: skip
    assert found["a"]["hidden_fraction"] == found["b"]["hidden_fraction"] == 15 / 40
    assert "A step of B takes 0 us less (0.0%) than of A: 100 us instead of 100 us." in comparison_text(found)


def test_without_steps_whole_recordings_are_compared(tmp_path):
    a, b = record(tmp_path / "a.json", 4, named=""), record(tmp_path / "b.json", 2)
    found = compared(a, b)
    assert not found["by_step"] and (found["a"]["step_us"], found["b"]["step_us"]) == (
        390,
        190,
    )  # from the first kernel to the last
    assert "No steps are recorded in A: whole recordings are compared." in comparison_text(found)


def test_several_devices_are_averaged(tmp_path, capsys):
    (folder := tmp_path / "ranks").mkdir()
    slower = [(name, start, duration + 20 * (name == ADD), stream) for name, start, duration, stream in STEP]
    record(folder / "rank0.json", 2, distributedInfo={"rank": 0, "world_size": 2})
    record(folder / "rank1.json", 2, slower, 120, distributedInfo={"rank": 1, "world_size": 2})
    b = record(tmp_path / "b.json", 3)
    found = compared(folder, b)
    assert found["difference_us"] == pytest.approx(-10)
    (added,) = (row for row in found["account"] if (row["kind"], row["detail"]) == (COMPUTATION, "elementwise"))
    assert (added["a_us"], added["b_us"]) == pytest.approx((20, 10))
    assert main(["profile", "compare", str(folder), str(b), "--steps", "1:", "--json"]) == 0
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert shown["b"]["steps"] == 2 and f"{b}: analyzed: steps 1 to 2 of steps 0 to 2" in err
    assert sum(row["difference_us"] for row in shown["account"]) == pytest.approx(shown["difference_us"])


@pytest.mark.parametrize("fault", ["slow host", "slow link", "copies"])
def test_the_difference_of_a_known_fault_adds_up(fault, tmp_path):
    healthy = moe_training(layers=3)
    paths = [tmp_path / "before", tmp_path / "after"]
    for job, folder in zip((healthy, FAULTS[fault].apply(healthy, 2)), paths, strict=True):
        write_traces(run(job), folder)
    found = compared(*paths)
    assert found["difference_us"] > 0
    assert sum(row["difference_us"] for row in found["account"]) == pytest.approx(found["difference_us"])
    text = comparison_text(found).splitlines()
    rows = [row.replace(",", "").split("|") for row in text if row.startswith(("| - ", "| step"))]
    step, *kinds = (float(row[4]) for row in rows)
    assert sum(kinds) == pytest.approx(step, abs=len(kinds))
    largest = next(row for row in text if "the largest differences" in row)
    details = [float(row.replace(",", "").split("|")[4]) for row in text[text.index(largest) + 2 :] if "|" in row]
    assert sum(details) == pytest.approx(step, abs=len(details)) and max(details, key=abs) == details[0]


def test_a_missing_recording_is_one_line(tmp_path, capsys):
    assert main(["profile", "compare", str(tmp_path / "a.json"), str(Path(__file__))]) == 2
    assert capsys.readouterr().err.count("\n") == 1
