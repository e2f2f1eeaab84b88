"""Measure the overlap on this machine: record and analyze a pair of chunks, run in sequence and overlapped.

A single process acts as one of many ranks over a modeled link. Sequential and overlapped runs alternate for a few
rounds; of each, the recording with the median length is kept.

How much communication could the overlapped run hide at most, with its segments in their order and of their measured
lengths? The least time of these segments (overlap/pair_time.py) tells the least exposed time. A run has more of it: the
host adds gaps between segments. docs/overlap.md derives what this means for one layer. The recording of a CPU has all
that is needed. A recording of a GPU lacks the order in which streams wait, so it has no such bound.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ...expert_parallel import Link, Loopback, Replay
from ...expert_parallel.labels import COMBINE, DISPATCH
from ...kernels.fp8 import weights_unchanged
from ...messages import plural
from ...overlap.labels import BACKWARD, FORWARD, PREPARE, SIZES_WAIT, is_wait, label, letter_of, without_wait
from ...overlap.pair_time import Await, Begin, Computation, Event, least_time
from ..drawing.tables import markdown
from .analyze import Analysis
from .capture import capture, synchronize
from .files import TraceFiles, analyze_files
from .intervals import intersection, intervals_of, length_before, union, union_length
from .pair import Pair, PairWorkload
from .pictures.picture import Picture
from .report import account_rows, percent, phase_rows
from .trace import DeviceEvent, Trace

COMM_SHARE = 0.5
"""With a CPU's default link, communication takes this share of the computation time. Nearly all of it can be hidden,
unless attention is most of the computation: one attention hides one transfer, however long it is."""
GPU_LINK = Link(gb_per_s=50.0, latency_us=10.0)
"""The default link of a GPU: a port of 400 Gb/s."""
DEEPSEEK = {
    label(DISPATCH, FORWARD): 6.69e-3, label(COMBINE, FORWARD): 8.68e-3,
    label(DISPATCH, BACKWARD): 7.49e-3, label(COMBINE, BACKWARD): 5.50e-3,
}  # fmt: skip
"""Seconds per layer and transfer in DeepSeek's published training trace (64 ranks, 4,096 tokens, hidden size 7,168)."""
MAX_COMM_SECONDS = 60.0
"""A link that takes longer is an error."""
RUNS = "sequential", "overlapped"


