"""For each cause: a small job that has it, and the nearest job that does not. What is said about both."""

from dataclasses import replace

import pytest

from tests.support.diagnosed import verdicts_of
from tests.support.faults import run
from tests.support.faults.program import Await, Begin, Collective, End, Item, Job, Kernel, Machine, Python, Record

MACHINE = Machine(
    call_us=5, launch_us=5, latency_us=3, gap_us=1, slower_beside_transfers=0, slower_beside_computation=0
)  # fmt: skip
RANKS = (0, 1)
LAYERS = 8
ALONE = "nothing-to-overlap"


def verdicts(layer, folder, ranks=RANKS, **machine):
    """What is said about a job. layer: the operations of a rank in each layer."""
    programs = {rank: tuple(op for i in range(LAYERS) for op in layer(i, rank)) for rank in ranks}
    return verdicts_of(Job(programs, replace(MACHINE, **machine), dict.fromkeys(("ep", "dp"), (ranks,))), folder)


def transfer(key, us, after, group="ep", stream="ep", elements=1_000_000, label="", ranks=RANKS):
    return Collective(key, "all_to_allv", group, ranks, us, elements, stream, after, label)


def labeled(label, us):
    return Begin(label), Kernel(f"kernel of {label}", us), End()


def sent_between(i, us, *beside, a=300, c=100, **options):
    """A transfer of the output of a, beside b, and c, which needs it."""
    return (
        Kernel("a", a),
        Record(f"a {i}"),
        transfer(f"t {i}", us, f"a {i}", **options),
        *beside,
        Await(f"done t {i}"),
        Kernel("c", c),
    )


def host_takes(us, kernel_us):
    return lambda *_: [Python(us), Kernel("a", kernel_us)] * 4


def reads(chosen, us=100):
    return lambda i, _: (Kernel("a", us), Kernel("b", us), *([Item()] if i in chosen else []))


def launched(late):
    """A dispatch behind weight gradients, which it does not need, or directly after its input."""

    def layer(i, _):
        dispatch = transfer(f"dispatch {i}", 300, f"{'W' if late else 'F'} {i}", label="dispatch(F)")
        return (
            *labeled("attn(F)", 300), Record(f"F {i}"), *([] if late else [dispatch]),
            *labeled("mlp(W)", 310), Record(f"W {i}"), *([dispatch] if late else []),
            *labeled("mlp(B)", 50), Await(f"done dispatch {i}"), *labeled("mlp(F)", 300),
        )  # fmt: skip

    return layer


def behind(late):
    """A dispatch behind the long dispatch of the other chunk, whose input came later, or before it."""

    def layer(i, _):
        own = transfer(f"own {i}", 200, f"F {i}", label="dispatch(F)")
        other = transfer(f"other {i}", 600, f"B {i}", label="dispatch(B)", elements=3_000_000)
        sent = (*labeled("mlp(B)", 50), Record(f"B {i}"), *((other, own) if late else (own, other)))
        return (
            *labeled("attn(F)", 300), Record(f"F {i}"), *sent, *labeled("mlp(W)", 310), Await(f"done own {i}"),
            *labeled("mlp(F)", 300), Await(f"done other {i}"), *labeled("attn(B)", 300),
        )  # fmt: skip

    return layer


def half_beside(i, _):
    """A transfer beside computation in every other layer, otherwise alone."""
    wait, beside = Await(f"done t {i}"), Kernel("b", 300)
    return (
        Kernel("a", 100),
        Record(f"a {i}"),
        transfer(f"t {i}", 300, f"a {i}"),
        *((beside, wait) if i % 2 else (wait, beside)),
    )


def sends(ahead):
    """Computation that needs what arrives now, or what arrived some micro-batches before."""

    def layer(i, rank):
        sent = Collective(f"p {i}", "recv" if rank else "send", "ep", RANKS, 100, 1, "ep", f"a {i}", peers=(0, 1))
        return (
            Kernel("a", 300),
            Record(f"a {i}"),
            sent,
            *([Await(f"done p {i - ahead}")] if rank and i >= ahead else []),
        )

    return layer


def slow(every, us, elements):
    """Some transfers take longer, with this size."""
    return lambda i, _: sent_between(
        i,
        us if i % every == every - 1 else 100,
        Kernel("b", 150),
        elements=elements if i % every == every - 1 else 1_000_000,
    )


