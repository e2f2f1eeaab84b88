"""`profile run`: equal results of both runs, balanced routing, modeled links, the report, defaults, and the bound."""

import json
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.cli import main
from moe_dualpipe.expert_parallel import Link, Loopback
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.overlap.pair_time import Await, Begin, Computation, least_time
from moe_dualpipe.tools.profiler import NAMES, analyze, measure, read_trace
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.host import as_device
from moe_dualpipe.tools.profiler.measure import possible_share, recorded_events
from moe_dualpipe.tools.profiler.pair import Pair, PairWorkload
from moe_dualpipe.tools.profiler.reading import trace_paths
from tests.support.traces import annotation, kernel, operator, write

MODEL = ModelConfig(
    hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, expert_size=12, num_experts=8, experts_per_token=3,
    init_std=0.3,
)  # fmt: skip
LATENT = replace(MODEL, attention="mla", num_heads=3, head_dim=5, q_rank=9, kv_rank=6, rope_dim=4, value_dim=7)
CPU = torch.device("cpu")
WORKLOAD = PairWorkload("train", "a small one", MODEL, 2, 8, 24, "balanced", CPU, torch.float32)
SMALL = ["profile", "run", "--num-layers", "2", "--seq-len", "16", "--tokens", "32", "--ep", "4"]


@pytest.mark.parametrize("mode,sequences,routing,model", [
    ("train", 3, "balanced", MODEL), ("train", 3, "real", LATENT), ("prefill", 3, "real", MODEL),
    ("prefill", 3, "balanced", LATENT), ("decode", 24, "balanced", MODEL), ("decode", 24, "real", LATENT),
], ids=lambda value: f"attention {value.attention}" if isinstance(value, ModelConfig) else None)  # fmt: skip
def test_both_runs_give_equal_outputs_and_gradients(mode, sequences, routing, model):
    pair = Pair(replace(WORKLOAD, mode=mode, routing=routing, model=model), Loopback(8, 4))
    assert pair.workload.num_sequences == sequences
    results: list[list[torch.Tensor]] = []
    inputs: list[torch.Tensor] = []
    pair.stage.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    tokens: set[int] = set()  # of each expert
    for name, layer in pair.stage.named_modules():
        if name.endswith(".router"):
            layer.register_forward_hook(lambda *given: tokens.update(given[-1][1].flatten().bincount().tolist()))
    for run in (pair.sequential, pair.overlapped):
        torch.manual_seed(1)  # for the cached keys and values
        pair.prepare()
        if mode == "decode":
            assert [cache.length for _, _, cache in pair._chunks] == [8, 8]
        output = run()
        if mode == "train":
            assert inputs[0].grad is not None
            inputs.clear()
        grads = [parameter.grad for parameter in pair.stage.parameters()]
        assert all((grad is not None) == (mode == "train") for grad in grads)
        results.append([output.detach(), *(grad.clone() for grad in grads if grad is not None)])
    assert (tokens == {9}) == (routing == "balanced")
    assert results[0][0].shape == (sequences, 1 if mode == "decode" else 8, 16)
    for sequential, overlapped in zip(*results, strict=True):
        assert torch.equal(sequential, overlapped)


@pytest.mark.parametrize(("mode", "saved"), [("prefill", 768 + 768), ("train", 768 + 752)])
def test_bytes_of_rows_in_fp8(mode, saved):
    """A row of 256 numbers: 1,024 bytes, or 256 and 2 scales in 272 bytes, which leave in two dispatches: of two
    forwards, or of a forward and of gradients. In a forward, each row has two more fields, and 128 n bytes in all."""
    model, sent = replace(MODEL, hidden_size=256, experts_per_token=1), {}
    for fp8 in ("off", "experts", "experts+dispatch"):
        backend = Loopback(8, 4)
        pair = Pair(replace(WORKLOAD, mode=mode, model=model, fp8=fp8), backend)
        pair.prepare()
        before = backend.bytes_sent
        pair.overlapped()
        sent[fp8] = backend.bytes_sent - before
    remote = 24 * 3 // 4  # rows of experts on other ranks, with one expert for each token
    assert sent["off"] == sent["experts"]
    assert sent["off"] - sent["experts+dispatch"] == WORKLOAD.layers * remote * saved


# ---- The command ----


