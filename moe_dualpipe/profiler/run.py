"""Measure the overlap here and now: the same pair of chunks in sequence and interleaved, recorded and analyzed.

One process plays one of many ranks over a modelled link; under torchrun the ranks are real. Both ways take turns, a few
rounds each, and of each the recording of the median length is kept.
"""

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..commands.common import choose_device
from ..expert_parallel import AllToAll, ExpertParallel, Link, Loopback, Replay
from ..models import preset
from . import lanes
from .capture import capture, synchronize
from .files import Device, Files, analyze_files
from .pair import Mode, Pair, Routing, Work
from .ranks import together
from .report import compare_phases, compare_ranks, markdown, overview, share, verdict

SHARE = 0.7
"""Of the time that is computed: what communication takes over a link that nobody described, on a CPU."""
GPU_LINK = Link(gb_per_s=50.0, latency_us=10.0)
"""A link that nobody described, on a GPU: a port of 400 Gb/s."""
DEEPSEEK = {"dispatch(F)": 6.69e-3, "combine(F)": 8.68e-3, "dispatch(B)": 7.49e-3, "combine(B)": 5.50e-3}
"""Seconds of each transfer of a layer in DeepSeek's published training trace (64 ranks, 4,096 tokens of 7,168)."""
WAYS = "sequential", "overlapped"


@dataclass(frozen=True)
class Measured:
    """Both ways, of all ranks; `link` in words."""

    work: Work
    num_ranks: int
    link: str
    ways: dict[str, Files]

    @property
    def bound_us(self) -> float:
        """No order of this rank's work is shorter than its computation, or its communication, alone."""
        alone = self.ways["sequential"].devices[0].analysis
        return max(alone.compute_us, alone.comm_us)

    def as_object(self) -> dict[str, Any]:
        """For `json`; of this rank."""
        work = asdict(self.work) | {
            "device": str(self.work.device),
            "dtype": str(self.work.dtype).removeprefix("torch."),
        }
        ways = {way: self.ways[way].as_objects()[0] for way in WAYS}
        return {**work, "num_ranks": self.num_ranks, "link": self.link, **ways, "bound_us": self.bound_us}

    @property
    def recordings(self) -> list[str]:
        """The names of their files."""
        return [device.path.name for way in WAYS for device in self.ways[way].devices]

    def as_text(self) -> str:
        analyses = {way: self.ways[way].devices[0].analysis for way in WAYS}
        sequential, overlapped = (analyses[way].window_us for way in WAYS)
        parts = [
            f"{self.work.described}; experts over {self.num_ranks} ranks\n{self.link}",
            markdown(overview(analyses)),
            compare_phases(analyses, self.work.layers),
            f"bound, the larger of computation and communication in sequence: {self.bound_us:,.0f} us; overlapped took "
            f"{overlapped / self.bound_us:.2f} of it, and {overlapped / sequential:.2f} of sequential\n"
            f"hidden: {share(analyses['overlapped'].hidden_fraction)} of the communication, "
            f"{share(analyses['sequential'].hidden_fraction)} in sequence",
        ]
        files = self.ways["overlapped"]
        if len(files.devices) > 1:
            by_name = dict(zip(files.names, (device.analysis for device in files.devices), strict=True))
            parts.insert(3, f"overlapped, by rank:\n\n{compare_ranks(by_name, files.joint)}")
        return "\n\n".join(parts)

    def pictures(self) -> list[lanes.Picture]:
        """This rank's lanes, of each way."""
        devices = {way: self.ways[way].devices[0] for way in WAYS}
        return [
            lanes.Picture(f"{way}: {d.analysis.window_us / 1e3:,.1f} ms, {verdict(d.analysis)}", d.blocks)
            for way, d in devices.items()
        ]