@dataclass(frozen=True)
class Measurement:
    """The traces of both runs. link: a description of the link."""

    workload: PairWorkload
    num_ranks: int
    link: str
    runs: dict[str, TraceFiles]

    @property
    def analyses(self) -> dict[str, Analysis]:
        return {run: files.devices[0].analysis for run, files in self.runs.items()}

    @property
    def possible(self) -> float | None:
        """The share of the communication that the overlapped run could hide; None if unknown."""
        return possible_share(recorded_events(self.runs["overlapped"].devices[0].trace))

    @property
    def bound_us(self) -> float:
        """The lower bound of a run: the longer of the computation alone and the communication alone.

        Both differ between the runs; the shorter time counts.
        """
        return max(min(getattr(one, kind) for one in self.analyses.values()) for kind in ("compute_us", "comm_us"))

    def as_object(self) -> dict[str, Any]:
        """A JSON object with both runs."""
        work = self.workload
        return {
            **asdict(work), "device": str(work.device), "dtype": str(work.dtype).removeprefix("torch."),
            "num_ranks": self.num_ranks, "link": self.link,
            **{run: files.as_objects()[0] for run, files in self.runs.items()},
            "bound_us": self.bound_us, "possible_fraction": self.possible,
        }  # fmt: skip

    def pictures(self) -> list[Picture]:
        """The lanes of both runs."""
        rows = ((run, files.devices[0]) for run, files in self.runs.items())
        return [device.picture(f"{run}: {device.analysis.window_us / 1e3:,.1f} ms, ") for run, device in rows]

    def as_text(self) -> str:
        """Both runs beside each other, and the lower bound."""
        sequential, overlapped = (self.analyses[run] for run in RUNS)
        possible = "" if self.possible is None else f"{percent(self.possible)} possible, reached "
        parts = [
            f"{self.workload.description}; experts over {plural(self.num_ranks, 'rank')}\n{self.link}",
            markdown(account_rows(self.analyses)),
            markdown(phase_rows(self.analyses)),
            f"lower bound (computation or communication alone, whichever is longer): {self.bound_us:,.0f} us\n"
            f"overlapped: {overlapped.window_us / self.bound_us:.2f} of the bound, "
            f"{overlapped.window_us / sequential.window_us:.2f} of sequential\n"
            f"hidden communication: {possible}{percent(overlapped.hidden_fraction)} overlapped, "
            f"{percent(sequential.hidden_fraction)} sequential" + self._shortest(),
        ]
        return "\n\n".join(parts)

    def _shortest(self) -> str:
        """A sentence: which computation of the overlapped run is too short, and by how much. "" if all is hidden."""
        device = self.runs["overlapped"].devices[0]
        phase = max(device.analysis.phases, key=lambda phase: phase.exposed_comm_us, default=None)
        if phase is None or phase.exposed_comm_us < 0.01 * device.analysis.comm_us:
            return ""
        events = device.trace.device_events
        sent = union(intervals_of(one for one in events if one.kind == "comm" and one.part == phase.name))
        beside: dict[str, list[DeviceEvent]] = defaultdict(list)
        for one in events:
            if one.kind == "compute" and letter_of(one.part):
                beside[one.part].append(one)
        us = {name: union_length(intersection(sent, union(intervals_of(own)))) for name, own in beside.items()}
        names = sorted((name for name in us if us[name] >= 0.1 * sum(us.values())), key=lambda name: -us[name])
        each, whole = phase.exposed_comm_us / len(sent), union_length(sent) / len(sent)
        return (
            f"\nexposed most: {phase.name}, {each:,.0f} us of {whole:,.0f} us each. To hide it, what "
            f"runs beside it ({', '.join(names) or 'nothing'}) would have to take {each:,.0f} us longer"
        )


@weights_unchanged()
def measure(
    workload: PairWorkload, out: Path, ep: int | None = None, link: Link | None = None, replay: bool = False,
    rounds: int = 3,
) -> Measurement:  # fmt: skip
    """Record both runs `rounds` times and analyze them. The recordings of median length stay in `out`.

    ep: number of expert-parallel ranks. None: the largest divisor of the number of experts, up to 64. link: the
    modeled link. None: a default for the device. replay: transfers take as long as in DeepSeek's trace. Raises
    ValueError for a link that is too slow.
    """
    if workload.device.type == "cuda":
        torch.cuda.set_device(workload.device)
    experts = workload.model.num_experts
    num_ranks = ep or default_ranks(experts)
    if replay:
        pair = Pair(workload, Replay(experts, num_ranks, DEEPSEEK, GPU_LINK.sms))
        description = "modeled link: transfers take as long as in DeepSeek's training trace"
    else:
        pair = Pair(workload, backend := Loopback(experts, num_ranks))
        description = set_link(pair, backend, link, rounds)
    recordings = record(pair, out, rounds)
    runs = {run: analyze_files([path]) for run, path in recordings.items()}
    return Measurement(workload, num_ranks, description, runs)


def default_ranks(num_experts: int) -> int:
    return next(ranks for ranks in range(min(64, num_experts), 0, -1) if num_experts % ranks == 0)


