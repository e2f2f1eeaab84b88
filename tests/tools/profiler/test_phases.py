"""Device work is named after the part of the program that launched it."""

from collections import Counter

import pytest

from moe_dualpipe.tools.profiler import read_trace
from moe_dualpipe.tools.profiler.phases import Phases
from tests.support.traces import annotation, kernel, launch, write

GEMM, ALL_REDUCE = "gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
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
    phases = Phases(trace)
    return [(phases.phase_of(e), phases.name_of(e), phases.is_named(e)) for e in trace.device_events]


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
    phases = Phases(read_trace(tmp_path / "t.json"))
    assert phases.times == Counter({linear: 3, "Model.Attention": 2, mlp: 1, "Model": 1})


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
