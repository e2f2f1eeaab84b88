"""Recordings made from a timeline: reading them returns this timeline, and simulating their costs does too."""

import json

import pytest

from moe_dualpipe.schedule import Costs, build, simulate
from moe_dualpipe.schedule.actions import Backward, Forward, Overlap, Part
from moe_dualpipe.schedule.walk import Span
from moe_dualpipe.tools.profiler import TraceError, read_trace
from moe_dualpipe.tools.profiler.pipeline import RecordedPipeline, measured_costs, step_breakdowns
from moe_dualpipe.tools.profiler.reports.pipeline import pipeline_objects, pipeline_text
from moe_dualpipe.tools.profiler.steps import recorded_steps

COSTS = Costs(F=20, B=50, W=15, FB=60)
EPOCH = 1_700_000_000_000_000


def events_of(timeline, rank, number=1, begin=1000.0, tail=()):
    """The events of a step on a CPU: an annotation for each action, with a wait and then operators inside."""

    def event(name, start, end, cat="user_annotation"):
        return {"ph": "X", "cat": cat, "name": name, "ts": begin + start, "dur": end - start, "pid": 1, "tid": 1}

    end = timeline.makespan + sum(length for _, length in tail)
    yield event(f"step {number}", -5, end + 7)
    before = 0.0
    for span in timeline.spans[rank]:
        yield event(str(span.action), before, span.end)  # starts with a wait
        yield event("wait for it(F)", before, span.start)
        yield event("aten::mm", span.start, (span.start + span.end) / 2 - 1, "cpu_op")
        yield event("aten::mm", (span.start + span.end) / 2 + 1, span.end, "cpu_op")  # 2 us between them
        before = span.end
    done = timeline.makespan
    for part, length in tail:  # the first part starts when this rank has finished, the others when all ranks have
        done += length
        yield event(part, before, done)
        yield event("aten::add", before, done, "cpu_op")
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
    path.write_text(json.dumps({"baseTimeNanoseconds": base * 1000, "traceEvents": events}))
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
    schedule = build(name, ranks, micro_batches)
    simulated = simulate(schedule, COSTS)
    pipeline = pipeline_of(tmp_path, [simulated])
    for ours, theirs in zip(pipeline.timeline(0).spans, simulated.spans, strict=True):
        assert [span.action for span in ours] == [span.action for span in theirs]
        assert [span.start for span in ours] == pytest.approx([span.start / 1e3 for span in theirs], abs=1e-3)
        assert [span.end for span in ours] == pytest.approx([span.end / 1e3 for span in theirs], abs=1e-3)
    assert pipeline.predicted.makespan == pytest.approx(simulated.makespan / 1e3, rel=1e-3)
    assert pipeline.predicted.bubble == pytest.approx([b / 1e3 for b in simulated.bubble], abs=2e-3)
    for rank, account in enumerate(step_breakdowns(pipeline)):
        assert account["bubble"] == pytest.approx(simulated.bubble[rank] / 1e3, abs=1e-3)
        assert account["waiting"] == pytest.approx(2e-3 * len(schedule.actions[rank]), abs=1e-3)


def test_breakdown_of_a_step(tmp_path):
    """The pipeline, then 30 us of gradients and 40 us of the optimizer, and 12 us around them."""
    timeline = simulate(build("dualpipe", 2, 4), COSTS)
    pipeline = pipeline_of(tmp_path, [timeline], tail=(("gradients", 30), ("optimizer", 40)))
    for rank, account in enumerate(step_breakdowns(pipeline)):
        by_kind = {"F": 0.0, "B": 0.0, "I": 0.0, "W": 0.0, "O": 0.0}
        for span in timeline.spans[rank]:
            text = str(span.action)
            by_kind["O" if text.startswith("(") else text[1]] += span.duration
        assert account["forward"] == pytest.approx(by_kind["F"] / 1e3, abs=1e-3)
        assert account["backward"] == pytest.approx((by_kind["B"] + by_kind["I"]) / 1e3, abs=1e-3)
        assert account["weights"] == pytest.approx(by_kind["W"] / 1e3, abs=1e-3)
        assert account["pairs"] == pytest.approx(by_kind["O"] / 1e3, abs=1e-3)
        assert account["gradients"] == pytest.approx(0.030, abs=1e-3)
        assert account["optimizer"] == pytest.approx(0.040, abs=1e-3)
        assert account["step"] == pytest.approx((timeline.makespan + 70 + 12) / 1e3, abs=1e-3)
        parts = account.keys() - {"step", "waiting", "predicted_bubble"}
        assert sum(account[part] for part in parts) == pytest.approx(account["step"])


def test_the_typical_step_has_the_median_length(tmp_path):
    schedule = build("1f1b", 2, 3)
    timelines = [simulate(schedule, Costs(F=f, B=2 * f)) for f in (30, 10, 20)]
    pipeline = pipeline_of(tmp_path, timelines)
    assert pipeline.typical == 2
    assert pipeline.steps[0][2].number == 3
    assert pytest.approx((0.02, 0.02), abs=1e-3) == pipeline.costs.F
    (found,) = pipeline_objects([pipeline])
    assert found["step"] == 3
    assert found["makespan_ms"] == pytest.approx(timelines[2].makespan / 1e3, abs=1e-3)
    assert [rank["bubble"] for rank in found["ranks_ms"]] == pytest.approx(
        [bubble / 1e3 for bubble in timelines[2].bubble], abs=1e-3
    )
    json.dumps(found)


