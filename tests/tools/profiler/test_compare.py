"""Two recordings compared: where the time of a step went, what explains the difference, and the causes."""

import json
import re
from pathlib import Path

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler.compare import Comparison
from moe_dualpipe.tools.profiler.reading.paths import trace_paths
from moe_dualpipe.tools.profiler.recordings import Work, read_recording
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


def events_of(steps, works=STEP, length=100, lag=0.0, named="ProfilerStep#{}", device=0, first=0):
    """Events of `steps` equal steps of the host. lag: how much later than its launch a device runs everything."""
    events = []
    for step in range(steps):
        at = step * length
        if named:
            events.append(annotation(named.format(step + first), at, length))
        for name, start, duration, stream in works:
            correlation = len(events) + 1
            begin = at + max(start - 5, 0)
            category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
            events.append(launch(correlation, begin, duration=1))
            events.append(kernel(name, at + start + lag, duration, stream, correlation, device, cat=category))
    return events


def record(path, *args, **options):
    more = options.pop("more", GPU)
    return write(path, events_of(*args, **options), **more)


def compare(a, b):
    return Comparison(*(read_recording(str(path), trace_paths([path])) for path in (a, b)))


def step_us(comparison, side=0):
    return {part.name: (part.a, part.b)[side].step_us for part in comparison.parts}


def test_the_work_of_a_step_adds_up(tmp_path):
    """A GEMM and attention at once: the moment belongs to the GEMM, which started first. Nothing is in flight in the
    first 10 us; the host launches the GEMM from 5 to 6."""
    found = compare(record(tmp_path / "a.json", 3), record(tmp_path / "b.json", 3))
    sums, _ = found.sums
    assert found.by_step and sums.step_us == 100
    assert step_us(found) == {
        "GEMM": 40, "attention": 10, "communication": 25, "copy": 5, "elementwise": 10, "not launched": 6, "idle": 4,
    }  # fmt: skip
    assert sum(step_us(found).values()) == sums.step_us
    parts = {part.name: part.a for part in found.parts}
    assert (parts["attention"].count, parts["attention"].total_us) == (1, 20)
    assert (sums.comm_us, sums.hidden_us) == (40, 15)
    assert [(one.name, one.a) for one in found.transfers] == [("all_reduce", Work(1, 40, 25))]


def test_recordings_of_different_lengths_are_compared_by_step(tmp_path):
    found = compare(record(tmp_path / "a.json", 2), record(tmp_path / "b.json", 7))
    assert (found.a.steps, found.b.steps, found.difference_us) == (2, 7, 0)
    assert {part.us for part in found.parts} == {0}
    assert "A step takes the same time in A and B, within 0.5%: 100 us and 100 us." in compare_text(found)


def test_the_ends_of_the_first_and_the_last_step_count_too(tmp_path):
    """The host launches nothing in the last 15 us of a step and until the 6th us of the next one."""
    found = compare(record(tmp_path / "a.json", 1, STEP[:3]), record(tmp_path / "b.json", 5, STEP[:3]))
    assert step_us(found, 0)["not launched"] == 21 and step_us(found, 0)["idle"] == 4
    assert {part.us for part in found.parts} == {0}


def test_a_device_that_runs_behind_its_host(tmp_path):
    """300 us after the launches, the device begins. It ends 300 us after the last step of the host."""
    a = record(tmp_path / "a.json", 4, lag=300.0)
    found = compare(a, a)
    start_up = [annotation("ProfilerStep#9", -100, 100)]
    launched_before = [launch(900, -50), kernel(GEMM, -20, 320, 7, 900)]
    b = write(tmp_path / "b.json", [*start_up[:0], *launched_before, *events_of(4, lag=300.0)])
    assert found.sums[0].step_us == (400 + 300) / 4  # the time until the first kernel counts
    assert compare(b, b).sums[0].step_us == 100  # it was the time of work that was launched before
    assert step_us(compare(b, b))["idle"] == 10  # all was launched long before
    c = write(tmp_path / "unrecorded.json", [kernel(GEMM, 5, 295), *events_of(4, lag=300.0)])
    assert compare(c, c).sums[0].step_us == 100  # also if the recording began after that launch
    d = write(tmp_path / "without.json", [*events_of(4), kernel(GEMM, 20, 150, 9)])
    assert compare(d, d).sums[0].step_us == 400 / 4  # one of many that were not recorded
    assert step_us(compare(record(tmp_path / "c.json", 4), a))["not launched"] == 6


