"""Two recordings compared: the account of a step twice, whose differences add up."""

import json
from pathlib import Path

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler.account import COMPUTATION, COPY, IDLE, LAUNCHING, PYTHON, TRANSFER
from moe_dualpipe.tools.profiler.compare import Comparison, Kernels, read_recording
from moe_dualpipe.tools.profiler.reading.paths import trace_paths
from moe_dualpipe.tools.profiler.reports.comparison import compare_text
from tests.support.faults import FAULTS, run, write_traces
from tests.support.faults.jobs import moe_training
from tests.support.traces import annotation, kernel, launch, operator, write

GEMM, ATTENTION, ADD = "ampere_sgemm_128x64_nn", "flash_fwd_kernel", "vectorized_elementwise_kernel"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
STEP = [  # name, start, duration, stream: 10 us idle, 5 us of the copy, 25 of the transfer exposed, 15 hidden
    (GEMM, 10, 40, 7), (ATTENTION, 40, 20, 7), (REDUCE, 45, 40, 8), ("Memcpy HtoD", 85, 5, 7), (ADD, 90, 10, 7),
]  # fmt: skip
GPU = {"deviceProperties": [{"id": 0, "name": "H100", "numSms": 132}]}


def events_of(steps, works=STEP, length=100, lag=0.0, named="ProfilerStep#{}", first=0):
    """Events of equal steps of the host. lag: how much later than its launch a device runs everything."""
    events = []
    for step in range(steps):
        at = step * length
        if named:
            events.append(annotation(named.format(step + first), at, length))
        for name, start, duration, stream in works:
            correlation = len(events) + 1
            category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
            events.append(launch(correlation, at + max(start - 5, 0), duration=1))
            events.append(kernel(name, at + start + lag, duration, stream, correlation, cat=category))
    return events


def record(path, *args, more=GPU, **options):
    return write(path, events_of(*args, **options), **more)


def compare(a, b):
    return Comparison(*(read_recording(str(path), trace_paths([path])) for path in (a, b)))


def times(comparison, side=0):
    """The time of each kind, of computation of each category."""
    found = {}
    for (kind, detail), us in comparison.account.items():
        key = detail if kind == COMPUTATION else kind
        found[key] = found.get(key, 0.0) + us[side]
    return found


def idle(comparison, side=0):
    return sum(us for kind, us in times(comparison, side).items() if kind in IDLE)


def test_the_account_of_a_step_adds_up(tmp_path):
    """A GEMM and attention at once: the moment belongs to the GEMM, which started first. Nothing is in flight in the
    first 10 us; the host launches the GEMM from 5 to 6."""
    found = compare(record(tmp_path / "a.json", 3), record(tmp_path / "b.json", 3))
    sums, _ = found.sums
    assert found.by_step and sums.step_us == 100
    spent = times(found)
    assert idle(found) == 10 and spent[PYTHON] == 5 and spent[LAUNCHING] == 1
    assert {key: us for key, us in spent.items() if key not in IDLE} == {
        "GEMM": 40, "attention": 10, TRANSFER: 25, COPY: 5, "elementwise": 10,
    }  # fmt: skip
    assert (sums.comm_us, sums.hidden_us) == (40, 15)
    assert sums.kernels[ATTENTION] == Kernels(1, 20)


@pytest.mark.parametrize("works", [STEP, STEP[:3]])
@pytest.mark.parametrize("named", ["ProfilerStep#{}", "step {}"])
def test_recordings_of_different_lengths_are_compared_by_step(works, named, tmp_path):
    """The ends of the first and the last step count, too: with three kernels, the host is idle at the end of a step."""
    found = compare(record(tmp_path / "a.json", 1, works, named=named), record(tmp_path / "b.json", 7, works))
    assert (found.a.steps, found.b.steps, found.difference_us) == (1, 7, 0)
    assert {round(b - a, 6) for a, b in found.account.values()} == {0}
    assert "A step takes the same time in A and B, within 0.5%: 100 us and 100 us." in compare_text(found)


def test_a_device_that_runs_behind_its_host(tmp_path):
    """300 us after the launches, the device begins. It ends 300 us after the last step of the host."""
    a = record(tmp_path / "a.json", 4, lag=300.0)
    assert compare(a, a).sums[0].step_us == (400 + 300) / 4  # the time until the first kernel counts
    launched_before = [launch(900, -50), kernel(GEMM, -20, 320, 7, 900)]
    b = write(tmp_path / "b.json", [*launched_before, *events_of(4, lag=300.0)])
    assert compare(b, b).sums[0].step_us == 100  # it was the time of work that was launched before
    c = write(tmp_path / "c.json", [kernel(GEMM, 5, 295), *events_of(4, lag=300.0)])
    assert compare(c, c).sums[0].step_us == 100  # also if the recording began after that launch
    d = write(tmp_path / "d.json", [*events_of(4), kernel(GEMM, 20, 150, 9)])
    assert compare(d, d).sums[0].step_us == 100  # one of many that were not recorded


