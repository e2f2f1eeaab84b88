"""Recordings made from a timeline: reading them returns this timeline, and simulating their costs does too."""

import re
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_dualpipe.health.heartbeat import Progress
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.schedule import Backward, Costs, Part, Span, build, simulate
from moe_dualpipe.tools.profiler import TraceError, read_trace
from moe_dualpipe.tools.profiler import profiled_steps as profiling
from moe_dualpipe.tools.profiler.profiled_steps import ProfiledSteps, profiled_steps
from moe_dualpipe.tools.profiler.recorded_pipeline import (
    RecordedPipeline,
    measured_costs,
    recorded_steps,
    step_breakdowns,
)
from moe_dualpipe.training.config import MetricsConfig, TrainConfig
from moe_dualpipe.training.extensions import Update
from tests.support.traces import annotation, kernel, launch, operator, write

COSTS = Costs(F=20, B=50, W=15, FB=60)
EPOCH = 1_700_000_000_000_000


def events_of(timeline, rank, number=1, begin=1000.0, tail=()):
    """The events of a step on a CPU: an annotation for each action, with a wait and then operators inside."""
    end = timeline.makespan + sum(length for _, length in tail)
    yield annotation(f"step {number}", begin - 5, end + 12)
    before = 0.0
    for span in timeline.spans[rank]:
        half = span.duration / 2
        yield annotation(str(span.action), begin + before, span.end - before)  # starts with a wait
        yield annotation("wait for it(F)", begin + before, span.start - before)
        yield operator("aten::mm", begin + span.start, half - 1)
        yield operator("aten::mm", begin + span.start + half + 1, half - 1)  # 2 us between them
        before = span.end
    done = timeline.makespan
    for part, length in tail:  # the first part starts when this rank has finished, the others when all ranks have
        done += length
        yield annotation(part, begin + before, done - before)
        yield operator("aten::add", begin + before, done - before)
        before = done


def recorded(tmp_path, timelines, rank, base=EPOCH, tail=(), since=0.0):
    """The steps of a rank, read from a file with one step for each timeline."""
    begins = [1000.0 + 10_000 * i for i in range(len(timelines))]
    events = [
        event
        for i, (timeline, begin) in enumerate(zip(timelines, begins, strict=True))
        for event in events_of(timeline, rank, i + 1, begin, tail)
    ]
    path = tmp_path / f"{timelines[0].schedule.name}-{rank}.json"
    write(path, events, baseTimeNanoseconds=base * 1000)
    return recorded_steps(read_trace(path), timelines[0].schedule.actions[rank], since)


def pipeline_of(tmp_path, timelines, **options):
    schedule = timelines[0].schedule
    return RecordedPipeline(
        schedule, [recorded(tmp_path, timelines, rank, **options) for rank in range(schedule.num_ranks)]
    )