def test_a_slow_first_step_is_left_out(tmp_path, capsys):
    slow = [annotation("ProfilerStep#4", -1000, 1000), launch(999, -900), kernel(GEMM, -890, 880, 7, 999)]
    a = write(tmp_path / "a.json", [*slow, *events_of(3, first=5)])
    found = compare(a, record(tmp_path / "b.json", 3))
    assert (found.a.steps, found.difference_us, found.a.whole.step_us) == (3, 0, 890 + 300)
    assert {(part.us, part.b.count - part.a.count) for part in found.parts} == {(0, 0)}
    assert main(["profile", "compare", str(a), str(a)]) == 0
    assert "a.json: analyzed: steps 5 to 7, without step 4, which took " in capsys.readouterr().err
    assert main(["profile", "compare", str(a), str(a), "--steps", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["a"]["steps"] == 1
    two = compare(write(tmp_path / "c.json", [*slow, *events_of(1, first=5)]), a)
    assert two.a.steps == 2  # which of two is the slow one is not known


def test_steps_of_this_project_count_too(tmp_path):
    found = compare(record(tmp_path / "a.json", 4, named="step {}"), record(tmp_path / "b.json", 2))
    assert found.by_step and found.a.steps == 4 and found.difference_us == 0


def test_without_steps_whole_recordings_are_compared(tmp_path):
    a, b = record(tmp_path / "a.json", 4, named=""), record(tmp_path / "b.json", 2)
    found = compare(a, b)
    assert not found.by_step and found.difference_us == -200
    assert found.sums[0].step_us == 390  # from the first kernel to the last
    text = compare_text(found)
    assert "No steps are recorded in A: whole recordings are compared." in text
    assert not compare(b, a).by_step and compare(b, a).difference_us == 200


def test_all_ranks_leave_out_the_same_steps(tmp_path):
    """Only the first step of rank 0 is slow. That of rank 1 has more work."""
    (folder := tmp_path / "ranks").mkdir()
    slow = [annotation("ProfilerStep#4", -1000, 1000), launch(999, -900), kernel(GEMM, -890, 880, 7, 999)]
    write(folder / "rank0.json", [*slow, *events_of(3, first=5)], distributedInfo={"rank": 0})
    more = [launch(999, 1), kernel(ADD, 3, 5, 7, 999)]
    write(folder / "rank1.json", [*more, *events_of(4, first=4)], distributedInfo={"rank": 1})
    found = compare(folder, record(tmp_path / "b.json", 3))
    assert found.a.steps == 3
    assert {(part.us, part.a.count == part.b.count) for part in found.parts} == {(0, True)}


def test_several_devices_are_averaged(tmp_path):
    (folder := tmp_path / "ranks").mkdir()
    (mixed := tmp_path / "mixed").mkdir()
    record(mixed / "rank0.json", 2)
    record(mixed / "rank1.json", 2, named="")
    assert compare(mixed, mixed).a.steps == 0 and not compare(mixed, mixed).by_step
    slower = [(name, start, duration + 20 * (name == ADD), stream) for name, start, duration, stream in STEP]
    record(folder / "rank0.json", 2, more={**GPU, "distributedInfo": {"rank": 0, "world_size": 2}})
    record(folder / "rank1.json", 3, slower, length=120, more={**GPU, "distributedInfo": {"rank": 1, "world_size": 2}})
    found = compare(record(tmp_path / "a.json", 2), folder)
    assert (found.b.devices, found.b.steps, found.difference_us) == (2, 2, pytest.approx(10))
    assert step_us(found, 1)["elementwise"] == pytest.approx(20)
    assert "A has 1 and B has 2 devices: all numbers are means over devices." in compare_text(found)


def test_what_explains_the_difference_comes_first(tmp_path):
    """The GEMM is 60 us longer, three additions replace one, attention is gone."""
    works = [(GEMM, 10, 100, 7), (ADD, 110, 10, 7), (ADD, 120, 10, 7), (ADD, 130, 10, 7), (REDUCE, 45, 40, 8)]
    found = compare(record(tmp_path / "a.json", 2), record(tmp_path / "b.json", 2, works, length=140))
    assert found.difference_us == 40
    assert [(part.name, part.us) for part in found.parts[:3]] == [
        ("GEMM", 60), ("communication", -25), ("elementwise", 20),
    ]  # fmt: skip
    lines = compare_text(found).splitlines()
    assert "A step of B takes 40 us more (40.0%) than of A: 140 us instead of 100 us." in lines
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| - ")]
    assert rows[:5] == ["- GEMM", "- exposed communication", "- elementwise", "- attention", "- copies"]
    back = Comparison(found.b, found.a)
    assert [part.us for part in back.parts] == [-part.us for part in found.parts]


def test_operators_of_a_cpu(tmp_path):
    files = []
    for count in (1, 3):
        work = [operator("aten::mm", 10 + 20 * n, 20) for n in range(count)]
        files.append(write(tmp_path / f"{count}.json", [annotation("ProfilerStep#0", 0, 100), *work], **GPU))
    text = compare_text(compare(*files))
    assert "1 device (CPU), 1 step" in text  # the GPU of the machine did nothing
    assert re.search(r"- GEMM +\| +20 \| +60 \| +\+40 \| \+200.0% \| +1 \| +3 \|", text)
    assert "operators in A" in text and "kernel" not in text and "not launched" not in text


def test_steps_that_take_the_same_time(tmp_path):
    """20 us move from GEMM to attention."""
    a = [(GEMM, 0, 40, 7), (ATTENTION, 40, 20, 7), (ADD, 90, 10, 7)]
    b = [(GEMM, 0, 20, 7), (ATTENTION, 20, 40, 7), (ADD, 90, 10.3, 7)]
    text = compare_text(compare(record(tmp_path / "a.json", 2, a), record(tmp_path / "b.json", 2, b)))
    assert "A step takes the same time in A and B, within 0.5%" in text
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| - ")][:2] == [
        "- GEMM", "- attention",
    ]  # fmt: skip


def test_transfers_of_an_unknown_kind_are_named_after_their_function(tmp_path):
    """Two of its instances are one row. What no step contains has no row."""
    works = [(GEMM, 10, 40, 7), *((f"void deep_ep::intranode::dispatch<{i}>(int*)", 20, 9, 20 + i) for i in (8, 9))]
    early = kernel("void deep_ep::intranode::combine<1>(int*)", 0, 5, 9)
    a = write(tmp_path / "a.json", [early, *events_of(3, works, first=1)])
    found = compare(a, a)
    assert [(one.name, one.a.count) for one in found.transfers] == [("deep_ep::intranode::dispatch", 2)]
    assert "combine" not in compare_text(found)


def test_recordings_of_other_machines_and_models_are_named(tmp_path):
    job = {"distributedInfo": {"rank": 0, "world_size": 8}}
    a = record(tmp_path / "a.json", 2, more={**GPU, **job})
    v100 = {"deviceProperties": [{"id": 0, "name": "V100\x1b[31m"}], "distributedInfo": {"rank": 0, "world_size": 2}}
    other = [("volta_sgemm_32x128_nn", 0, 90, 7), (ADD, 90, 10, 7)]
    found = compare(a, record(tmp_path / "b.json", 2, other, more=v100))
    assert found.unlike == [
        "Different GPUs: H100 in A, V100\x1b[31m in B.", "The job of A has 8 ranks, that of B 2.",
    ]  # fmt: skip
    assert "\x1b" not in compare_text(found) and "V100" in compare_text(found)
    assert compare(a, a).unlike == []


def test_the_command_prints_text_or_json(tmp_path, capsys):
    a, b = record(tmp_path / "a.json", 2), record(tmp_path / "b.json", 2, STEP[:3], length=90)
    assert main(["profile", "compare", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert text == compare_text(compare(a, b)) + "\n"
    assert main(["profile", "compare", str(a), str(b), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {*found} == {"by_step", "a", "b", "difference_us", "unlike", "parts", "transfers"}
    assert found["a"] == {
        "name": str(a), "devices": 1, "gpus": ["H100"], "world_size": None, "steps": 2, "step_us": 100.0,
        "comm_us": 40.0, "hidden_kernels_us": 15.0,
    }  # fmt: skip
    assert found["difference_us"] == sum(part["difference_us"] for part in found["parts"]) == -10
    (attention,) = (part for part in found["parts"] if part["name"] == "attention")
    assert attention["a"] == {"count": 1.0, "total_us": 20.0, "step_us": 10.0}
    assert [one["name"] for one in attention["kernels"]] == [ATTENTION]


def test_names_decide_what_communicates(tmp_path, capsys):
    a = record(tmp_path / "a.json", 2)
    for options, expected in ((["--comm", "flash"], 80), (["--compute", "nccl"], 0)):
        assert main(["profile", "compare", str(a), str(a), "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["a"]["comm_us"] == min(expected, 45)


def test_bad_input_is_one_line(tmp_path, capsys):
    a = record(tmp_path / "a.json", 2)
    (bad := tmp_path / "bad.json").write_text("{}")
    (empty := tmp_path / "empty").mkdir()
    cases = {
        (a, tmp_path / "missing.json"): "missing.json", (bad, a): "bad.json", (a, empty): "no trace in this folder",
        (a,): "error: missing B",
           (a, a, "--comm", "("): "--comm",
    }  # fmt: skip
    for arguments, message in cases.items():
        assert main(["profile", "compare", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert not out and message in err and err.count("\n") == 1, (arguments, err)


def test_damage_is_told(tmp_path, capsys):
    a = record(tmp_path / "a.json", 2)
    (cut := tmp_path / "cut.json").write_text(a.read_text()[:-150])
    assert main(["profile", "compare", str(a), str(cut)]) == 0
    assert "cut.json: the file is incomplete: " in capsys.readouterr().err
    (odd := tmp_path / "odd.json").write_text(a.read_text().replace('"dur": 40', '"dur": inf', 1))
    assert main(["profile", "compare", str(a), str(odd)]) == 0
    assert "odd.json: 1 damaged event skipped" in capsys.readouterr().err


def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_traces(run(FAULTS["slow host"].apply(moe_training(), 2)), tmp_path / "before")
    write_traces(run(moe_training()), tmp_path / "after")
    assert main(["profile", "compare", "before", "after"]) == 0
    printed = capsys.readouterr().out
    page = (Path(__file__).parents[3] / "docs" / "profiling.md").read_text()
    assert f"$ moe-dualpipe profile compare before after\n{printed}" in page
