"""Measure the overlap here and now: the same pair of chunks in sequence and interleaved, recorded and analyzed.

One process plays one of many ranks over a modelled link; under torchrun the ranks are real. Both ways take turns, a few
rounds each, and of each the recording of the median length is kept.
"""

import gc
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ..expert_parallel import AllToAll, ExpertParallel, Link, Loopback, Replay
from ..overlap.labels import BACKWARD, COMBINE, DISPATCH, FORWARD, label
from .capture import capture, synchronize
from .files import TracedDevice, TraceFiles, analyze_files
from .pair import Pair, Workload
from .ranks import rank_skews

SHARE = 0.7
"""Of the time that is computed: what communication takes over a link that nobody described, on a CPU."""
GPU_LINK = Link(gb_per_s=50.0, latency_us=10.0)
"""A link that nobody described, on a GPU: a port of 400 Gb/s."""
DEEPSEEK = {
    label(DISPATCH, FORWARD): 6.69e-3, label(COMBINE, FORWARD): 8.68e-3,
    label(DISPATCH, BACKWARD): 7.49e-3, label(COMBINE, BACKWARD): 5.50e-3,
}  # fmt: skip
"""Seconds of each transfer of a layer in DeepSeek's published training trace (64 ranks, 4,096 tokens of 7,168)."""
LONGEST = 60.0
"""Seconds that the transfers of a pair may take."""
RUNS = "sequential", "overlapped"


@dataclass(frozen=True)
class Measurement:
    """Both ways, of all ranks; `link` in words."""

    work: Workload
    num_ranks: int
    link: str
    runs: dict[str, TraceFiles]

    @property
    def bound_us(self) -> float:
        """No order of this rank's work is shorter than its computation, or its communication, alone; of each the
        shorter one of both ways, which disturb it differently."""
        both = [self.runs[way].devices[0].analysis for way in RUNS]
        return max(min(analysis.compute_us for analysis in both), min(analysis.comm_us for analysis in both))

    def as_object(self) -> dict[str, Any]:
        """For `json`; of this rank, and of several ranks what `ranks` says of the overlapped way."""
        work = asdict(self.work) | {
            "device": str(self.work.device),
            "dtype": str(self.work.dtype).removeprefix("torch."),
        }
        ways = {way: self.runs[way].as_objects() for way in RUNS}
        mine = {way: objects[0] for way, objects in ways.items()}
        everyone = {"ranks": ways["overlapped"]} if len(ways["overlapped"]) > 1 else {}
        return {**work, "num_ranks": self.num_ranks, "link": self.link, **mine, "bound_us": self.bound_us, **everyone}

    @property
    def recordings(self) -> list[str]:
        """The names of their files."""
        return [device.path.name for way in RUNS for device in self.runs[way].devices]


def measure(
    work: Workload, out: Path, ep: int = 0, link: Link | None = None, replay: bool = False, rounds: int = 3
) -> Measurement:
    """Run, record and analyze both ways; of `rounds` recordings of each that of the median length stays in `out`.

    ep: ranks over which the experts are spread; 0: up to 64. link: None for one that fits. replay: transfers take the
    times of DeepSeek's trace. In a process of several, started by torchrun, the ranks are those; every process must
    call this, and the first one's result has them all. Raises ValueError for what contradicts itself.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and (link is not None or replay):
        raise ValueError(f"a link is modelled for one process, but there are {world}: leave out --link-* and --replay")
    if world > 1 and ep not in (0, world):
        raise ValueError(f"--ep {ep}, but torchrun started {world} processes, which are the ranks: leave it out")
    num_ranks = world if world > 1 else ep or _default_ranks(work.model.num_experts)
    with _world(work.device, world):
        words, recordings = _run(work, num_ranks, world, out, link, replay, rounds)
        with _own_failures(world):
            ways = {way: _gathered(analyze_files([path]), world) for way, path in recordings.items()}
    return Measurement(work, num_ranks, words, ways)


def _run(
    work: Workload, num_ranks: int, world: int, out: Path, link: Link | None, replay: bool, rounds: int
) -> tuple[str, dict[str, Path]]:
    """The link in words, and the recordings; whatever held the process group is gone at the end."""
    backend = _backend(work, num_ranks, world, replay)
    pair = Pair(work, backend)
    words = _link(pair, backend, link, rounds)
    with _own_failures(world):
        return words, _record(pair, out, rounds, "" if world == 1 else f"-rank{dist.get_rank()}")


def _default_ranks(num_experts: int) -> int:
    return next(ranks for ranks in range(min(64, num_experts), 0, -1) if num_experts % ranks == 0)


@contextmanager
def _world(device: torch.device, world: int) -> Iterator[None]:
    """The process group of the ranks, if there are several."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world == 1:
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        gc.collect()  # a group that is still held by something ends with the process, and may abort it
        dist.destroy_process_group()