@pytest.mark.parametrize("name,ranks,micro_batches", [
    ("dualpipe", 4, 10), ("dualpipev", 2, 6), ("1f1b", 3, 5), ("zb1p", 2, 4), ("gpipe", 2, 3), ("zbv", 2, 4),
    ("interleaved_1f1b", 2, 4), ("chimera", 4, 8),
])  # fmt: skip
def test_a_recording_gives_the_timeline_and_the_costs_that_made_it(tmp_path, name, ranks, micro_batches):
    """Behind the pipeline are 30 us of gradients and 40 us of the optimizer, and 12 us around the step."""
    schedule = build(name, ranks, micro_batches)
    simulated = simulate(schedule, COSTS)
    pipeline = pipeline_of(tmp_path, [simulated], tail=(("gradients", 30), ("optimizer", 40)))
    for ours, theirs in zip(pipeline.timeline(0).spans, simulated.spans, strict=True):
        assert [span.action for span in ours] == [span.action for span in theirs]
        assert [span.start for span in ours] == pytest.approx([span.start / 1e3 for span in theirs], abs=1e-3)
        assert [span.end for span in ours] == pytest.approx([span.end / 1e3 for span in theirs], abs=1e-3)
    assert pipeline.predicted.makespan == pytest.approx(simulated.makespan / 1e3, rel=1e-3)
    assert pipeline.predicted.bubble == pytest.approx([b / 1e3 for b in simulated.bubble], abs=2e-3)
    columns = {"F": "forward", "B": "backward", "I": "backward", "W": "weights", "(": "pairs"}
    for rank, found in enumerate(step_breakdowns(pipeline)):
        expected = dict.fromkeys(columns.values(), 0.0)
        for span in simulated.spans[rank]:
            expected[columns[re.sub(r"^\d+", "", str(span.action))[0]]] += span.duration / 1e3
        expected |= {"gradients": 0.03, "optimizer": 0.04, "bubble": simulated.bubble[rank] / 1e3}
        expected["step"] = (simulated.makespan + 70 + 12) / 1e3
        expected["waiting"] = 2e-3 * len(schedule.actions[rank])
        assert {part: found[part] for part in expected} == pytest.approx(expected, abs=1e-3)
        parts = found.keys() - {"step", "waiting", "predicted_bubble"}
        assert sum(found[part] for part in parts) == pytest.approx(found["step"])


def test_a_weight_gradient_is_shorter_than_its_backward():
    """A slow one may have been among the first actions."""
    schedule, times = build("dualpipe", 2, 4), {Part.FULL: 5, Part.INPUT: 4, Part.WEIGHT: 7}
    every = [action for actions in schedule.actions for action in actions]
    spans = [Span(action, 0, times[action.part] if isinstance(action, Backward) else 6) for action in every]
    measured = measured_costs(schedule, spans)
    assert min(measured.W) == pytest.approx(0.9 * min(measured.B)) == 4.5


def test_times_of_all_ranks_count_from_a_barrier(tmp_path):
    timeline = simulate(build("1f1b", 4, 4), COSTS)
    ahead = [0, 0, 700, 700]
    files = [{"rank": rank, "base": EPOCH + ahead[rank], "tail": (("gradients", 30),)} for rank in range(4)]
    steps = [recorded(tmp_path, [timeline], **file) for file in files]
    with pytest.raises(AssertionError):
        assert RecordedPipeline(timeline.schedule, steps).timeline(0).makespan == pytest.approx(timeline.makespan / 1e3)
    together = [recorded(tmp_path, [timeline], **file, since=file["base"] + 1) for file in files]
    pipeline = RecordedPipeline(timeline.schedule, together)
    assert pipeline.timeline(0).makespan == pytest.approx(timeline.makespan / 1e3, abs=1e-3)
    ours, theirs = together[2][0], steps[2][0]
    times = (ours.start, ours.end, *ours.parts["gradients"])
    expected = [time - EPOCH - 701 for time in (theirs.start, theirs.end, *theirs.parts["gradients"])]
    assert times == pytest.approx(expected, rel=0, abs=1)  # the times of `theirs` are about 1.7e15


def test_a_recording_without_all_actions_is_an_error(tmp_path):
    timeline = simulate(build("1f1b", 2, 3), COSTS)
    path = write(tmp_path / "t.json", [e for e in events_of(timeline, 0) if e["name"] != "0F2"])
    with pytest.raises(TraceError, match="the recording of step 1 lacks actions of the schedule"):
        recorded_steps(read_trace(path), timeline.schedule.actions[0])