@pytest.mark.parametrize("mode,tokens,num_comm", [
    # two layers: dispatch and combine of a forward, and of a backward or another forward; the sizes of each forward
    ("train", "in sequences of 16", 2 * (4 + 1)), ("prefill", "in sequences of 16", 2 * (4 + 2)),
    ("decode", "with 16 cached tokens each", 2 * (4 + 2)),
], ids=["train", "prefill", "decode"])  # fmt: skip
@pytest.mark.quick("train")
def test_run_writes_a_report_recordings_and_pictures(tmp_path, capsys, mode, tokens, num_comm):
    link = ["--link-gbps", "0.1", "--link-latency-us", "50"]
    assert main([*SMALL, *link, "--mode", mode, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and lines[1] == "modeled link: 0.1 Gb/s, latency 50 us"
    assert lines[0].startswith(f"{mode} on cpu in float32: 2 layers of tiny, 32 tokens {tokens}, balanced routing; ")
    files = ["overlapped.json.gz", "perfetto.json.gz", "report.json", "sequential.json.gz", "timeline.png"]
    assert lines[-1] == f"in {tmp_path}: {', '.join(files)}"
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert [path.name for path in trace_paths([tmp_path])] == ["overlapped.json.gz", "sequential.json.gz"]
    report = json.loads((tmp_path / "report.json").read_text())
    sequential, overlapped = report["sequential"], report["overlapped"]
    assert report["bound_us"] == max(min(sequential[key], overlapped[key]) for key in ("compute_us", "comm_us"))
    assert overlapped["window_us"] >= report["bound_us"]
    labels = {f"{name}({kind})" for name in ("attn", "mlp", "dispatch", "combine") for kind in "FB"}
    phases = {phase["name"] for phase in overlapped["phases"]}
    assert mode != "train" or labels | {"attn(W)", "mlp(W)"} <= phases
    for analysis, run in ((sequential, "sequential"), (overlapped, "overlapped")):
        assert {one for one in labels if "(F)" in one} <= {phase["name"] for phase in analysis["phases"]}
        assert analysis["trace"] == str(tmp_path / f"{run}.json.gz")
        assert read_trace(analysis["trace"]).num_events > 100
        assert analysis["num_comm"] == num_comm and analysis["comm_us"] >= 8 * 50
        assert sum(row["us"] for row in analysis["account"]) == pytest.approx(analysis["window_us"])
    possible, reached = report["possible_fraction"], overlapped["hidden_fraction"]
    assert 0 < reached <= possible + 1e-6 <= 1 + 1e-6
    assert f"hidden communication: {possible:.1%} possible, reached {reached:.1%} overlapped, " in out
    assert "| sequential, us | overlapped, us |" in out


@pytest.mark.parametrize("options,problem", [
    (["--preset", "huge"], "unknown preset 'huge'; choose from: tiny, small, olmoe-1b-7b"),
    (["--ep", "3"], "8 experts cannot be divided evenly over 3 ranks"),
    (["--num-layers", "0"], "--num-layers must be at least 1: got 0"),
    (["--tokens", "33"], "--tokens 33 must be a multiple of --seq-len 16: use 48"),
    (["--seq-len", "-4"], "--seq-len must be at least 1: got -4"),
    (["--link-gbps", "-1"], "--link-gbps must be at least 0.001: got -1.0"),
    (["--link-latency-us", "9"], "--link-latency-us needs --link-gbps"),
    (["--link-gbps", "9", "--replay", "deepseek"], "--replay sets the transfer times: leave out --link-gbps"),
    (["--out", "/dev/null/x"], "cannot write to --out /dev/null/x: Not a directory"),
    (["--device", "cuda"], "torch finds no GPU on this machine; use --device cpu"),
    ([], "for real ranks, use train.py --profile"),
])  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_invalid_run_options(options, problem, capsys, tmp_path, monkeypatch):
    if not options:  # under torchrun
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*SMALL, "--out", str(tmp_path), *options]) == 2
    err = capsys.readouterr().err
    assert problem in err and err.count("\n") == 1


# ---- The link and the defaults ----


LARGE = PairWorkload("train", "some", ModelConfig(num_experts=8), 2, 1024, 4096, "balanced", CPU, torch.float32)


