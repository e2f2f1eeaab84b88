"""Causes in recordings of CPUs, on a small machine with one thread and links, whose times are known exactly."""

from collections import defaultdict, deque
from dataclasses import dataclass, replace

import pytest

from moe_dualpipe.tools.profiler import NAMES, read_trace
from moe_dualpipe.tools.profiler.doctor.diagnose import diagnose, examine
from moe_dualpipe.tools.profiler.doctor.replay import replay, shorter
from moe_dualpipe.tools.profiler.doctor.view import BLOCKED, COMM
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.host import host_as_device
from tests.support.diagnosed import gain_of
from tests.support.traces import annotation, operator, write


@dataclass(frozen=True)
class Compute:
    label: str
    us: float = 3000.0


@dataclass(frozen=True)
class Start:
    """A transfer. waits: at once. link, group: its own. gated: it starts when a computation ends."""

    label: str
    us: float = 2000.0
    waits: bool = False
    link: int = 1
    group: str = ""
    gated: bool = False


@dataclass(frozen=True)
class Wait:
    label: str


def layers(number, *change):
    """Two chunks that hide each other's transfers. change: functions of an operation."""
    ops = [
        Compute("add(B)"), Start("combine(B)", link=2), Compute("attn(F)"), Start("dispatch(F)"), Wait("combine(B)"),
        Compute("mlp(B)"), Start("dispatch(B)", link=2), Compute("mlp(W)", 1000), Wait("dispatch(F)"),
        Compute("mlp(F)"), Start("combine(F)"), Wait("dispatch(B)"), Compute("attn(B)"), Wait("combine(F)"),
    ] * number  # fmt: skip
    for one in change:
        ops = [one(op) for op in ops]
    return ops


class Links:
    """Transfers, in the order of their links."""

    def __init__(self):
        self.events, self.free, self.gated = [], defaultdict(float), []
        self.ends = defaultdict(deque)

    def start(self, op, now):
        begin = max(now, self.free[op.link])
        end = self.free[op.link] = begin + op.us
        name = "shared:carry" if op.gated else f"link:carry of {op.group}" if op.group else "link:carry"
        self.events.append(annotation(name, begin, op.us, thread=10 + op.link))
        self.ends[op.label].append(end)
        return end

    def open(self, now):
        for op in self.gated:
            self.start(op, now)
        self.gated.clear()


def run(ops):
    """The events of a trace."""
    events, now, links = [], 0.0, Links()
    for op in ops:
        if isinstance(op, Compute):
            events += [annotation(op.label, now, op.us), operator("aten::mm", now, op.us)]
            now += op.us
            links.open(now)
        elif isinstance(op, Start):
            call = f"link::carry of {op.group}" if op.group else "link::carry"
            events += [operator("aten::copy_", now, 50), annotation(call, now + 60, 10)]
            after = now + 70
            if op.gated:
                links.gated.append(op)
            else:
                end = links.start(op, now + 60)
                if op.waits:
                    events.append(annotation("link::wait", now + 75, end - now - 75))
                    after = end
            events.append(annotation(op.label, now, after + 10 - now))
            now = after + 10
        else:
            if any(gated.label == op.label for gated in links.gated):
                links.open(now)
            end = max(now, links.ends[op.label].popleft())
            events += [
                annotation(f"wait for {op.label}", now, end + 20 - now),
                annotation("link::wait", now, end - now),
            ]
            events.append(operator("aten::copy_", end, 20))
            now = end + 20
    return sorted(events + links.events, key=lambda event: event["ts"])


def written(ops, folder):
    folder.mkdir(exist_ok=True)
    return write(folder / f"trace-{len(list(folder.iterdir()))}.json", run(ops))


def verdicts_of(ops, folder):
    trace = host_as_device(read_trace(written(ops, folder)), NAMES)
    return diagnose(trace, "cpu", NAMES.kind_of)


def window_of(ops, folder):
    return analyze_files([written(ops, folder)], pictures=False).devices[0].analysis.window_us