def test_a_slow_first_step_is_left_out_of_all_ranks(tmp_path, capsys):
    (folder := tmp_path / "ranks").mkdir()
    slow = [annotation("ProfilerStep#4", -1000, 1000), launch(999, -900), kernel(GEMM, -890, 880, 7, 999)]
    a = write(folder / "rank0.json", [*slow, *events_of(3, first=5)], distributedInfo={"rank": 0})
    write(folder / "rank1.json", [launch(999, 1), kernel(ADD, 3, 5, 7, 999), *events_of(4, first=4)],
          distributedInfo={"rank": 1})  # fmt: skip
    b = record(tmp_path / "b.json", 3)
    for one in (a, folder):
        found = compare(one, b)
        assert (found.a.steps, found.difference_us) == (3, 0)
    assert main(["profile", "compare", str(a), str(a)]) == 0
    assert "rank0.json: analyzed: steps 5 to 7, without step 4, which took " in capsys.readouterr().err
    assert main(["profile", "compare", str(a), str(a), "--steps", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["a"]["steps"] == 1


def test_without_steps_whole_recordings_are_compared(tmp_path):
    a, b = record(tmp_path / "a.json", 4, named=""), record(tmp_path / "b.json", 2)
    found = compare(a, b)
    assert not found.by_step and found.difference_us == -200 == -compare(b, a).difference_us
    assert found.sums[0].step_us == 390  # from the first kernel to the last
    assert "No steps are recorded in A: whole recordings are compared." in compare_text(found)


def test_several_devices_are_averaged_and_what_is_unlike_is_said(tmp_path):
    (folder := tmp_path / "ranks").mkdir()
    slower = [(name, start, duration + 20 * (name == ADD), stream) for name, start, duration, stream in STEP]
    record(folder / "rank0.json", 2, more={**GPU, "distributedInfo": {"rank": 0, "world_size": 2}})
    record(folder / "rank1.json", 2, slower, 120, more={**GPU, "distributedInfo": {"rank": 1, "world_size": 2}})
    other = {"deviceProperties": [{"id": 0, "name": "A100"}], "distributedInfo": {"rank": 0, "world_size": 8}}
    found = compare(folder, record(tmp_path / "b.json", 2, more=other))
    assert found.difference_us == -10 and times(found)["elementwise"] == 20
    assert found.unlike == [
        "Different GPUs: H100 in A, A100 in B.", "A has 2 and B has 1 devices: all numbers are means over devices.",
        "The job of A has 2 ranks, that of B 8.",
    ]  # fmt: skip


def test_operators_of_a_cpu(tmp_path):
    events = [event for i in range(3) for event in (
        annotation(f"ProfilerStep#{i}", 100 * i, 100), operator("aten::mm", 100 * i, 60))]  # fmt: skip
    found = compare(*[write(tmp_path / "a.json", events)] * 2)
    assert found.a.on_cpu and times(found)["GEMM"] == 60
    assert "| operator" in compare_text(found) and "A: " in compare_text(found)


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
    start = next(i for i, row in enumerate(text) if "the largest differences" in row) + 2
    details = [float(row.replace(",", "").split("|")[4]) for row in text[start : text.index("", start)]]
    assert sum(details) == pytest.approx(step, abs=len(details))


def test_the_json(tmp_path, capsys):
    a, b = str(record(tmp_path / "a.json", 3)), str(record(tmp_path / "b.json", 3, STEP[:-1]))
    assert main(["profile", "compare", a, b, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {*found} == {"by_step", "a", "b", "difference_us", "unlike", "account", "kernels"}
    assert sum(row["difference_us"] for row in found["account"]) == pytest.approx(found["difference_us"])
    [add] = [one for one in found["kernels"] if one["name"] == ADD]
    assert add == {"name": ADD, "a": {"count": 1, "total_us": 10}, "b": {"count": 0, "total_us": 0}}


def test_a_missing_recording_is_one_line(tmp_path, capsys):
    assert main(["profile", "compare", str(tmp_path / "a.json"), str(Path(__file__))]) == 2
    assert capsys.readouterr().err.count("\n") == 1