def small(number, us, elements=1000):
    return lambda i, _: (
        Kernel("a", 300), Record(f"a {i}"),
        *(transfer(f"t {i} {n}", us, f"a {i}", elements=elements) for n in range(number)),
        Await(f"done t {i} {number - 1}"), Kernel("b", 100),
    )  # fmt: skip


CASES = {
    "a number in each layer": (reads(range(LAYERS)), {"host-sync"}, {"ranks": (0,)}),
    "a number at the end": (reads([LAYERS - 1]), set(), {"ranks": (0,)}),
    "14 us of 1,060": (reads([3], 65), {"host-sync"}, {"ranks": (0,)}),
    "14 us of 2,430": (reads([3], 150), set(), {"ranks": (0,)}),
    "a host that takes 40 us": (host_takes(30, 20), {"host-bound"}, {"ranks": (0,)}),
    "longer kernels": (host_takes(30, 60), set(), {"ranks": (0,)}),
    "a long latency": (host_takes(30, 5), set(), {"ranks": (0,), "latency_us": 40}),
    "gaps of short kernels": (host_takes(0, 5), {"short-kernels"}, {"ranks": (0,), "call_us": 0, "launch_us": 1}),
    "launched late": (launched(True), {"late-launch"}, {}),
    "launched in time": (launched(False), set(), {}),
    "behind a transfer whose data came later": (behind(True), {"late-launch", ALONE}, {}),
    "before it": (behind(False), {ALONE}, {}),
    "a slower rank": (lambda i, rank: sent_between(i, 100, Kernel("b", 150), a=300 + 90 * rank), {"imbalance"}, {}),
    "equal ranks": (lambda i, _: sent_between(i, 100, Kernel("b", 150)), set(), {}),
    "1.5% of the transfers": (lambda i, rank: sent_between(i, 1000, a=100 + 15 * rank), {ALONE}, {}),
    "4% of the transfers": (lambda i, rank: sent_between(i, 1000, a=100 + 40 * rank), {"imbalance", ALONE}, {}),
    "every fourth is slow": (slow(4, 300, 1_000_000), {"slow-transfer"}, {}),
    "every fourth is larger": (slow(4, 300, 3_000_000), {ALONE}, {}),
    "every fourth is a little slower": (slow(4, 130, 1_000_000), set(), {}),
    "slower beside computation": (half_beside, {"starved-transfer", ALONE}, {"slower_beside_computation": 0.5}),
    "a little slower": (half_beside, {ALONE}, {"slower_beside_computation": 0.05}),
    "kernels slower beside transfers": (half_beside, {"starved-computation", ALONE}, {"slower_beside_transfers": 0.5}),
    "kernels a little slower": (half_beside, {ALONE}, {"slower_beside_transfers": 0.05}),
    "what arrives now": (sends(0), {"exposed-pipeline"}, {}),
    "what arrived before": (sends(1), set(), {}),
    "in the same queue": (sends(LAYERS), {"few-queues"}, {"queues": 1}),
    "nothing beside": (lambda i, _: sent_between(i, 100), {ALONE}, {}),
    "enough beside": (lambda i, _: sent_between(i, 100, Kernel("b", 150)), set(), {}),
    "a tail of 3 us": (lambda i, _: sent_between(i, 303, Kernel("b", 300)), set(), {}),
    "a tail of 150 us": (lambda i, _: sent_between(i, 450, Kernel("b", 300)), {ALONE}, {}),
    "many small transfers": (small(6, 40), {"small-messages", ALONE}, {}),
    "large ones": (small(6, 40, 1_000_000), {ALONE}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_said(name, tmp_path):
    layer, kinds, options = CASES[name]
    found = verdicts(layer, tmp_path, **options)
    assert {verdict.kind for _, verdict in found} == kinds
    assert all(verdict.share > 0 for _, verdict in found)


@pytest.mark.parametrize("launch_us", [7, 15, 30])
def test_the_gain_without_late_launches_has_no_time_in_the_calls(launch_us, tmp_path):
    """A host that takes no time lets the kernels run one after another."""
    job = Job({0: (Kernel("a", 2),) * 40}, replace(MACHINE, call_us=0, launch_us=launch_us), {})
    [(_, verdict)] = [item for item in verdicts_of(job, tmp_path) if item[1].kind == "host-bound"]
    assert verdict.gain_us == pytest.approx(run(job).window_us - run(job.on(launch_us=0)).window_us)