def set_link(pair: Pair, backend: Loopback, link: Link | None, rounds: int) -> str:
    """Set the speed of the modeled link. Returns a description of it."""
    reason, choose = "", link is None and pair.workload.device.type == "cpu"
    seconds, num_bytes = time_computation(pair, backend, rounds if choose else 0)
    if not num_bytes:
        return "modeled link: unused, there is only one rank"
    if choose:
        link = Link(gb_per_s=num_bytes / 1e9 / seconds / COMM_SHARE)
        reason = f": {_format_bytes(num_bytes)} take {COMM_SHARE} of the computation time, {1e3 * seconds:,.0f} ms"
    link = link or GPU_LINK
    transfers = (6 if pair.workload.cp > 1 else 4) * pair.workload.layers
    if (taking := link.seconds(num_bytes) + (transfers - 1) * link.seconds(0)) > MAX_COMM_SECONDS:
        raise ValueError(
            f"the link is too slow: {_format_bytes(num_bytes)} in {transfers} transfers would take {taking:,.0f} s; "
            "use a faster link or fewer --tokens"
        )
    backend.link = link
    return f"modeled link: {8 * link.gb_per_s:,.4g} Gb/s, latency {link.latency_us:g} us{reason}"


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:,.1f} kB"


def time_computation(pair: Pair, backend: Loopback, rounds: int) -> tuple[float, int]:
    """Median seconds of an overlapped run without transfer times, after a warm-up, and the bytes that it sends."""
    backend.link, times, num_bytes = Link(), [], 0
    for _ in range(1 + rounds):
        pair.prepare()
        sent, start = backend.bytes_sent, time.perf_counter()
        pair.overlapped()
        times.append(time.perf_counter() - start)
        num_bytes = backend.bytes_sent - sent
    return statistics.median(times[1:] or times), num_bytes


def record(pair: Pair, out: Path, rounds: int) -> dict[str, Path]:
    """Record both runs alternately, after a warm-up. Keeps and returns the recording of median length of each."""
    kept = {run: out / f"{run}.json.gz" for run in RUNS}
    recorded: dict[str, list[tuple[float, Path]]] = {run: [] for run in RUNS}
    with TemporaryDirectory(dir=out) as folder:
        for i in tqdm(range(1 + rounds), "recording", disable=None, leave=False):
            for run in RUNS:
                pair.prepare()
                synchronize(pair.workload.device)
                path = Path(folder) / f"{run}-{i}.json.gz"
                with capture(path, pair.workload.device):
                    getattr(pair, run)()
                found = analyze_files([path], causes=False)
                recorded[run].append((found.devices[0].analysis.window_us, path))
        for run, recordings in recorded.items():
            _, median = statistics.median_low(recordings[1:])
            median.replace(kept[run])
    return kept


def possible_share(events: Sequence[Event]) -> float | None:
    """The largest share of the communication that can be hidden; None without communication."""
    computing = sum(event.time for event in events if isinstance(event, Computation))
    sending = sum(event.time for event in events if isinstance(event, Begin))
    return 1 - (least_time(events) - computing) / sending if sending else None


def recorded_events(trace: Trace) -> list[Event]:
    """The computations, transfers and waits of a recorded pair, in microseconds; empty if the device is not a CPU.

    trace: from `as_device`. If two transfers overlap in time, the one that ends later counts from the end of the
    other one.
    """
    if any(event.device != "cpu" for event in trace.device_events):
        return []
    comm = sorted((e for e in trace.device_events if e.kind == "comm"), key=lambda event: event.end)
    computing = union(intervals_of(event for event in trace.device_events if event.kind == "compute"))
    marks: list[tuple[float, Event]] = [
        (one.start, Await(without_wait(one.name))) for one in trace.waits if is_wait(one.name)
    ]
    reached = 0.0
    for transfer in comm:
        name, launch = transfer.place, trace.launch_of(transfer) or transfer
        time = max(transfer.end - max(transfer.start, reached), 0.0)
        marks.append((launch.start, Begin(without_wait(SIZES_WAIT) if name.startswith(PREPARE) else name, time)))
        reached = max(reached, transfer.end)
    marks.sort(key=lambda mark: mark[0])
    edges = np.array([-np.inf, *(time for time, _ in marks), np.inf])
    before = length_before(computing)(np.clip(edges, -1e18, 1e18))
    between = [Computation(float(end - start)) for start, end in pairwise(before)]
    pairs = zip(between, [*(event for _, event in marks), None], strict=True)
    return [event for pair in pairs for event in pair if event is not None]
