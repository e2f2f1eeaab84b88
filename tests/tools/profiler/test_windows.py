"""Steps of a recording: which work belongs to which, what is left out, and what device work is named after."""

from math import inf

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler import NAMES, analyze, read_trace
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.host import as_device
from moe_dualpipe.tools.profiler.windows import parse_steps, window_of
from tests.support.traces import annotation, kernel, launch, write

STEP = "ProfilerStep#"
GEMM, ALL_REDUCE = "gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def steps_on_host(numbers, length=100, name=STEP, first=100):
    return [annotation(f"{name}{n}", first + i * length, length) for i, n in enumerate(numbers)]


def lagging(starts, lengths, behind=1000, first=100, length=100):
    """One GEMM per step, launched at the start of the step, at `behind` + `starts` on the device."""
    return [
        event
        for i, (start, duration) in enumerate(zip(starts, lengths, strict=True))
        for event in (launch(i, first + i * length + 1), kernel("gemm", behind + start, duration, correlation=i))
    ]


def window(tmp_path, events, choice="default"):
    trace = as_device(read_trace(write(tmp_path / "t.json", events)), NAMES)
    return window_of(trace, choice)


def names_in(found):
    return [event.name for event in found.trace.device_events]


def test_a_step_lasts_from_its_first_computation_to_that_of_the_next(tmp_path):
    """The host runs ahead: when the first step starts on the device, it has long launched all of them."""
    found = window(tmp_path, [*steps_on_host([5, 6, 7]), *lagging([0, 50, 90], [40, 30, 35])])
    assert [(s.number, s.start) for s in found.steps] == [(5, 1000), (6, 1050), (7, 1090)]
    assert [s.end for s in found.steps] == [1050, 1090, inf]
    assert found.left_out == ""


def test_transfers_belong_to_the_step_that_launched_them_and_copies_to_that_in_which_they_run(tmp_path):
    events = [
        *steps_on_host([0, 1, 2]), *lagging([0, 100, 200], [90, 90, 90]),
        launch(10, 150), kernel(ALL_REDUCE, 1095, 20, 9, 10),  # of step 0, and runs into step 1
        launch(11, 215), kernel(ALL_REDUCE, 1080, 10, 9, 11),  # of step 1, and starts in step 0
        launch(12, 310), kernel("Memcpy HtoD", 1010, 5, 11, 12, cat="gpu_memcpy"),  # for step 2, during step 0
    ]  # fmt: skip
    assert names_in(window(tmp_path, events, range(1))) == ["gemm", ALL_REDUCE, "Memcpy HtoD"]
    second = window(tmp_path, events, range(1, 2))
    assert names_in(second) == ["gemm", ALL_REDUCE]
    assert names_in(window(tmp_path, events, range(2, 3))) == ["gemm"]
    assert second.left_out == "analyzed: step 1 of steps 0 to 2"


def test_early_work_on_a_side_stream_does_not_start_a_step(tmp_path):
    events = [*steps_on_host([0, 1]), *lagging([0, 50], [40, 30]), launch(9, 210), kernel("cast", 1005, 10, 11, 9)]
    found = window(tmp_path, events)
    assert [(s.number, s.start) for s in found.steps] == [(0, 1000), (1, 1050)]


def test_what_is_outside_of_steps_is_left_out(tmp_path):
    events = [
        *steps_on_host([3, 4]), *lagging([0, 50], [40, 40]),
        launch(7, 20), kernel("early", 900, 30, correlation=7), kernel("unknown", 950, 20),
        launch(8, 305), kernel("late", 1200, 30, correlation=8), launch(9, 306), kernel(ALL_REDUCE, 1100, 9, 9, 9),
    ]  # fmt: skip
    found = window(tmp_path, events)
    assert names_in(found) == ["gemm", "gemm"]
    assert found.left_out == (
        "analyzed: steps 3 to 4, without 4 events outside of the steps (--steps all includes them)"
    )
    whole = window(tmp_path, events, "all")
    assert len(names_in(whole)) == 6 and whole.left_out == ""


def test_one_step_is_not_cut_out_of_its_recording(tmp_path):
    found = window(tmp_path, [*steps_on_host([1]), *lagging([0], [40]), kernel("early", 900, 30)])
    assert names_in(found) == ["gemm", "early"] and len(found.steps) == 1
    assert names_in(
        window(tmp_path, [*steps_on_host([1]), *lagging([0], [40]), kernel("early", 900, 30)], range(5))
    ) == ["gemm"]