def test_the_default_link_depends_on_the_computation_time(monkeypatch):
    """25 MB in half of 2 s are 25 MB per second."""
    backend, pair = Loopback(8, 4), SimpleNamespace(workload=LARGE)
    monkeypatch.setattr(measure, "time_computation", lambda *_: (2.0, 25_000_000))
    words = measure.set_link(pair, backend, None, 3)  # type: ignore[arg-type]
    assert backend.link.gb_per_s == pytest.approx(0.025) and not backend.link.latency_us
    assert words == "modeled link: 0.2 Gb/s, latency 0 us: 25.0 MB take 0.5 of the computation time, 2,000 ms"
    pair.workload = replace(LARGE, device=torch.device("cuda"))
    assert measure.set_link(pair, backend, None, 3) == "modeled link: 400 Gb/s, latency 10 us"  # type: ignore[arg-type]
    monkeypatch.setattr(measure, "time_computation", lambda *_: (2.0, 0))
    assert measure.set_link(pair, backend, None, 3) == "modeled link: unused, there is only one rank"  # type: ignore[arg-type]


@pytest.mark.parametrize("link,problem", [
    (Link(gb_per_s=1e-6), "the link is too slow: 90.0 kB in 8 transfers would take 90 s; use a faster link"),
    (Link(gb_per_s=1, latency_us=8e6), "in 8 transfers would take 64 s;"),
])  # fmt: skip
def test_a_slow_link_is_refused(monkeypatch, link, problem):
    monkeypatch.setattr(measure, "time_computation", lambda *_: (2.0, 90_000))
    pair = SimpleNamespace(workload=LARGE)
    with pytest.raises(ValueError, match=problem):
        measure.set_link(pair, Loopback(8, 4), link, 3)  # type: ignore[arg-type]


def test_default_ranks_divide_the_experts():
    assert [measure.default_ranks(experts) for experts in (1, 8, 64, 72, 160, 256)] == [1, 8, 64, 36, 40, 64]


@pytest.mark.parametrize("mode,seq,tokens,expected", [
    ("train", None, None, (1024, 4096)), ("prefill", 512, None, (512, 4096)), ("train", 3000, None, (3000, 3000)),
    ("decode", None, None, (1024, 128)), ("decode", 100, 7, (100, 7)), ("train", 8192, None, (8192, 8192)),
])  # fmt: skip
def test_default_sizes(mode, seq, tokens, expected):
    work = PairWorkload.from_preset(mode, "tiny", 1, seq, tokens)
    assert (work.seq, work.tokens) == expected


# ---- The share of communication that could be hidden: worked out by hand, and never below what a run reached ----


LABELS = "dispatch(F)", "combine(F)", "dispatch(B)", "sizes"
computes, starts = (
    st.builds(Computation, st.integers(0, 6)),
    st.builds(Begin, st.sampled_from(LABELS), st.integers(0, 9)),
)
drawn = st.lists(computes | computes | starts | st.builds(Await, st.sampled_from(LABELS)), max_size=14)


D, C = "dispatch(F)", "combine(F)"


@pytest.mark.parametrize(("events", "least"), [
    ([], 0),
    ([Begin(D, 5), Computation(3), Await(D)], 5),
    ([Begin(D, 5), Computation(9), Await(D), Computation(1)], 10),
    ([Begin(D, 5), Computation(9)], 9),  # nothing waits for it
    ([Begin(D, 4), Begin(C, 3), Computation(2), Await(C)], 7),  # one link: the second follows the first
    ([Computation(6), Begin(D, 4), Await(D)], 10),  # not before it is launched
    ([Begin(D, 2), Begin(D, 6), Await(D), Computation(1), Await(D)], 8),  # waits take transfers in their order
    ([Begin(D, 2), Begin(D, 6), Await(D), Computation(9), Await(D)], 11),
    ([Await(D), Computation(3), Begin(D, 2), Await(C)], 3),  # a wait without a transfer
])  # fmt: skip
def test_the_least_time_of_events_and_the_share_that_it_hides(events, least):
    assert least_time(events) == least
    sending = sum(event.time for event in events if isinstance(event, Begin))
    computing = sum(event.time for event in events if isinstance(event, Computation))
    expected = pytest.approx(1 - (least - computing) / sending) if sending else None
    assert possible_share(events) == expected


