"""`profile run`: the report, the recordings that are kept, the link, and the defaults."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_dualpipe.expert_parallel import Link, Loopback
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.tools.profiler import measure
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.pair import Workload
from moe_dualpipe.tools.profiler.pictures import lanes
from moe_dualpipe.tools.profiler.reports.overlap import measurement_text
from tests.support.traces import annotation, kernel, launch, write

CPU = torch.device("cpu")
WORKLOAD = Workload("train", "some", ModelConfig(num_experts=8), 2, 1024, 4096, "balanced", CPU, torch.float32)


def measured(folder):
    """1,000 us of computation and 600 us of communication, some of them before the end of the computation."""
    files = {}
    for run, hidden in (("sequential", 0), ("overlapped", 450)):
        events = [
            annotation("mlp(F)", 0, 10), launch(1, 1), kernel("gemm", 100, 1000, correlation=1),
            annotation("dispatch(F)", 20, 10), launch(2, 21),
            kernel("ncclDevKernel", 1100 - hidden, 600, stream=9, correlation=2),
        ]  # fmt: skip
        files[run] = analyze_files([write(folder / f"{run}.json", events)])
    return measure.Measurement(WORKLOAD, 1, "a link", files)


def test_pictures_and_file_names(tmp_path):
    found = replace(measured(tmp_path), possible=0.9812)
    assert "hidden communication: 98.1% possible, reached 75.0% overlapped, 0.0% sequential" in measurement_text(found)
    assert [picture.title for picture in lanes.measurement_pictures(found)] == [
        "sequential: 1.6 ms, 0.0% of the communication is hidden (1 kernel, on up to 1 thread blocks).",
        "overlapped: 1.1 ms, 75.0% of the communication is hidden (1 kernel, on up to 1 thread blocks).",
    ]


def test_the_default_link_depends_on_the_computation_time(monkeypatch):
    """25 MB in half of 2 s are 25 MB per second."""
    backend, pair = Loopback(8, 4), SimpleNamespace(workload=WORKLOAD)
    monkeypatch.setattr(measure, "time_computation", lambda *_: (2.0, 25_000_000))
    words = measure.set_link(pair, backend, None, 3)  # type: ignore[arg-type]
    assert backend.link.gb_per_s == pytest.approx(0.025) and not backend.link.latency_us
    assert words == "modeled link: 0.2 Gb/s, latency 0 us: 25.0 MB take 0.5 of the computation time, 2,000 ms"
    pair.workload = replace(WORKLOAD, device=torch.device("cuda"))
    assert measure.set_link(pair, backend, None, 3) == "modeled link: 400 Gb/s, latency 10 us"  # type: ignore[arg-type]
    monkeypatch.setattr(measure, "time_computation", lambda *_: (2.0, 0))
    assert measure.set_link(pair, backend, None, 3) == "modeled link: unused, there is only one rank"  # type: ignore[arg-type]


@pytest.mark.parametrize("link,problem", [
    (Link(gb_per_s=1e-6), "the link is too slow: 90.0 kB in 8 transfers would take 90 s; use a faster link"),
    (Link(gb_per_s=1, latency_us=8e6), "in 8 transfers would take 64 s;"),
])  # fmt: skip
def test_a_slow_link_is_refused(monkeypatch, link, problem):
    monkeypatch.setattr(measure, "time_computation", lambda *_: (2.0, 90_000))
    pair = SimpleNamespace(workload=WORKLOAD)
    with pytest.raises(ValueError, match=problem):
        measure.set_link(pair, Loopback(8, 4), link, 3)  # type: ignore[arg-type]


def test_default_ranks_divide_the_experts():
    assert [measure.default_ranks(experts) for experts in (1, 8, 64, 72, 160, 256)] == [1, 8, 64, 36, 40, 64]


@pytest.mark.parametrize("mode,seq,tokens,expected", [
    ("train", None, None, (1024, 4096)), ("prefill", 512, None, (512, 4096)), ("train", 3000, None, (3000, 3000)),
    ("decode", None, None, (1024, 128)), ("decode", 100, 7, (100, 7)), ("train", 8192, None, (8192, 8192)),
])  # fmt: skip
def test_default_sizes(mode, seq, tokens, expected):
    work = Workload.from_preset(mode, "tiny", 1, seq, tokens)
    assert (work.seq, work.tokens) == expected