def case_of(ops, folder):
    return case_of_events(run(ops), folder)


def case_of_events(events, folder):
    trace = host_as_device(read_trace(write(folder / "events.json", events)), NAMES)
    found = examine(trace, "cpu", NAMES.kind_of)
    assert found is not None
    return found.case


def waits_at_once(op):
    return replace(op, waits=True) if op == Start("dispatch(F)") else op


def one_link(op):
    return replace(op, link=1, group=op.label[-2], us=5000) if isinstance(op, Start) else op


def two_links(op):
    return replace(op, group=op.label[-2], us=5000) if isinstance(op, Start) else op


def transfers_of(us, label=""):
    return lambda op: replace(op, us=us) if isinstance(op, Start) and label in op.label else op


def gated(op):
    return replace(op, gated=True) if isinstance(op, Start) else op


def late(ops, label="dispatch(F)", behind="mlp(B)"):
    """Each of these transfers starts behind the next computation that it does not need."""
    result = list(ops)
    for i in range(len(result) - 2, -1, -1):
        if isinstance(result[i], Start) and result[i].label == label:
            following = next(j for j in range(i, len(result)) if result[j].label == behind)
            result.insert(following + 1, result[i])
            del result[i]
    return result


HEALTHY = layers(6)
LONG_F, LONG_B = (layers(6, transfers_of(5000, label)) for label in ("dispatch(F)", "dispatch(B)"))
FAULTS = {
    "host-sync": (layers(6, waits_at_once), HEALTHY),
    "late-launch": (late(LONG_F), LONG_F),
    "late-launch behind weight gradients": (late(LONG_B, "dispatch(B)", "mlp(W)"), LONG_B),
    "few-queues": (layers(6, gated), HEALTHY),
    "shared-stream": (layers(6, one_link), layers(6, two_links)),
}


@pytest.mark.parametrize("ops", [HEALTHY, layers(6, two_links), layers(1), [Compute("attn(F)"), Compute("mlp(F)")]])
def test_a_healthy_run_has_no_verdict(ops, tmp_path):
    assert [verdict.kind for verdict in verdicts_of(ops, tmp_path) if verdict.kind != "nothing-to-overlap"] == []


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_named_with_its_true_gain(kind, tmp_path):
    faulty, healthy = FAULTS[kind]
    true = window_of(faulty, tmp_path) - window_of(healthy, tmp_path)
    first = verdicts_of(faulty, tmp_path)[0]
    assert first.kind == kind.split()[0] and true > 1000
    assert first.gain_us == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize("change", [waits_at_once, gated, one_link, late])
def test_an_unchanged_replay_gives_the_recorded_times(change, tmp_path):
    case = case_of(late(HEALTHY) if change is late else layers(4, change), tmp_path)
    assert replay(case.graph).start == pytest.approx(case.graph.start, abs=1e-6)


@pytest.mark.parametrize("factor", [0.5, 0.9])
def test_shorter_transfers_shorten_the_waits_for_them(factor, tmp_path):
    """The transfers are longer than the computation beside them, so that every wait is for its transfer."""

    long, faster = transfers_of(6000), transfers_of(6000 * factor)
    case = case_of(layers(4, long), tmp_path)
    true = window_of(layers(4, long), tmp_path / "a") - window_of(layers(4, faster), tmp_path / "b")
    change = shorter(case.nodes.event, (1 - factor) * case.view.duration * case.is_comm)
    assert gain_of(case, change) == pytest.approx(true, rel=0.01)


def waits(case):
    """Name of each wait, and start and end of the transfer that it is for."""
    node = {int(node): event for event, node in enumerate(case.nodes.event)}
    calls = {int(node): call for call, node in enumerate(case.nodes.call_end)}
    found = []
    for source, target in zip(case.graph.edges.source_node.tolist(), case.graph.edges.target.tolist(), strict=True):
        if target in calls:
            event = node[source]
            found.append((case.view.calls[calls[target]].name, case.view.start[event], case.view.end[event]))
    return sorted(found, key=lambda wait: wait[2])


