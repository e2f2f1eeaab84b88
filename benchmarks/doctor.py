"""Inject faults into real runs on this CPU, and compare the predicted gains with the measured ones.

    python -m benchmarks.doctor                      all faults, about three minutes
    python -m benchmarks.doctor --only late-launch   one of them

A pair of chunks runs over a modelled link, as in `moe-dualpipe profile run`, with a fault and without it, in turns.
Each run is recorded. From the recordings with the fault alone, the profiler must name the fault, and predict by how
much the window gets shorter without it. A slow rank needs two processes, which this program starts itself.
"""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from torch.profiler import record_function

from moe_dualpipe.expert_parallel import AllToAll, Link, Loopback
from moe_dualpipe.expert_parallel.exchange import AsyncResult
from moe_dualpipe.expert_parallel.modelled.link import LinkTimer
from moe_dualpipe.expert_parallel.protocol import Combined, Pending, Received, Route
from moe_dualpipe.models.moe import MoE
from moe_dualpipe.overlap import Engine
from moe_dualpipe.overlap.labels import LINK_CALL, is_for_experts, is_wait, letter_of
from moe_dualpipe.profiler.capture import capture
from moe_dualpipe.profiler.doctor.verdict import Verdict
from moe_dualpipe.profiler.files import analyze_files
from moe_dualpipe.profiler.pair import Pair, Workload

from .common import full_range, table, take_turns

CPU = torch.device("cpu")
RANKS = 8


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    only: str = "all"
    """The fault to inject."""
    rounds: int = 5
    """Rounds. In each, every run is recorded once."""
    tokens: int = 2048
    """Tokens per chunk."""
    extra_ms: float = 0.0
    """For internal use: computation that a rank adds to each layer."""
    out: str = ""
    """For internal use: where a rank records."""


# ---- Links with faults ----


