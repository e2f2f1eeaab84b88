"""This project's own runs on CPUs are explained, and a delay of one kind of transfer is found in that kind's entry."""

import dataclasses

import pytest

from moe_dualpipe.schedule import NAMES as SCHEDULES
from moe_dualpipe.tools.profiler.account import TRANSFER, totals
from moe_dualpipe.tools.profiler.doctor.verdict import CAUSES
from moe_dualpipe.tools.profiler.files import analyze_files
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, settings, train
from tests.support.traces import annotation, operator, write

RUNS = {
    **{schedule: (2, {"schedule": schedule}) for schedule in SCHEDULES},
    **{f"ep 2, {backend}": (2, {"pp": 1, "ep": 2, "ep_backend": backend}) for backend in ("shared", "all_to_all")},
    "cp 2": (2, {"pp": 1, "cp": 2}),
    **{f"pp 2, ep 2, {name}": (4, {"pp": 2, "ep": 2, "ep_backend": name}) for name in ("shared", "all_to_all")},
    "pp 2, cp 2": (4, {"pp": 2, "cp": 2}),
}
ONE_CHUNK, TOO_SHORT = (CAUSES[f"nothing-to-overlap/{variant}"].title for variant in ("one chunk", "interleaved"))


@pytest.mark.long  # measures times of real runs, which depend on what else the machine does
@pytest.mark.parametrize("name", RUNS)
def test_own_runs_are_explained_by_what_they_have(name, tmp_path):
    """To 95% of each rank's window."""
    num_ranks, layout = RUNS[name]
    model = dataclasses.replace(MODEL, num_layers=4)
    run_ranks(num_ranks, train, settings(tmp_path, profile=2, steps=4, batch_size=8, model=model, **layout))
    for device in analyze_files([*(tmp_path / "profile").glob("rank*.json.gz")]).devices:
        analysis = device.analysis
        assert sum(total.us for total in analysis.unexplained) < 0.05 * analysis.window_us, analysis.unexplained[:3]
        titles = {verdict.title for verdict in analysis.verdicts}
        if not {"ep", "cp"} & layout.keys():
            assert not {ONE_CHUNK, TOO_SHORT} & titles
        if layout.get("pp", 2) == 1:
            assert CAUSES["exposed-pipeline"].title not in titles


KINDS = "gloo:recv", "dispatch(F)", "gloo:all_to_all in sum gradients", "gloo:broadcast in gather weights"
_CAUSES = "exposed-pipeline", "nothing-to-overlap", "sum-at-end", "exposed-weights"
CAUSE_OF = dict(zip(KINDS, _CAUSES, strict=True))


def recorded(late, delay):
    """Three steps of a rank. In each, it waits 10 ms for each of four transfers, and `delay` longer for `late`."""
    events, now = [], 0.0

    def work(name, *parts):
        nonlocal now
        start = now
        for part, us in parts:
            events.append(operator(part, now, us))
            now += us
        events.append(annotation(name, start, now - start))

    def waits(kind, call, transfer, thread, posted=None):
        nonlocal now
        start = now if posted is None else posted
        now += 10_000 + delay * (kind == late)
        events.extend([operator(call, start, 10), annotation(transfer, start + 10, now - start - 10, thread)])

    for number in range(3):
        begin = now
        now += 20
        work("0F0", ("aten::mm", 30_000))
        waits("gloo:recv", "c10d::recv_", "gloo:recv", thread=1, posted=begin)
        work("1F0", ("aten::mm", 20_000))
        events.append(annotation("dispatch(F)", now, 60))
        waits("dispatch(F)", "link::carry", "link:carry", thread=5)
        events.append(annotation("wait for dispatch(F)", now - 9000, 9000))
        work("mlp(F)", ("aten::mm", 20_000))
        for label, call, name in (
            ("sum gradients", "c10d::alltoall_base_", "gloo:all_to_all"),
            ("gather weights", "c10d::broadcast_", "gloo:broadcast"),
        ):
            events.append(annotation(f"{label} of stage 0", now, 20))
            waits(f"{name} in {label}", call, name, thread=6)
            work("optimizer", ("aten::mul", 5000))
        events.append(annotation(f"step {number}", begin, now - begin))
    return events


@pytest.mark.parametrize("late", KINDS)
def test_a_delay_of_one_kind_of_transfer_is_in_its_entry(late, tmp_path):
    """A receive that was posted long ago counts from when the thread waits for it."""

    def exposed(delay):
        [device] = analyze_files([write(tmp_path / "t.json", recorded(late, delay))]).devices
        every = totals(device.analysis.account)
        sums = {kind: sum(t.us for t in every if t.kind == TRANSFER and t.detail.startswith(kind)) for kind in KINDS}
        return sums, {verdict.kind: verdict.cost_us for verdict in device.analysis.verdicts}, device.analysis

    (before, _, _), (after, causes, analysis) = exposed(0.0), exposed(7000.0)
    for kind in KINDS:
        assert after[kind] - before[kind] == pytest.approx(3 * 7000 if kind == late else 0, abs=100), kind
    assert {*CAUSE_OF.values()} <= causes.keys()
    assert causes[CAUSE_OF[late]] == pytest.approx(3 * 17_000, rel=0.05)
    assert sum(total.us for total in analysis.unexplained) < 0.01 * analysis.window_us