@contextmanager
def _own_failures(world: int) -> Iterator[None]:
    """Of one rank among several, as a full disk: where each says itself what happened, not the first one for all."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if world == 1:
            raise
        raise RuntimeError(f"rank {dist.get_rank()}: {error}") from error


def _backend(work: Workload, num_ranks: int, world: int, replay: bool) -> ExpertParallel:
    if world > 1:
        group = dist.group.WORLD
        assert group is not None
        return AllToAll(work.model.num_experts, group)
    if replay:
        return Replay(work.model.num_experts, num_ranks, DEEPSEEK, GPU_LINK.sms)
    return Loopback(work.model.num_experts, num_ranks)


def _link(pair: Pair, backend: ExpertParallel, link: Link | None, rounds: int) -> str:
    """Give a modelled link its speed, and say in words what there is."""
    if isinstance(backend, Replay):
        return "modelled link: each transfer takes what it took in DeepSeek's training trace"
    if not isinstance(backend, Loopback):
        transport = "nccl" if pair.work.device.type == "cuda" else "gloo"
        return f"torch.distributed, {transport}, {dist.get_world_size()} processes"
    chosen, fits = "", link is None and pair.work.device.type == "cpu"
    seconds, num_bytes = _computing(pair, backend, rounds if fits else 0)
    if not num_bytes:
        return "modelled link: nobody to send to"
    if fits:
        link = Link(gb_per_s=num_bytes / 1e9 / (SHARE * seconds))
        chosen = f"; so the {_size(num_bytes)} of a pair take {SHARE} of the {1e3 * seconds:,.0f} ms that it computed"
    link = link or GPU_LINK
    transfers = 4 * pair.work.layers
    if (taking := link.seconds(num_bytes) + (transfers - 1) * link.seconds(0)) > LONGEST:
        raise ValueError(
            f"the {_size(num_bytes)} of a pair, in {transfers} transfers, would take {taking:,.0f} s over this link: "
            "use a faster one, or less --tokens"
        )
    backend.link = link
    return f"modelled link: {8 * link.gb_per_s:,.4g} Gb/s, latency {link.latency_us:g} us{chosen}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:,.1f} kB"


def _computing(pair: Pair, backend: Loopback, rounds: int) -> tuple[float, int]:
    """Seconds of a pair when transfers take none, the median behind a first one, and the bytes that it sends."""
    backend.link, times, num_bytes = Link(), [], 0
    for _ in range(1 + rounds):
        pair.prepare()
        sent, start = backend.bytes_sent, time.perf_counter()
        pair.overlapped()
        times.append(time.perf_counter() - start)
        num_bytes = backend.bytes_sent - sent
    return statistics.median(times[1:] or times), num_bytes


def _record(pair: Pair, out: Path, rounds: int, suffix: str) -> dict[str, Path]:
    """The recording of each way whose length is the median of `rounds`, in turns, after a first one to warm up."""
    device, alone = pair.work.device, not dist.is_initialized()
    windows: dict[str, list[float]] = {way: [] for way in RUNS}
    first = alone or dist.get_rank() == 0
    for i in tqdm(range(1 + rounds), "recording", disable=None if first else True, leave=False):
        for way in RUNS:
            pair.prepare()
            synchronize(device)
            if not alone:
                dist.barrier()
            path = out / f"{way}{suffix}-{i}.json.gz"
            with capture(path, device):
                if not alone and device.type == "cuda":
                    dist.barrier()  # again, as profilers start slowly; over gloo, so that it is no work of the device
                getattr(pair, way)()
            windows[way].append(analyze_files([path], pictures=False).devices[0].analysis.window_us)
    kept = {way: times.index(statistics.median_low(times[1:]), 1) for way, times in windows.items()}
    if not alone:  # the first rank's choice is everyone's
        chosen = [kept]
        dist.broadcast_object_list(chosen, src=0)
        kept = chosen[0]
    for way in RUNS:
        (out / f"{way}{suffix}-{kept[way]}.json.gz").replace(out / f"{way}{suffix}.json.gz")
        for i in range(1 + rounds):
            (out / f"{way}{suffix}-{i}.json.gz").unlink(missing_ok=True)
    return {way: out / f"{way}{suffix}.json.gz" for way in RUNS}


def _gathered(files: TraceFiles, world: int) -> TraceFiles:
    """On the first rank everyone's, of the others without what is drawn; on these their own."""
    if world == 1:
        return files
    every: list[list[TracedDevice]] | None = [[] for _ in range(world)] if dist.get_rank() == 0 else None
    dist.gather_object([replace(device, blocks=()) for device in files.devices], every)
    if every is None:
        return files
    devices = [*files.devices, *(device for devices in every[1:] for device in devices)]
    return TraceFiles(devices, rank_skews([device.transfers for device in devices]))