def test_costs_of_each_stage_are_means():
    schedule = build("1f1b", 2, 3)
    times = {"0F": [4, 9, 5], "1F": [2, 2, 2], "0B": [7, 8, 30], "1B": [6, 6, 5]}
    every = [action for actions in schedule.actions for action in actions if isinstance(action, Forward | Backward)]
    spans = [Span(action, 0, times[str(action)[:2]][action.micro_batch]) for action in every]
    assert measured_costs(schedule, spans) == Costs(F=(6, 2), B=(15, 17 / 3))


def test_a_weight_gradient_is_shorter_than_its_backward():
    """A slow one may have been among the first actions."""
    schedule, times = build("dualpipe", 2, 4), {Part.FULL: 5, Part.INPUT: 4, Part.WEIGHT: 7}
    every = [action for actions in schedule.actions for action in actions]
    spans = [Span(action, 0, times[action.part] if isinstance(action, Backward) else 6) for action in every]
    measured = measured_costs(schedule, spans)
    assert min(measured.W) == pytest.approx(0.9 * min(measured.B)) == 4.5


def test_measured_costs_give_the_measured_time_of_every_pair():
    uneven = Costs(F=(20, 22, 24, 29), B=(50, 52, 54, 56), W=(15, 16, 17, 18), FB=(60, 64, 68, 77))
    schedule = build("dualpipe", 4, 10)
    spans = [span for row in simulate(schedule, uneven).spans for span in row]
    measured = measured_costs(schedule, spans)
    assert [measured.of(span.action) for span in spans] == pytest.approx([span.duration for span in spans])


def test_pairs_that_are_shorter_than_their_members_alone_have_costs():
    """The first actions of a short run are slow, and they are the ones that run alone."""
    schedule = build("dualpipe", 2, 8)
    slow = Costs(F=(30, 70), B=(50, 150), W=(20, 60), FB=(70, 160))
    spans = [span for row in simulate(schedule, slow).spans for span in row]
    spans = [Span(span.action, 0, 5) if isinstance(span.action, Overlap) else span for span in spans]
    measured = measured_costs(schedule, spans)
    assert (measured.FB, measured.F) == ((50, 150), (30, 70))
    assert all(measured.of(span.action) > 0 for span in spans)


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
    events = [e for e in events_of(timeline, 0) if e["name"] != "0F2"]
    (tmp_path / "t.json").write_text(json.dumps(events))
    with pytest.raises(TraceError, match="the recording of step 1 lacks actions of the schedule"):
        recorded_steps(read_trace(tmp_path / "t.json"), timeline.schedule.actions[0])


def test_text_of_a_pipeline(tmp_path):
    timeline = simulate(build("dualpipe", 4, 10), COSTS)
    pipeline = pipeline_of(tmp_path, [timeline], tail=(("gradients", 30), ("optimizer", 40)))
    _, _, *rows = pipeline_text([pipeline]).splitlines()
    assert [row.split("|")[1].strip() for row in rows[:4]] == [f"pipeline rank {rank}" for rank in range(4)]
    share = f"{timeline.bubble_share:.1%}"
    assert rows[-1] == (
        f"dualpipe: {timeline.makespan / 1e3:.1f} ms, bubble {share}; predicted from the measured F 0.02, "
        f"B 0.05, W 0.015, FB 0.06 ms: {timeline.makespan / 1e3:.1f} ms, bubble {share}"
    )


def test_on_a_gpu_an_action_runs_when_its_kernels_run(tmp_path):
    """Kernels run long after their launch. Transfers on another stream are not part of an action."""
    timeline = simulate(build("1f1b", 2, 3), COSTS)

    def device(name, start, end, correlation, stream=7):
        arguments = {"device": 0, "stream": stream, "correlation": correlation}
        return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "pid": 0, "tid": stream,
                "args": arguments}  # fmt: skip

    def host(name, start, length, cat="user_annotation", **arguments):
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "pid": 1, "tid": 1, "args": arguments}

    steps = []
    for rank in range(2):
        events, delay = [host("step 1", 0, 5000)], 500
        for i, span in enumerate(timeline.spans[rank]):
            events += [
                host(str(span.action), 10 * i, 9), host("attn(F)", 10 * i + 1, 6),
                host("cudaLaunchKernel", 10 * i + 2, 1, "cuda_runtime", correlation=i),
                host("cudaLaunchKernel", 10 * i + 4, 1, "cuda_runtime", correlation=100 + i),
                device("gemm", delay + span.start, delay + span.end, i),
                device("ncclDevKernel_SendRecv", delay + span.end, delay + span.end + 40, 100 + i, stream=9),
            ]  # fmt: skip
        events += [
            host("gradients", 100, 9), host("cudaLaunchKernel", 102, 1, "cuda_runtime", correlation=900),
            device("ncclDevKernel_AllReduce", 2000 + rank, 2300, 900, stream=9),
        ]  # fmt: skip
        path = tmp_path / f"gpu{rank}.json"
        path.write_text(json.dumps(events))
        steps.append(recorded_steps(read_trace(path), timeline.schedule.actions[rank]))
    pipeline = RecordedPipeline(timeline.schedule, steps)
    assert pipeline.timeline(0).makespan == pytest.approx(timeline.makespan / 1e3)
    assert pipeline.timeline(0).bubble == pytest.approx([bubble / 1e3 for bubble in timeline.bubble])
    assert all(account["waiting"] == 0 for account in step_breakdowns(pipeline))
    assert [step.parts for (step,) in steps] == [{"gradients": (2000 + rank, 2300)} for rank in range(2)]
