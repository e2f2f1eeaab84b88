"""`profile run`: the report, the recordings that are kept, the link, and the defaults."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.cli import main
from moe_dualpipe.commands import profile_run
from moe_dualpipe.commands.profile_run import _device
from moe_dualpipe.expert_parallel import Link, Loopback
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.tools.profiler import measure
from moe_dualpipe.tools.profiler.bound import Compute, Start, Wait
from moe_dualpipe.tools.profiler.files import TracedDevice, analyze_files
from moe_dualpipe.tools.profiler.pair import Workload
from moe_dualpipe.tools.profiler.pictures import lanes
from moe_dualpipe.tools.profiler.reports.overlap import measurement_text
from tests.support.traces import annotation, kernel, launch, write

CPU = torch.device("cpu")
WORKLOAD = Workload("train", "some", ModelConfig(num_experts=8), 2, 1024, 4096, "balanced", CPU, torch.float32)


def recording(path, hidden, rank=0):
    """1,000 us of computation and 600 us of communication, `hidden` of them before the end of the computation."""
    return write(
        path,
        [
            annotation("mlp(F)", 0, 10), launch(1, 1), kernel("gemm", 100, 1000, correlation=1),
            annotation("dispatch(F)", 20, 10), launch(2, 21),
            kernel("ncclDevKernel", 1100 - hidden, 600, stream=9, correlation=2),
        ],
        distributedInfo={"rank": rank},
    )  # fmt: skip


def measured(folder, ranks=1):
    ways = {"sequential": 0, "overlapped": 450}
    files = {
        way: analyze_files([recording(folder / f"{way}-rank{rank}.json", early, rank) for rank in range(ranks)])
        for way, early in ways.items()
    }
    return measure.Measurement(WORKLOAD, ranks, "a link", files)


def test_text_of_both_runs(tmp_path):
    text = measurement_text(measured(tmp_path))
    assert (
        text
        == """\
train on cpu in float32: 2 layers of some, 4,096 tokens in sequences of 1,024, balanced routing; experts over 1 rank
a link

|                                   | sequential, us | overlapped, us |
|-----------------------------------|---------------:|---------------:|
| window                            |          1,600 |          1,150 |
| computation                       |          1,000 |          1,000 |
| exposed communication             |            600 |            150 |
| communication, hidden and exposed |            600 |            600 |
| - hidden behind computation       |              0 |            450 |

| us per layer and micro-batch: sequential -> overlapped | computation | communication |   exposed |
|--------------------------------------------------------|------------:|--------------:|----------:|
| mlp(F)                                                 |  500 -> 500 |               |           |
| dispatch(F)                                            |             |    300 -> 300 | 300 -> 75 |