def recorded(path, events, gaps):
    """Write the recording of a CPU that ran the events, with a gap of so many us before each."""
    clock, link, found, arrives = 10.0, 0.0, [], {label: deque() for label in LABELS}
    for event, gap in zip(events, gaps, strict=True):
        clock += gap
        match event:
            case Computation(time):
                found.append(operator("aten::mm", clock, time))
                clock += time
            case Begin(label, time):
                named = "prepare dispatch(F)" if label == "sizes" else label
                found += [annotation(named, clock, 0.5), annotation("link::carry", clock, 0.5)]
                link = max(link, clock)
                found.append(annotation("link:carry", link, time, thread=2))
                link += time
                arrives[label].append(link)
                clock += 0.5
            case Await(label):
                end = max(clock, arrives[label].popleft()) if arrives[label] else clock
                found += [
                    annotation(f"wait for {label}", clock, end - clock),
                    annotation("link::wait", clock, end - clock),
                ]
                clock = end
    return write(path, found)


@settings(max_examples=50, deadline=None)
@given(drawn, st.data())
def test_a_run_never_hides_more_than_possible(tmp_path_factory, events, data):
    path = tmp_path_factory.mktemp("bound") / "trace.json"
    events = [
        Computation(3),
        Begin("dispatch(F)", 7),
        *(e._replace(time=e.time + 1) if isinstance(e, Begin) else e for e in events),
    ]
    slow = data.draw(st.booleans())
    gaps = [data.draw(st.integers(0, 5)) if slow else 0 for _ in events]
    trace = as_device(read_trace(recorded(path, events, gaps)), NAMES)
    (analysis,), found = analyze(trace), recorded_events(trace)
    assert [e for e in found if isinstance(e, Begin)] == [
        Begin(e.label, pytest.approx(e.time)) for e in events if isinstance(e, Begin)
    ]  # fmt: skip
    possible, reached = possible_share(found), analysis.hidden_fraction
    assert possible is not None and reached is not None and reached <= possible + 1e-6
    if not slow:  # only the calls that start a transfer take time, half a us each
        assert possible == pytest.approx(possible_share(events), abs=0.6 * len(events) / 8)


def test_the_report_says_which_computation_is_too_short_and_by_how_much(tmp_path):
    """Two dispatches of 40 and 60 us. 20 us of mlp(B), 6 us of mlp(W) and 2 us of attn(W) run beside each, so 12 and
    32 us are exposed: 22 us each. attn(W) is less than a tenth of what runs beside them."""
    events, runs = [], {}
    for start, time in ((10, 40), (200, 60)):
        events += [annotation("dispatch(F)", start, 1), annotation("link::carry", start, 1)]
        events.append(annotation("link:carry", start, time, thread=2))
        for name, at, length in (("mlp(B)", 2, 20), ("mlp(W)", 22, 6), ("attn(W)", 28, 2), ("mlp(F)", time, 50)):
            events += [annotation(name, start + at, length), operator("aten::mm", start + at, length)]
        wait = start + 30, time - 30
        events += [annotation("wait for dispatch(F)", *wait), annotation("link::wait", *wait)]
    for run in measure.RUNS:
        runs[run] = analyze_files([write(tmp_path / f"{run}.json", events)])
    text = measure.Measurement(WORKLOAD, 4, "a link", runs).as_text()
    assert text.endswith(
        "exposed most: dispatch(F), 22 us of 50 us each. To hide it, what runs beside it (mlp(B), mlp(W)) would have "
        "to take 22 us longer"
    )


def test_transfers_at_the_same_time_share_the_link(tmp_path):
    events = [
        operator("aten::mm", 0, 4), annotation("dispatch(F)", 4, 1), annotation("link::carry", 4, 1),
        annotation("link:carry", 5, 10, thread=2), annotation("dispatch(B)", 6, 1), annotation("link::carry", 6, 1),
        annotation("link:carry", 7, 12, thread=3), operator("aten::mm", 8, 6),
    ]  # fmt: skip
    found = recorded_events(as_device(read_trace(write(tmp_path / "a.json", events)), NAMES))
    assert [event for event in found if isinstance(event, Begin)] == [
        Begin("dispatch(F)", 11),
        Begin("dispatch(B)", 4),
    ]
    assert sum(event.time for event in found if isinstance(event, Computation)) == 10


def test_a_gpu_has_no_bound(tmp_path):
    assert possible_share(recorded_events(read_trace(write(tmp_path / "a.json", [kernel("nccl", 0, 1)])))) is None