def test_a_wait_is_for_what_its_annotation_started(tmp_path):
    """Sizes are those of "prepare dispatch(F)"; a second wait for dispatch(F) is for the second dispatch."""
    events = [
        annotation("prepare dispatch(F)", 0, 1000), operator("aten::add", 0, 100), annotation("link::carry", 500, 10),
        annotation("link:carry", 500, 600, thread=2),
        annotation("dispatch(F)", 1000, 1000), annotation("wait for sizes", 1000, 200),
        annotation("link::carry", 1500, 10), annotation("link:carry", 1500, 700, thread=2),
        annotation("dispatch(F)", 2000, 500), annotation("link::carry", 2100, 10),
        annotation("link:carry", 2200, 3000, thread=2),
        annotation("wait for dispatch(F)", 2500, 100), annotation("mlp(F)", 2600, 500), operator("aten::mm", 2600, 500),
        annotation("wait for dispatch(F)", 3100, 2200), annotation("mlp(F)", 5300, 500),
    ]  # fmt: skip
    case = case_of_events(events, tmp_path)
    assert waits(case) == [
        ("wait for sizes", 500, 1100), ("wait for dispatch(F)", 1500, 2200), ("wait for dispatch(F)", 2200, 5200),
    ]  # fmt: skip


def test_transfers_of_two_groups_are_matched_with_their_calls(tmp_path):
    """That of y starts first: its link is free."""
    events = [
        annotation("attn(F)", 0, 100), annotation("link::carry of x", 10, 5), annotation("mlp(B)", 200, 100),
        annotation("link::carry of x", 210, 5), annotation("attn(B)", 400, 100), annotation("link::carry of y", 410, 5),
        annotation("link:carry of x", 10, 1000, thread=2), annotation("link:carry of x", 1010, 1000, thread=2),
        annotation("link:carry of y", 410, 50, thread=3),
    ]  # fmt: skip
    view = case_of_events(events, tmp_path).view
    transfers = [(view.start[i], view.labels[i]) for i in range(len(view.events)) if view.kind[i] == COMM]
    assert transfers == [(10, "attn(F)"), (410, "attn(B)"), (1010, "mlp(B)")]


def test_a_transfer_that_waits_at_once_gains_nothing_from_an_earlier_start(tmp_path):
    found = [verdict.kind for verdict in verdicts_of(late(layers(6, waits_at_once)), tmp_path)]
    assert found == ["host-sync", "nothing-to-overlap"]


def reductions(name):
    """A sum over ranks that blocks, in each of four annotations."""
    return [
        event for start in range(0, 80_000, 20_000) for event in (
            annotation(name, start, 19_000), operator("aten::mm", start, 4000),
            operator("c10d::allreduce_", start + 4000, 50),
            annotation("gloo:all_reduce", start + 4100, 5000, thread=2),
            operator("aten::item", start + 9100, 10), operator("aten::mm", start + 9110, 9000),
        )
    ]  # fmt: skip


def test_a_number_that_a_segment_reads_at_once_is_named(tmp_path):
    path = write(tmp_path / "trace.json", reductions("mlp(B)"))
    (verdict,) = analyze_files([path], pictures=False).devices[0].analysis.verdicts
    assert (verdict.kind, verdict.place, verdict.cost_us) == ("host-sync", "mlp(B)", 4 * 5050)
    assert verdict.gain_us == pytest.approx(4 * 5050, abs=100)


def test_outside_of_segments_a_blocking_sum_is_only_a_wait(tmp_path):
    case = case_of_events(reductions("step"), tmp_path)
    assert [name for name, *_ in waits(case)] == [BLOCKED] * 4
    (verdict,) = analyze_files([tmp_path / "events.json"], pictures=False).devices[0].analysis.verdicts
    assert (verdict.kind, verdict.cost_us) == ("nothing-to-overlap", 4 * 5000)