def test_on_a_gpu_an_action_runs_when_its_kernels_run(tmp_path):
    """Kernels run long after their launch. Transfers on another stream are not part of an action."""
    timeline, steps = simulate(build("1f1b", 2, 3), COSTS), []
    for rank in range(2):
        events = [annotation("step 1", 0, 5000)]
        for i, span in enumerate(timeline.spans[rank]):
            events += [
                annotation(str(span.action), 10 * i, 9), annotation("attn(F)", 10 * i + 1, 6),
                launch(i, 10 * i + 2), launch(100 + i, 10 * i + 4),
                kernel("gemm", 500 + span.start, span.duration, correlation=i),
                kernel("ncclDevKernel_SendRecv", 500 + span.end, 40, 9, 100 + i),
            ]  # fmt: skip
        events += [annotation("gradients", 100, 9), launch(900, 102)]
        events.append(kernel("ncclDevKernel_AllReduce", 2000 + rank, 300 - rank, 9, 900))
        path = write(tmp_path / f"gpu{rank}.json", events)
        steps.append(recorded_steps(read_trace(path), timeline.schedule.actions[rank]))
    pipeline = RecordedPipeline(timeline.schedule, steps)
    assert pipeline.timeline(0).makespan == pytest.approx(timeline.makespan / 1e3)
    assert pipeline.timeline(0).bubble == pytest.approx([bubble / 1e3 for bubble in timeline.bubble])
    assert all(account["waiting"] == 0 for account in step_breakdowns(pipeline))
    assert [step.parts for (step,) in steps] == [{"gradients": (2000 + rank, 2300)} for rank in range(2)]


# ---- The extension that records steps; a recording itself is tested in test_profiled_run.py ----


def trainer_of(folder, profile, first_step, schedule, layout, **changes) -> Any:
    config = TrainConfig(steps=12, metrics=MetricsConfig(profile=profile))
    start = SimpleNamespace(**{"first_step": first_step, "restarted": False, **changes})
    run = SimpleNamespace(folder=folder, start=start, schedule=schedule, layout=layout, device=torch.device("cpu"))
    return SimpleNamespace(run=run, config=config, progress=Progress(), optimizer=SimpleNamespace(wait=lambda: None))


def test_steps_are_recorded_after_a_warm_up_and_a_barrier(tmp_path, monkeypatch):
    done: list[str] = []

    @contextmanager
    def capture(path, _):
        done.append(f"open {path.name}")
        yield
        done.append("close")

    monkeypatch.setattr(profiling, "capture", capture)
    monkeypatch.setattr(profiling.dist, "barrier", lambda: done.append("barrier"))
    monkeypatch.setattr(profiling.time, "time_ns", lambda: 1_700_000_000_000_000_500)
    monkeypatch.setattr(ProfiledSteps, "report", lambda _: done.append("report") or "the report")
    schedule, layout = build("1f1b", 2, 2), Layout(2, 1, 1, 1)
    trainer, notes, waiting = trainer_of(tmp_path, 2, 5, schedule, layout), {}, []
    trainer.optimizer.wait = lambda: done.append("wait")
    profiler = ProfiledSteps(trainer)
    for index in range(5, 11):
        profiler.before_step(index)
        done.append(str(index))
        update = Update(index, 0.0, 0.0, torch.zeros(1, 1))
        profiler.after_update(update)
        notes[index] = update.notes
        waiting.append(profiler.exclusive)
    begin, end = ["wait", "barrier", "open rank1.json.gz", "barrier"], ["wait", "barrier", "close", "report"]
    assert done == ["5", "6", *begin, "7", "8", *end, "9", "10"]
    assert {index: note for index, note in notes.items() if note} == {8: ["the report"]}
    assert waiting == [False, True, True, False, False, False]  # no validation from before a recording until its end
    assert profiler._barrier_us == 1_700_000_000_000_000.5


def test_a_run_without_profile_has_no_extension_and_too_few_steps_are_an_error(tmp_path):
    schedule, layout = build("1f1b", 2, 2), Layout(2, 1, 1, 1)
    assert profiled_steps(trainer_of(tmp_path, 0, 0, schedule, layout)) is None
    assert profiled_steps(trainer_of(tmp_path, 3, 7, schedule, layout)) is not None
    with pytest.raises(ValueError, match=r"--profile 4 needs 6 steps, .* but the run has 5: use --steps 13"):
        profiled_steps(trainer_of(tmp_path, 4, 7, schedule, layout))
    assert profiled_steps(trainer_of(tmp_path, 4, 7, schedule, layout, restarted=True)) is None
