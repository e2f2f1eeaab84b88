"""Measure the overlap on this machine: record and analyze a pair of chunks, run in sequence and overlapped.

A single process acts as one of many ranks over a modeled link. Under torchrun, the ranks are real. Sequential and
overlapped runs alternate for a few rounds; of each, the recording with the median length is kept.
"""

import gc
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ...expert_parallel import AllToAll, ExpertParallel, Link, Loopback, Replay
from ...overlap.labels import BACKWARD, COMBINE, DISPATCH, FORWARD, label
from ...runtime.groups import init_world
from ...runtime.launch import Launch
from .bound import possible_share, recorded_events, with_share
from .capture import capture, synchronize
from .files import TracedDevice, TraceFiles, analyze_files, compare_devices
from .pair import Pair, Workload
from .reading import read_trace

COMM_SHARES = 0.7, 0.65, 0.6, 0.55, 0.5, 0.4, 0.3
"""With a CPU's default link, communication takes one of these shares of the computation time."""
POSSIBLE = 0.98
"""It is the largest share with which so much of the communication can be hidden."""
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
    """The traces of both runs on all ranks. link: a description of the link."""

    workload: Workload
    num_ranks: int
    link: str
    runs: dict[str, TraceFiles]
    possible: float | None = None
    """The share of this rank's communication that its overlapped run could hide (bound.py); None if unknown."""

    @property
    def bound_us(self) -> float:
        """The lower bound of a run: the longer of this rank's computation alone and its communication alone.

        Both differ between the runs; the shorter time counts.
        """
        both = [self.runs[run].devices[0].analysis for run in RUNS]
        return max(min(analysis.compute_us for analysis in both), min(analysis.comm_us for analysis in both))

    def as_object(self) -> dict[str, Any]:
        """A JSON object: both runs of this rank and, with several ranks, the overlapped run of all `ranks`."""
        dtype = str(self.workload.dtype).removeprefix("torch.")
        workload = asdict(self.workload) | {"device": str(self.workload.device), "dtype": dtype}
        runs = {run: self.runs[run].as_objects() for run in RUNS}
        own = {run: objects[0] for run, objects in runs.items()}
        ranks = {"ranks": runs["overlapped"]} if len(runs["overlapped"]) > 1 else {}
        return {**workload, "num_ranks": self.num_ranks, "link": self.link, **own, "bound_us": self.bound_us,
                "possible_fraction": self.possible, **ranks}  # fmt: skip

    @property
    def recordings(self) -> list[str]:
        """The file names of the recordings."""
        return [device.path.name for run in RUNS for device in self.runs[run].devices]


def measure(
    workload: Workload, out: Path, ep: int | None = None, link: Link | None = None, replay: bool = False,
    rounds: int = 3,
) -> Measurement:  # fmt: skip
    """Record both runs `rounds` times and analyze them. The recordings of median length stay in `out`.

    ep: number of expert-parallel ranks. None: the largest divisor of the number of experts, up to 64. link: the
    modeled link. None: a default for the device. replay: transfers take as long as in DeepSeek's trace. Under torchrun
    the processes are the ranks: all must call this, and the result on rank 0 has all ranks. Raises ValueError for
    conflicting arguments, and for a link that is too slow.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and (link is not None or replay):
        raise ValueError(f"links are modeled in one process, but there are {world}: leave out --link-* and --replay")
    if world > 1 and ep not in (None, world):
        raise ValueError(f"torchrun started {world} processes, which are the ranks: leave out --ep {ep}")
    num_ranks = world if world > 1 else ep or _default_ranks(workload.model.num_experts)
    with _process_group(workload.device, world):
        description, recordings = _record_pair(workload, num_ranks, world, out, link, replay, rounds)
        with _named_failures(world):
            runs = {run: _gather(analyze_files([path]), world) for run, path in recordings.items()}
            possible = possible_share(recorded_events(read_trace(recordings["overlapped"])))
    return Measurement(workload, num_ranks, description, runs, possible)


def _record_pair(
    workload: Workload, num_ranks: int, world: int, out: Path, link: Link | None, replay: bool, rounds: int
) -> tuple[str, dict[str, Path]]:
    """The description of the link, and the recordings. Objects that refer to the process group are freed on return."""
    backend = _backend(workload, num_ranks, world, replay)
    pair = Pair(workload, backend)
    description = _set_link(pair, backend, link, rounds)
    with _named_failures(world):
        recordings = _record(pair, out, rounds, "" if world == 1 else f"-rank{dist.get_rank()}")
    return description, recordings


def _default_ranks(num_experts: int) -> int:
    return next(ranks for ranks in range(min(64, num_experts), 0, -1) if num_experts % ranks == 0)


@contextmanager
def _process_group(device: torch.device, world: int) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world == 1:
        yield
        return
    init_world(device, Launch.from_environment())
    try:
        yield
    finally:
        gc.collect()  # a reference left to the group can abort the process at exit
        dist.destroy_process_group()


@contextmanager
def _named_failures(world: int) -> Iterator[None]:
    """With several ranks, name the rank in errors that may occur on only one, such as a full disk."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if world == 1:
            raise
        raise RuntimeError(f"rank {dist.get_rank()}: {error}") from error