@pytest.mark.parametrize("names,steps", [
    *((names, [1, 2]) for names in (
        ["step 1", "step 2"], ["Step 1", "Step 2"], ["train_step 1", "train_step 2"], ["iter#1", "iter#2"],
        ["iteration: 1", "iteration: 2"], ["training step 1", "training step 2"],
    )),
    *((names, []) for names in (
        ["step 2", "step 1"], ["step", "step"], ["Step 1: F0", "Step 2: B0"], ["sidestep 1", "sidestep 2"],
    )),
    ([f"{STEP}1", "step 1"], [1]),
])  # fmt: skip
def test_annotations_that_are_steps(tmp_path, names, steps):
    marks = [annotation(name, 100 + 100 * i, 100) for i, name in enumerate(names)]
    assert [s.number for s in window(tmp_path, [*marks, *lagging([0, 50], [40, 30])]).steps] == steps


def test_phases_and_causes_of_other_steps_are_left_out(tmp_path):
    """In each of three steps, the host loads data for 300 us, in which the device has nothing to do."""
    events = []
    for number, at in enumerate((0, 1000, 2000)):
        events += [annotation(f"step {number}", at, 1000), annotation("DataLoader", at + 650, 300)]
        events += [
            annotation("forward", at + 10, 20),
            launch(number, at + 15),
            kernel("gemm", at + 20, 600, correlation=number),
        ]
    path = write(tmp_path / "t.json", events)
    for steps, number in ((range(1, 3), 2), (range(3), 3)):
        [device] = analyze_files([path], steps=steps).devices
        assert [(phase.name, phase.times) for phase in device.analysis.phases] == [("forward", number)]
        [cause] = [one for one in device.analysis.verdicts if one.kind == "data-loader"]
        assert cause.cost_us == 300 * (number - 1) and f"The host did this {number - 1} time" in cause.evidence[0]


