"""Two recordings compared: the account of a step twice, whose differences add up."""

import json
from pathlib import Path

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler.account import COMPUTATION, COPY, IDLE, TRANSFER
from moe_dualpipe.tools.profiler.compare import Comparison, read_recording
from moe_dualpipe.tools.profiler.reading.paths import trace_paths
from moe_dualpipe.tools.profiler.reports.comparison import compare_text
from tests.support.faults import FAULTS, run, write_traces
from tests.support.faults.jobs import moe_training
from tests.support.traces import annotation, kernel, launch, write

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


def compare(a, b):
    return Comparison(*(read_recording(str(path), trace_paths([path])) for path in (a, b)))


@pytest.mark.parametrize("lag", [0.0, 300.0])
@pytest.mark.parametrize("named", ["ProfilerStep#{}", "step {}"])
def test_recordings_of_different_lengths_have_the_same_steps(lag, named, tmp_path):
    """A GEMM and attention at once: the moment belongs to the GEMM, which started first."""
    found = compare(record(tmp_path / "a.json", 2, lag=lag, named=named), record(tmp_path / "b.json", 7))
    assert found.by_step and (found.a.steps, found.b.steps) == (2, 7)
    for side in (0, 1):
        idle = sum(us[side] for (kind, _), us in found.account.items() if kind in IDLE)
        assert idle == pytest.approx(10) and found.times_us[side] == pytest.approx(100)
        assert {key: us[side] for key, us in found.account.items() if key[0] not in IDLE} == pytest.approx({
            (COMPUTATION, "GEMM"): 40, (COMPUTATION, "attention"): 10, (COMPUTATION, "elementwise"): 10,
            (TRANSFER, "ncclDevKernel_AllReduce"): 25, (COPY, "Memcpy HtoD"): 5,
        })  # fmt: skip
    assert found.a.hidden_fraction == found.b.hidden_fraction == 15 / 40
    assert "A step takes the same time in A and B, within 0.5%: 100 us and 100 us." in compare_text(found)


def test_without_steps_whole_recordings_are_compared(tmp_path):
    a, b = record(tmp_path / "a.json", 4, named=""), record(tmp_path / "b.json", 2)
    found = compare(a, b)
    assert not found.by_step and found.times_us == (390, 190)  # from the first kernel to the last
    assert "No steps are recorded in A: whole recordings are compared." in compare_text(found)


def test_several_devices_are_averaged(tmp_path, capsys):
    (folder := tmp_path / "ranks").mkdir()
    slower = [(name, start, duration + 20 * (name == ADD), stream) for name, start, duration, stream in STEP]
    record(folder / "rank0.json", 2, distributedInfo={"rank": 0, "world_size": 2})
    record(folder / "rank1.json", 2, slower, 120, distributedInfo={"rank": 1, "world_size": 2})
    b = record(tmp_path / "b.json", 3)
    found = compare(folder, b)
    assert found.difference_us == pytest.approx(-10)
    assert found.account[COMPUTATION, "elementwise"] == pytest.approx((20, 10))
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
    found = compare(*paths)
    assert found.difference_us > 0
    assert sum(b - a for a, b in found.account.values()) == pytest.approx(found.difference_us)
    text = compare_text(found).splitlines()
    rows = [row.replace(",", "").split("|") for row in text if row.startswith(("| - ", "| step"))]
    step, *kinds = (float(row[4]) for row in rows)
    assert sum(kinds) == pytest.approx(step, abs=len(kinds))
    largest = next(row for row in text if "the largest differences" in row)
    details = [float(row.replace(",", "").split("|")[4]) for row in text[text.index(largest) + 2 :] if "|" in row]
    assert sum(details) == pytest.approx(step, abs=len(details)) and max(details, key=abs) == details[0]


def test_a_missing_recording_is_one_line(tmp_path, capsys):
    assert main(["profile", "compare", str(tmp_path / "a.json"), str(Path(__file__))]) == 2
    assert capsys.readouterr().err.count("\n") == 1