def _backend(workload: Workload, num_ranks: int, world: int, replay: bool) -> ExpertParallel:
    if world > 1:
        group = dist.group.WORLD
        assert group is not None
        return AllToAll(workload.model.num_experts, group)
    if replay:
        return Replay(workload.model.num_experts, num_ranks, DEEPSEEK, GPU_LINK.sms)
    return Loopback(workload.model.num_experts, num_ranks)


def _set_link(pair: Pair, backend: ExpertParallel, link: Link | None, rounds: int) -> str:
    """Set the speed of a modeled link. Returns a description of the link."""
    if isinstance(backend, Replay):
        return "modeled link: transfers take as long as in DeepSeek's training trace"
    if not isinstance(backend, Loopback):
        transport = "nccl" if pair.workload.device.type == "cuda" else "gloo"
        return f"torch.distributed, {transport}, {dist.get_world_size()} processes"
    reason, choose = "", link is None and pair.workload.device.type == "cpu"
    seconds, num_bytes = _time_computation(pair, backend, rounds if choose else 0)
    if not num_bytes:
        return "modeled link: unused, there is only one rank"
    if choose:
        per_second = num_bytes / 1e9 / seconds
        backend.link = Link(gb_per_s=per_second / COMM_SHARES[-1])
        share = _hidden_share(pair)
        link = Link(gb_per_s=per_second / share)
        reason = f": {_format_bytes(num_bytes)} take {share} of the computation time, {1e3 * seconds:,.0f} ms"
    link = link or GPU_LINK
    transfers = 4 * pair.workload.layers
    if (taking := link.seconds(num_bytes) + (transfers - 1) * link.seconds(0)) > MAX_COMM_SECONDS:
        raise ValueError(
            f"the link is too slow: {_format_bytes(num_bytes)} in {transfers} transfers would take {taking:,.0f} s; "
            "use a faster link or fewer --tokens"
        )
    backend.link = link
    return f"{_link_text(link)}{reason}"


def _hidden_share(pair: Pair) -> float:
    """The largest of COMM_SHARES with which POSSIBLE of the communication can be hidden, from a recorded run."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trial.json"
        pair.prepare()
        with capture(path, pair.workload.device):
            pair.overlapped()
        events = recorded_events(read_trace(path))
    fitting = (share for share in COMM_SHARES if (possible_share(with_share(events, share)) or 1.0) >= POSSIBLE)
    return next(fitting, COMM_SHARES[-1])


def _link_text(link: Link) -> str:
    return f"modeled link: {8 * link.gb_per_s:,.4g} Gb/s, latency {link.latency_us:g} us"


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:,.1f} kB"


def _time_computation(pair: Pair, backend: Loopback, rounds: int) -> tuple[float, int]:
    """Median seconds of an overlapped run without transfer times, after a warm-up, and the bytes that it sends."""
    backend.link, times, num_bytes = Link(), [], 0
    for _ in range(1 + rounds):
        pair.prepare()
        sent, start = backend.bytes_sent, time.perf_counter()
        pair.overlapped()
        times.append(time.perf_counter() - start)
        num_bytes = backend.bytes_sent - sent
    return statistics.median(times[1:] or times), num_bytes


def _record(pair: Pair, out: Path, rounds: int, suffix: str) -> dict[str, Path]:
    """Record both runs alternately, after a warm-up. Keeps and returns the recording of median length of each."""
    device, distributed = pair.workload.device, dist.is_initialized()
    windows: dict[str, list[float]] = {run: [] for run in RUNS}
    leader = not distributed or dist.get_rank() == 0
    for i in tqdm(range(1 + rounds), "recording", disable=None if leader else True, leave=False):
        for run in RUNS:
            pair.prepare()
            synchronize(device)
            if distributed:
                dist.barrier()
            path = out / f"{run}{suffix}-{i}.json.gz"
            with capture(path, device):
                if distributed and device.type == "cuda":
                    dist.barrier()  # profilers take time to start. This barrier uses gloo, so it adds no device work
                getattr(pair, run)()
            windows[run].append(analyze_files([path], pictures=False).devices[0].analysis.window_us)
    median = {run: times.index(statistics.median_low(times[1:]), 1) for run, times in windows.items()}
    if distributed:  # all ranks keep the rounds that rank 0 chose
        chosen = [median]
        dist.broadcast_object_list(chosen, src=0)
        median = chosen[0]
    for run in RUNS:
        (out / f"{run}{suffix}-{median[run]}.json.gz").replace(out / f"{run}{suffix}.json.gz")
        for i in range(1 + rounds):
            (out / f"{run}{suffix}-{i}.json.gz").unlink(missing_ok=True)
    return {run: out / f"{run}{suffix}.json.gz" for run in RUNS}


def _gather(files: TraceFiles, world: int) -> TraceFiles:
    """On rank 0, the devices of all ranks, without the pictures of other ranks. On other ranks, `files`."""
    if world == 1:
        return files
    gathered: list[list[TracedDevice]] | None = [[] for _ in range(world)] if dist.get_rank() == 0 else None
    dist.gather_object([replace(device, work=()) for device in files.devices], gathered)
    if gathered is None:
        return files
    devices = [*files.devices, *(device for devices in gathered[1:] for device in devices)]
    return compare_devices(devices)