class GatedTimer(LinkTimer):
    """A link behind a hardware queue that is busy: a transfer starts when the next computation has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._gates: list[threading.Event] = []

    def open(self) -> None:
        for gate in self._gates:
            gate.set()
        self._gates.clear()

    def transfer(self, seconds: float) -> AsyncResult[None]:
        if not seconds:
            return super().transfer(seconds)
        self._gates.append(gate := threading.Event())
        with record_function(LINK_CALL):
            done = self._pool().submit(self._run, gate, seconds)

        def wait() -> None:
            self.open()
            done.result()

        return AsyncResult([], wait)

    def _pool(self) -> Any:
        if self._thread is None:
            super().transfer(0.0).wait()
        return self._thread

    @staticmethod
    def _run(gate: threading.Event, seconds: float) -> None:
        gate.wait()
        with record_function("shared:carry"):  # unlike a link's, the recorded start of this is taken as it is
            time.sleep(seconds)


class OpeningEngine(Engine):
    """An engine that tells a link when a computation has ended."""

    def __init__(self, timer: GatedTimer):
        super().__init__(CPU)
        self.timer = timer

    @contextmanager
    def annotate(self, text: str, layer: int | None, log: bool = True, source: Any = None) -> Iterator[None]:  # type: ignore[override]
        with super().annotate(text, layer, log, source):
            yield
        if letter_of(text) and not is_wait(text) and not is_for_experts(text):
            self.timer.open()


class Faulty(Loopback):
    """A modelled link.

    rails: 2: each chunk has its own; 1: they share one. waits: the forward's dispatch waits at once. slow_every: every
    so many transfers, one takes four times as long.
    """

    def __init__(self, num_experts: int, rails: int = 1, waits: bool = False, slow_every: int = 0):
        super().__init__(num_experts, RANKS)
        self.rails: Sequence[LinkTimer] = [LinkTimer() for _ in range(rails)]
        self.waits, self.slow_every = waits, slow_every
        self.timer, self.transfers = self.rails[0], 0

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        self.timer = self.rails[-1 if weights_TK is None else 0]  # without weights, it is the backward of a combine
        pending = super().dispatch(x_TD, route, weights_TK)
        if self.waits and weights_TK is not None:
            pending.wait()
        return pending

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        self.timer = self.rails[0 if weight_grads_NK is None else -1]
        return super().combine(y_ND, route, weight_grads_NK)

    def _transfer(self, rows: Tensor, num_bytes: int) -> Pending[Tensor]:
        self.transfers += num_bytes > 0
        slow = num_bytes and self.slow_every and self.transfers % self.slow_every == 0
        self._bytes_sent += num_bytes
        seconds = self.link.seconds(num_bytes) * (4 if slow else 1)
        return AsyncResult([self.timer.transfer(seconds)], lambda: rows)


# ---- Runs ----


@dataclass
class Run:
    """A way to run the pair over `backend`. engine: makes the engine of a run."""

    backend: Loopback
    pair: Pair
    engine: Callable[[], Engine] = field(default=lambda: Engine(CPU))
    share: float = 0.6
    """The communication takes this share of the computation time."""

    def seconds(self) -> float:
        forward, backward = self.pair._chunks
        stage, start = self.pair.stage, time.perf_counter()
        stage.overlapped_forward_backward(
            stage, backward, None, None, stage, None, *forward, engine=self.engine()
        )  # fmt: skip
        return time.perf_counter() - start

    def record(self, path: Path, link: Link) -> list[Path]:
        self.backend.link = Link()
        self.pair.prepare()
        self.backend.link = link
        with capture(path, CPU):
            self.seconds()
        return [path]

    def link(self) -> Link:
        """A link whose transfers take `share` of the computation time."""
        times = []
        for _ in range(4):
            self.backend.link = Link()
            self.pair.prepare()
            sent = self.backend.bytes_sent
            times.append(self.seconds())
        return Link(gb_per_s=(self.backend.bytes_sent - sent) / 1e9 / (self.share * statistics.median(times[1:])))


def modelled(tokens: int, gated: bool = False, queued: bool = False, share: float = 0.6, **faults: Any) -> Run:
    workload = Workload.from_preset("train", "tiny", 4, 512, tokens)
    backend = Faulty(workload.model.num_experts, **faults)
    if gated:
        timer = GatedTimer()
        backend.rails = [timer]
        return Run(backend, Pair(workload, backend), lambda: OpeningEngine(timer), share)
    return Run(backend, Pair(workload, backend), lambda: Engine(CPU, queued), share)


FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "wait at once": ("host-sync", {"waits": True}, {}),
    "late launch": ("late-launch", {"queued": True}, {}),
    "busy queue": ("few-queues", {"gated": True}, {}),
    "shared link": ("shared-stream", {"share": 1.2}, {"share": 1.2, "rails": 2}),
    "slow transfers": ("imbalance", {"slow_every": 5}, {}),  # the trace of one rank cannot tell it from a late rank
}
"""Name: the verdict that must name it, and the options of a run with it and without it."""
SLOW_RANK = "slow rank"
EXTRA_MS = 12.0


def modelled_case(name: str, options: Options, folder: Path) -> tuple[str, dict[bool, list[list[Path]]]]:
    """The verdict that is due, and the recordings with and without the fault, by round."""
    kind, faulty, healthy = FAULTS[name]
    runs = {True: modelled(options.tokens, **faulty), False: modelled(options.tokens, **healthy)}
    link = runs[False].link()
    count = iter(range(10_000))

    def recorded(fault: bool) -> Callable[[], list[Path]]:
        return lambda: runs[fault].record(folder / f"{name.replace(' ', '-')}-{next(count)}.json", link)

    return kind, take_turns(options.rounds, {fault: recorded(fault) for fault in runs}, warm_up=1)


def ranks_case(options: Options, folder: Path) -> tuple[str, dict[bool, list[list[Path]]]]:
    def recorded(extra_ms: float) -> list[list[Path]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out = folder / f"ranks-{extra_ms:g}"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
            "-m", "benchmarks.doctor", "--only", SLOW_RANK, "--rounds", str(options.rounds),
            "--tokens", str(options.tokens), "--extra-ms", str(extra_ms), "--out", str(out),
        ]  # fmt: skip
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        return [[out / f"rank{rank}-{i}.json" for rank in (0, 1)] for i in range(1, options.rounds + 1)]

    return "imbalance", {True: recorded(EXTRA_MS), False: recorded(0.0)}


def run_rank(options: Options) -> None:
    """One process of two. Rank 1 computes `extra_ms` more in the experts of each layer."""
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    workload = Workload.from_preset("train", "tiny", 4, 512, options.tokens)
    pair = Pair(workload, AllToAll(workload.model.num_experts, group))  # type: ignore[arg-type]
    square, extra = torch.randn(256, 256), options.extra_ms if rank else 0.0
    start = time.perf_counter()
    for _ in range(200):
        torch.mm(square, square)
    times = round(extra / (1e3 * (time.perf_counter() - start) / 200))
    for layer in pair.stage.modules():
        if isinstance(layer, MoE):
            layer.run_experts = slowed(layer.run_experts, square, times)  # type: ignore[method-assign]
    Path(options.out).mkdir(parents=True, exist_ok=True)
    for i in range(1 + options.rounds):
        pair.prepare()
        dist.barrier()
        with capture(Path(options.out) / f"rank{rank}-{i}.json", CPU):
            pair.overlapped()
    dist.barrier()
    dist.destroy_process_group()


def slowed(run: Callable[..., Tensor], square: Tensor, times: int) -> Callable[..., Tensor]:
    def slower(*args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            for _ in range(times):
                torch.mm(square, square)
        return run(*args, **kwargs)

    return slower


# ---- The table ----


def diagnosed(paths: list[Path], kind: str) -> tuple[float, int, Verdict | None, list[str]]:
    """The window of rank 0 in microseconds, the rank of the first verdict of `kind` (from 1), itself, and all kinds."""
    files = analyze_files(paths, pictures=False)
    verdicts = [verdict for device in files.devices for verdict in device.analysis.verdicts]
    verdicts.sort(key=lambda verdict: -(verdict.gain_us or 0.0))
    window = files.devices[0].analysis.window_us
    kinds = [verdict.kind for verdict in verdicts]
    if kind not in kinds:
        return window, 0, None, kinds
    return window, kinds.index(kind) + 1, verdicts[kinds.index(kind)], kinds


def row(name: str, kind: str, recordings: dict[bool, list[list[Path]]]) -> list[str]:
    found = {fault: [diagnosed(paths, kind) for paths in rounds] for fault, rounds in recordings.items()}
    measured = [faulty[0] - healthy[0] for faulty, healthy in zip(found[True], found[False], strict=True)]
    gains = [verdict.gain_us for _, _, verdict, _ in found[True] if verdict and verdict.gain_us is not None]
    windows = [statistics.median(window for window, *_ in found[fault]) / 1e3 for fault in (True, False)]
    gain = windows[0] - windows[1]
    places = [place for _, place, _, _ in found[True]]
    others = sorted({other for *_, kinds in found[False] for other in kinds})
    predicted = statistics.median(gains) / 1e3 if gains else None
    return [
        name, kind, f"{sum(map(bool, places))} of {len(places)}, {places.count(1)} first",
        f"{windows[0]:.0f}", f"{windows[1]:.0f}",
        "-" if predicted is None else f"{predicted:.0f} ({full_range([g / 1e3 for g in gains], '.0f')})",
        f"{gain:.0f} ({full_range([us / 1e3 for us in measured], '.0f')})",
        "-" if predicted is None else f"{predicted / gain:.2f}", ", ".join(others) or "none",
    ]  # fmt: skip


COLUMNS = (
    "fault | verdict | named | window, ms | without the fault | predicted gain, ms (range) | measured gain (range) "
    "| predicted / measured | verdicts without the fault"
)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    if options.out:
        run_rank(options)
        return
    print(f"{os.cpu_count()} cores, one thread, torch {torch.__version__}\n", flush=True)
    names = [*FAULTS, SLOW_RANK] if options.only == "all" else [options.only.replace("-", " ")]
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            case = (
                ranks_case(options, Path(folder)) if name == SLOW_RANK else modelled_case(name, options, Path(folder))
            )
            rows.append(row(name, *case))
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
