"""Causes in recordings of CPUs, on a small machine with one thread and links, whose times are known exactly."""

from collections import defaultdict, deque
from dataclasses import dataclass, replace

import pytest

from moe_dualpipe.tools.profiler import NAMES, read_trace
from moe_dualpipe.tools.profiler.doctor.diagnose import examine
from moe_dualpipe.tools.profiler.doctor.replay import SYNC, replay
from moe_dualpipe.tools.profiler.doctor.view import BLOCKED
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.host import host_as_device
from tests.support.traces import annotation, operator, write


@dataclass(frozen=True)
class Compute:
    label: str
    us: float = 3000.0


@dataclass(frozen=True)
class Start:
    """A transfer. waits: at once. link: its own."""

    label: str
    us: float = 2000.0
    waits: bool = False
    link: int = 1


@dataclass(frozen=True)
class Wait:
    label: str


def layers(number, change=lambda op: op):
    """Two chunks that hide each other's transfers. change: a function of an operation."""
    ops = [
        Compute("add(B)"), Start("combine(B)", link=2), Compute("attn(F)"), Start("dispatch(F)"), Wait("combine(B)"),
        Compute("mlp(B)"), Start("dispatch(B)", link=2), Compute("mlp(W)", 1000), Wait("dispatch(F)"),
        Compute("mlp(F)"), Start("combine(F)"), Wait("dispatch(B)"), Compute("attn(B)"), Wait("combine(F)"),
    ] * number  # fmt: skip
    return [change(op) for op in ops]


def run(ops):
    """The events of a trace. Transfers are in the order of their links."""
    events, now, free, ends = [], 0.0, defaultdict(float), defaultdict(deque)
    for op in ops:
        if isinstance(op, Compute):
            events += [annotation(op.label, now, op.us), operator("aten::mm", now, op.us)]
            now += op.us
        elif isinstance(op, Start):
            begin = max(now + 60, free[op.link])
            end = free[op.link] = begin + op.us
            ends[op.label].append(end)
            after = end if op.waits else now + 70
            events += [
                operator("aten::copy_", now, 50), annotation("link::carry", now + 60, 10),
                annotation("link:carry", begin, op.us, thread=10 + op.link),
                annotation(op.label, now, after + 10 - now),
            ]  # fmt: skip
            events += [annotation("link::wait", now + 75, end - now - 75)] if op.waits else []
            now = after + 10
        else:
            end = max(now, ends[op.label].popleft())
            events += [
                annotation(f"wait for {op.label}", now, end + 20 - now),
                annotation("link::wait", now, end - now),
            ]
            events.append(operator("aten::copy_", end, 20))
            now = end + 20
    return sorted(events, key=lambda event: event["ts"])


def analysis_of(events, folder):
    return analyze_files([write(folder / "t.json", events)], pictures=False).devices[0].analysis


def case_of(events, folder):
    trace = host_as_device(read_trace(write(folder / "t.json", events)), NAMES)
    found = examine(trace, "cpu", NAMES.kind_of)
    assert found is not None
    return found.case


def waits_at_once(op):
    return replace(op, waits=True) if op == Start("dispatch(F)") else op


def transfers_of(us):
    return lambda op: replace(op, us=us) if isinstance(op, Start) else op


HEALTHY = layers(6)


@pytest.mark.parametrize("ops", [HEALTHY, layers(1), [Compute("attn(F)"), Compute("mlp(F)")]])
def test_a_healthy_run_has_no_verdict(ops, tmp_path):
    assert {verdict.kind for verdict in analysis_of(run(ops), tmp_path).verdicts} <= {"nothing-to-overlap"}


def test_a_fault_is_named_with_its_true_gain(tmp_path):
    found = analysis_of(run(layers(6, waits_at_once)), tmp_path)
    true = found.window_us - analysis_of(run(HEALTHY), tmp_path).window_us
    assert found.verdicts[0].kind == "host-sync" and true > 1000
    assert found.verdicts[0].gain_us == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize("change", [waits_at_once, transfers_of(6000)])
def test_an_unchanged_replay_gives_the_recorded_times(change, tmp_path):
    case = case_of(run(layers(4, change)), tmp_path)
    assert replay(case.graph).start == pytest.approx(case.graph.start, abs=1e-6)


def waits(case):
    """Name of each wait, and start and end of the transfer that it is for."""
    found = case.graph.edges.keep(case.graph.edges.kind == SYNC)
    events, calls = case.event_of[found.source_node].tolist(), case.call_of[found.target].tolist()
    rows = [(case.view.calls[c].name, case.view.start[e], case.view.end[e]) for e, c in zip(events, calls, strict=True)]
    return sorted(rows, key=lambda wait: wait[2])


def test_a_wait_is_for_what_its_annotation_started(tmp_path):
    """Sizes are those of "prepare dispatch(F)"; a second wait for dispatch(F) is for the second dispatch."""
    events = [
        annotation("prepare dispatch(F)", 0, 1000), operator("aten::add", 0, 100), annotation("link::carry", 500, 10),
        annotation("link:carry", 500, 600, thread=2), operator("aten::add", 1200, 10),
        annotation("dispatch(F)", 1000, 1000), annotation("wait for sizes", 1000, 200),
        annotation("link::carry", 1500, 10), annotation("link:carry", 1500, 700, thread=2),
        annotation("dispatch(F)", 2000, 500), annotation("link::carry", 2100, 10),
        annotation("link:carry", 2200, 3000, thread=2),
        annotation("wait for dispatch(F)", 2500, 100), annotation("mlp(F)", 2600, 500), operator("aten::mm", 2600, 500),
        annotation("wait for dispatch(F)", 3100, 2200), annotation("mlp(F)", 5300, 500),
    ]  # fmt: skip
    named = "wait for dispatch(F)"
    assert waits(case_of(events, tmp_path)) == [(BLOCKED, 500, 1100), (named, 1500, 2200), (named, 2200, 5200)]


@pytest.mark.parametrize(("name", "kind", "cost_us", "gains"), [
    ("mlp(B)", "host-sync", 4 * 5050, 4 * 5050), ("step", "nothing-to-overlap", 4 * 5000, None),
])  # fmt: skip
def test_a_sum_over_ranks_that_blocks(name, kind, cost_us, gains, tmp_path):
    """In each of four annotations: a segment that reads a number at once is named, another wait is only a wait."""
    events = [
        event for start in range(0, 80_000, 20_000) for event in (
            annotation(name, start, 19_000), operator("aten::mm", start, 4000),
            operator("c10d::allreduce_", start + 4000, 50),
            annotation("gloo:all_reduce", start + 4100, 5000, thread=2),
            operator("aten::item", start + 9100, 10), operator("aten::mm", start + 9110, 9000),
        )
    ]  # fmt: skip
    [verdict] = analysis_of(events, tmp_path).verdicts
    assert (verdict.kind, verdict.cost_us) == (kind, cost_us)
    assert verdict.gain_us == (gains and pytest.approx(gains, abs=100))