def measure(
    out: Path,
    mode: Mode,
    preset_name: str,
    layers: int,
    ep: int,
    seq: int,
    tokens: int,
    routing: Routing,
    device: str,
    link: Link | None,
    replay: bool,
    rounds: int = 3,
) -> Measured:
    """Run, record and analyze both ways; the recordings stay in the folder `out`.

    0 for a number means a choice: see `Run` of the command line. link: None for one that fits. replay: transfers take
    the times of DeepSeek's trace. In a process of several, started by torchrun, the ranks are those; every process must
    call this, and the first one's result has them all. Of `rounds` recordings of each way that of the median length is
    kept. Raises ValueError for what contradicts itself.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and (link is not None or replay):
        raise ValueError(f"a link is modelled for one process, but there are {world}: leave out --link-* and --replay")
    if world > 1 and ep not in (0, world):
        raise ValueError(f"--ep {ep}, but torchrun started {world} processes, which are the ranks: leave it out")
    work = _resolve(mode, preset_name, layers, seq, tokens, routing, device)
    num_ranks = world if world > 1 else ep or _default_ranks(work.model.num_experts)
    with _world(work.device, world):
        backend = _backend(work, num_ranks, world, replay)
        pair = Pair(work, backend)
        words = _link(pair, backend, link, rounds)
        with _own_failures(world):
            recordings = _record(pair, out, rounds, "" if world == 1 else f"-rank{dist.get_rank()}")
            ways = {way: _gathered(analyze_files([path]), world) for way, path in recordings.items()}
    return Measured(work, num_ranks, words, ways)


def draw(measured: Measured, out: Path) -> list[str]:
    """Draw its lanes into the folder; returns the names of what was drawn: without matplotlib, only the page."""
    names = ["timeline.html"]
    lanes.save(measured.pictures(), out / names[0])
    with suppress(ImportError):
        lanes.save(measured.pictures(), out / "timeline.png")
        names.append("timeline.png")
    return names


def _resolve(mode: Mode, preset_name: str, layers: int, seq: int, tokens: int, routing: Routing, device: str) -> Work:
    model = preset(preset_name)
    for name, number, least in (("layers", layers, 1), ("seq", seq, 0), ("tokens", tokens, 0)):
        if number < least:
            raise ValueError(f"--{name} must be at least 1: got {number}")
    kind = choose_device(device, torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    on = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    seq = seq or (4096 if on.type == "cuda" else 1024)
    tokens = tokens or (128 if mode == "decode" else 4096 if 4096 % seq == 0 else seq)
    if mode != "decode" and tokens % seq:
        raise ValueError(
            f"--tokens {tokens} are no whole sequences of --seq {seq}: use --tokens {-(-tokens // seq) * seq}"
        )
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    return Work(mode, preset_name, model, layers, seq, tokens, routing, on, dtype)


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


def _backend(work: Work, num_ranks: int, world: int, replay: bool) -> ExpertParallel:
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
    chosen = ""
    if link is None and pair.work.device.type == "cpu":
        seconds, num_bytes = _computing(pair, backend, rounds)
        link = Link(gb_per_s=num_bytes / 1e9 / (SHARE * seconds)) if num_bytes else Link()
        chosen = (
            f"; chosen so that the {num_bytes / 1e6:,.1f} MB of a pair take {SHARE} of the {1e3 * seconds:,.0f} ms "
            "that it just computed"
            if num_bytes
            else "; there is nobody to send to"
        )
    backend.link = link or GPU_LINK
    return f"modelled link: {8 * backend.link.gb_per_s:,.4g} Gb/s, latency {backend.link.latency_us:g} us{chosen}"


def _computing(pair: Pair, backend: Loopback, rounds: int) -> tuple[float, int]:
    """Seconds of a pair when transfers take none, the median of a few, and the bytes that it sends."""
    backend.link, times, num_bytes = Link(), [], 0
    for _ in range(1 + rounds):
        pair.prepare()
        sent, start = backend.num_bytes, time.perf_counter()
        pair.overlapped()
        times.append(time.perf_counter() - start)
        num_bytes = backend.num_bytes - sent
    return statistics.median(times[1:]), num_bytes  # the first one warms up


def _record(pair: Pair, out: Path, rounds: int, suffix: str) -> dict[str, Path]:
    """The recording of each way whose length is the median of `rounds`, in turns, after a first one to warm up."""
    device, alone = pair.work.device, not dist.is_initialized()
    windows: dict[str, list[float]] = {way: [] for way in WAYS}
    for i in range(1 + rounds):
        for way in WAYS:
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
    for way in WAYS:
        shutil.move(out / f"{way}{suffix}-{kept[way]}.json.gz", out / f"{way}{suffix}.json.gz")
        for i in range(1 + rounds):
            (out / f"{way}{suffix}-{i}.json.gz").unlink(missing_ok=True)
    return {way: out / f"{way}{suffix}.json.gz" for way in WAYS}


def _gathered(files: Files, world: int) -> Files:
    """On the first rank everyone's, of the others without what is drawn; on these their own."""
    if world == 1:
        return files
    every: list[list[Device]] | None = [[] for _ in range(world)] if dist.get_rank() == 0 else None
    dist.gather_object([replace(device, blocks=()) for device in files.devices], every)
    if every is None:
        return files
    devices = [*files.devices, *(device for devices in every[1:] for device in devices)]
    return Files(devices, together([device.rank for device in devices]))
