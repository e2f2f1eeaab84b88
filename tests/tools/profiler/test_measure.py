"""`profile run`: the report, the recordings that are kept, the link, and the defaults."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_dualpipe.expert_parallel import Link, Loopback
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.tools.profiler import measure
from moe_dualpipe.tools.profiler.pair import Workload

CPU = torch.device("cpu")
WORKLOAD = Workload("train", "some", ModelConfig(num_experts=8), 2, 1024, 4096, "balanced", CPU, torch.float32)


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