@pytest.mark.parametrize("text,message", [
    ("9:", "no work of device 0 is in these steps; recorded: steps 0 to 1"), ("x", "is not a range of steps"),
    ("5:5", "has no step"), ("-1:", "is not a range"), ("1:2:3", "is not a range"), ("", "is not a range"),
])  # fmt: skip
def test_wrong_steps(tmp_path, capsys, text, message):
    path = write(tmp_path / "t.json", [*steps_on_host([0, 1]), *lagging([0, 50], [40, 30])])
    assert main(["profile", "analyze", str(path), f"--steps={text}"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_choices():
    assert parse_steps(None) == "default" and parse_steps("all") == "all"
    assert [parse_steps(text) for text in ("3:7", ":7", "3:", "3")] == [
        range(3, 7), range(7), range(3, 10**9), range(3, 4),
    ]  # fmt: skip


# ---- Device work is named after the part of the program that launched it ----


COPY = "Memcpy DtoH (Device -> Pinned)"


def module(name, start, duration, thread=1):
    return annotation(f"nn.Module: {name}", start, duration, thread) | {"cat": "python_function"}


def work(at, name=GEMM, thread=1, **arguments):
    """A launch at a time, and its kernel, whose correlation id is that time."""
    event = kernel(name, 10_000 + at, 5, correlation=at, cat="gpu_memcpy" if name.startswith("Memcpy") else "kernel")
    event["args"] |= arguments
    return [launch(at, at, thread), event]


def named(tmp_path, *events):
    """For each device event: its phase, its best name, and whether a part of the program is known."""
    flat = [event for one in events for event in (one if isinstance(one, list) else [one])]
    trace = read_trace(write(tmp_path / "t.json", flat))
    return [(e.phase, e.place, e.is_named) for e in as_device(trace, NAMES).device_events]


@pytest.mark.parametrize("name,length,is_broad", [
    ("train_step", 790, True), ("train_step", 690, False), ("ProfilerStep_5", 790, True), ("step 5", 100, True),
    ("iteration 5", 100, True), ("DistributedDataParallel.forward", 100, True),
    ("Torch-Compiled Region: 0/0", 100, True),
    ("## Call CompiledFxGraph fxyz ##", 100, True), ("attn(F)", 790, False),
    ("my DistributedDataParallel.forward", 9, False),
])  # fmt: skip
def test_annotations_of_whole_steps_are_broad(tmp_path, name, length, is_broad):
    """Of 891 us in which work is launched, the annotation covers `length`."""
    found = named(
        tmp_path, annotation(name, 100, length), annotation("other", 950, 20), work(105), work(960), work(995)
    )
    assert found[0] == ((name, GEMM, False) if is_broad else (name, name, True))
    assert found[1] == ("other", "other", True)


def test_modules(tmp_path):
    """A module is named after its class and that around it; all layers have the same names."""
    modules = [
        module("Model_0", 100, 800), module("Attention_0", 110, 100), module("Linear_0", 120, 20),
        module("Linear_1", 150, 20),
        module("Attention_1", 310, 100), module("Linear_2", 320, 20), module("MLP_12b_3", 500, 50),
    ]  # fmt: skip
    times = [125, 155, 325, 180, 510, 700]
    found = named(tmp_path, *modules, *map(work, times))
    linear, mlp = "Attention.Linear", "Model.MLP_12b"
    assert [phase for phase, *_ in found] == [linear, linear, linear, "Model.Attention", mlp, "Model"]
    assert all(is_named and phase == name for phase, name, is_named in found)
    (analysis,) = analyze(read_trace(tmp_path / "t.json"))
    assert {phase.name: phase.times for phase in analysis.phases} == {
        linear: 3,
        "Model.Attention": 1,
        mlp: 1,
        "Model": 1,
    }


def test_annotations_modules_and_broad_annotations_in_this_order(tmp_path):
    around = [annotation("train_step", 100, 800), module("Linear_0", 200, 100), annotation("matmul", 220, 20)]
    found = named(tmp_path, *around, work(150), work(210), work(230), work(890))
    assert [phase for phase, *_ in found] == ["train_step", "Linear", "matmul", "train_step"]
    # a module inside an annotation: the annotation is what the user wrote
    inside = [annotation("experts", 200, 100), module("Linear_0", 220, 20)]
    assert named(tmp_path, *inside, work(230), work(890))[0][0] == "experts"


def test_autograds_thread_belongs_to_the_annotation_of_the_thread_that_waits(tmp_path):
    around = [annotation("train_step", 100, 790), annotation("backward", 200, 100), module("Linear_0", 200, 100)]
    found = named(
        tmp_path, *around, work(210, thread=2), work(400, thread=2), annotation("own", 500, 50, 2), work(510, thread=2)
    )
    assert [phase for phase, *_ in found] == ["backward", "train_step", "own"]


@pytest.mark.parametrize("arguments,name", [
    ({"Process Group Name": "5", "Process Group Description": "ep"}, "all_to_allv in ep"),
    ({"Process Group Name": "5", "Process Group Description": "undefined"}, "all_to_allv in 5"),
    ({"Process Group Name": "5"}, "all_to_allv in 5"), ({}, "all_to_allv"),
])  # fmt: skip
def test_a_transfer_has_the_name_of_its_collective(tmp_path, arguments, name):
    (found,) = named(tmp_path, work(120, ALL_REDUCE, **{"Collective name": "all_to_allv"}, **arguments))
    assert found == ("all_to_allv", name, False)
    placed, *_ = named(
        tmp_path, annotation("gradients", 100, 50), annotation("x", 500, 9), work(505),
        work(120, ALL_REDUCE, **{"Collective name": "all_to_allv"}, **arguments), work(990),
    )[1:]  # fmt: skip
    assert placed == ("gradients", name if arguments else "all_to_allv in gradients", True)


def test_a_transfer_has_the_name_of_its_call(tmp_path):
    call = annotation("nccl:all_gather", 110, 20)
    assert named(tmp_path, call, work(120, ALL_REDUCE), work(125)) == [
        ("all_gather", "all_gather", False),
        ("", GEMM, False),
    ]
    assert named(tmp_path, call, work(120, ALL_REDUCE, thread=2)) == [("", ALL_REDUCE, False)]
    peer = work(122, "Memcpy PtoP (Device -> Device)")
    assert named(tmp_path, call, peer)[0] == ("all_gather", "all_gather", False)