lower bound (computation or communication alone, whichever is longer): 1,000 us
overlapped: 1.15 of the bound, 0.72 of sequential
hidden communication: 75.0% overlapped, 0.0% sequential"""
    )


def test_text_of_several_ranks(tmp_path):
    text = measurement_text(replace(measured(tmp_path, ranks=2), possible=0.9812))
    assert "hidden communication: 98.1% possible, reached 75.0% overlapped, 0.0% sequential" in text
    parts = text.split("\n\n")
    assert [part.split("\n")[0][:20] for part in parts[2:]] == [
        "| us per layer and m", "overlapped, by rank:", "|        | window, u", "lower bound (computa",
    ]  # fmt: skip
    assert [row.split("|")[1].strip() for row in parts[4].split("\n")[2:]] == ["rank 0", "rank 1"]


def test_pictures_and_file_names(tmp_path):
    found = measured(tmp_path, ranks=2)
    assert [picture.title for picture in lanes.measurement_pictures(found)] == [
        "rank 0, sequential: 1.6 ms, 0.0% of the communication is hidden (1 kernel, on up to 1 thread blocks).",
        "rank 0, overlapped: 1.1 ms, 75.0% of the communication is hidden (1 kernel, on up to 1 thread blocks).",
    ]
    assert found.recordings == [f"{run}-rank{rank}.json" for run in measure.RUNS for rank in range(2)]


def test_rank_0_gathers_the_devices_of_all_ranks_without_blocks(tmp_path, monkeypatch):
    own = [analyze_files([recording(tmp_path / f"{rank}.json", 0, rank)]) for rank in range(2)]
    sent: list[list[TracedDevice]] = []

    def gather_object(devices, everyone):
        sent.append(devices)
        if everyone is not None:
            everyone[:] = reversed(sent)

    monkeypatch.setattr(dist, "gather_object", gather_object)
    found = own[0]
    for rank in (1, 0):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        found = measure._gather(own[rank], world=2)
        assert (found is own[1]) == (rank == 1)
    assert [(device.rank, bool(device.work)) for device in found.devices] == [(0, True), (1, False)]
    assert len(found.skews) == 2


def test_errors_of_a_rank_name_the_rank(monkeypatch):
    with pytest.raises(OSError, match="disk full"), measure._named_failures(1):
        raise OSError("disk full")
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(RuntimeError, match="rank 3: disk full"), measure._named_failures(4):
        raise OSError("disk full")


@pytest.mark.parametrize("windows,kept", [((1, 5, 3, 4), 3), ((4, 9, 3, 4), 3), ((1, 2, 1, 1), 2), ((9, 7), 1)])
def test_the_recording_of_median_length_is_kept_without_the_warm_up(tmp_path, monkeypatch, windows, kept):
    done: list[str] = []

    @contextlib.contextmanager
    def capture(path, _):
        yield
        path.write_text(path.name)

    def analyze(paths, **_):
        analysis = SimpleNamespace(window_us=windows[int(paths[0].name.split("-")[1][0])])
        return SimpleNamespace(devices=[SimpleNamespace(analysis=analysis)])

    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "analyze_files", analyze)
    pair = SimpleNamespace(
        workload=WORKLOAD, prepare=lambda: done.append("prepare"), sequential=lambda: done.append("sequential"),
        overlapped=lambda: done.append("overlapped"),
    )  # fmt: skip
    found = measure._record(pair, tmp_path, len(windows) - 1, "")  # type: ignore[arg-type]
    assert found == {run: tmp_path / f"{run}.json.gz" for run in measure.RUNS}
    assert [path.read_text() for path in found.values()] == [f"{run}-{kept}.json.gz" for run in measure.RUNS]
    assert len([*tmp_path.iterdir()]) == 2
    assert done == ["prepare", "sequential", "prepare", "overlapped"] * len(windows)


def test_the_default_link_depends_on_the_computation_time(monkeypatch):
    """35 MB in 0.7 of 2 s are 25 MB per second. The share is chosen on a link with which it is 0.3."""
    backend, pair, links = Loopback(8, 4), SimpleNamespace(workload=WORKLOAD), []
    monkeypatch.setattr(measure, "_hidden_share", lambda _: links.append(backend.link.gb_per_s) or 0.7)
    monkeypatch.setattr(measure, "_time_computation", lambda *_: (2.0, 35_000_000))
    words = measure._set_link(pair, backend, None, 3)  # type: ignore[arg-type]
    assert backend.link.gb_per_s == pytest.approx(0.025) and not backend.link.latency_us
    assert links == [pytest.approx(0.035 / 0.6)]
    assert words == ("modeled link: 0.2 Gb/s, latency 0 us: 35.0 MB take 0.7 of the computation time, 2,000 ms")
    pair.workload = replace(WORKLOAD, device=torch.device("cuda"))
    assert measure._set_link(pair, backend, None, 3) == "modeled link: 400 Gb/s, latency 10 us"  # type: ignore[arg-type]
    monkeypatch.setattr(measure, "_time_computation", lambda *_: (2.0, 0))
    assert measure._set_link(pair, backend, None, 3) == "modeled link: unused, there is only one rank"  # type: ignore[arg-type]


@pytest.mark.parametrize("beside,share", [(100, 0.7), (58, 0.55), (36, 0.3), (5, 0.3)])
def test_the_default_link_is_the_slowest_that_lets_98_percent_be_hidden(monkeypatch, beside, share):
    """One transfer, beside a part of 100 us of computation. At the share s it takes 100 s us."""
    events = [Compute(100 - beside), Start("dispatch(F)", 7), Compute(beside), Wait("dispatch(F)")]
    monkeypatch.setattr(measure, "capture", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(measure, "read_trace", lambda _: None)
    monkeypatch.setattr(measure, "recorded_events", lambda _: events)
    pair = SimpleNamespace(workload=WORKLOAD, prepare=lambda: None, overlapped=lambda: None)
    assert measure._hidden_share(pair) == share  # type: ignore[arg-type]


@pytest.mark.parametrize("link,problem", [
    (Link(gb_per_s=1e-6), "the link is too slow: 90.0 kB in 8 transfers would take 90 s; use a faster link"),
    (Link(gb_per_s=1, latency_us=8e6), "in 8 transfers would take 64 s;"),
])  # fmt: skip
def test_a_slow_link_is_refused(monkeypatch, link, problem):
    monkeypatch.setattr(measure, "_time_computation", lambda *_: (2.0, 90_000))
    pair = SimpleNamespace(workload=WORKLOAD)
    with pytest.raises(ValueError, match=problem):
        measure._set_link(pair, Loopback(8, 4), link, 3)  # type: ignore[arg-type]


def test_computation_time_is_the_median_after_a_warm_up(monkeypatch):
    backend, now = SimpleNamespace(bytes_sent=0), iter([0, 90, 100, 103, 200, 208, 300, 304])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(now))

    def overlapped():
        backend.bytes_sent += 7

    pair = SimpleNamespace(prepare=lambda: None, overlapped=overlapped)
    assert measure._time_computation(pair, backend, 3) == (4, 7)  # type: ignore[arg-type]
    monkeypatch.setattr(measure.time, "perf_counter", iter([5, 7]).__next__)
    assert measure._time_computation(pair, backend, 0) == (2, 7)  # type: ignore[arg-type]


def test_default_ranks_divide_the_experts():
    assert [measure._default_ranks(experts) for experts in (1, 8, 64, 72, 160, 256)] == [1, 8, 64, 36, 40, 64]


@pytest.mark.parametrize("mode,seq,tokens,expected", [
    ("train", None, None, (1024, 4096)), ("prefill", 512, None, (512, 4096)), ("train", 3000, None, (3000, 3000)),
    ("decode", None, None, (1024, 128)), ("decode", 100, 7, (100, 7)), ("train", 8192, None, (8192, 8192)),
])  # fmt: skip
def test_default_sizes(mode, seq, tokens, expected):
    work = Workload.from_preset(mode, "tiny", 1, seq, tokens)
    assert (work.seq, work.tokens) == expected


@pytest.mark.parametrize("options", [[], ["--ep", "0", "--seq-len", "0", "--tokens", "0", "--link-gbps", "0"]])
def test_options_of_zero_or_none_choose_the_defaults(monkeypatch, tmp_path, options):
    given: list[tuple[int, int, int | None, Link | None]] = []

    def stop(workload, _, ep, link, *__):
        given.append((workload.seq, workload.tokens, ep, link))
        raise SystemExit

    monkeypatch.setattr(profile_run, "measure", stop)
    with pytest.raises(SystemExit):
        main(["profile", "run", "--device", "cpu", "--out", str(tmp_path), *options])
    assert given == [(1024, 4096, None, None)]


def test_the_device_with_fewer_gpus_than_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for processes, device in (("2", "cuda:1"), ("3", "cpu")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        monkeypatch.setenv("LOCAL_RANK", "1")
        work = Workload.from_preset("train", "tiny", device=_device("auto"))
        assert str(work.device) == device
        assert (work.seq, work.dtype) == ((1024, torch.float32) if device == "cpu" else (4096, torch.bfloat16))
    with pytest.raises(ValueError, match="there are 3 processes and 2 GPUs here: start at most 2 processes"):
        _device("cuda")


def test_out_of_memory_is_one_line(monkeypatch, capsys, tmp_path):
    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 99 bytes\nand a long story")

    monkeypatch.setattr(profile_run, "measure", fail)
    assert main(["profile", "run", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "moe-dualpipe: error: out of memory: DefaultCPUAllocator: can't allocate memory: you tried 99 bytes\n"
    )
