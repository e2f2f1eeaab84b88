"""Measure how much step time overlap saves on a slow network, emulated by two network namespaces on one machine.

    sudo .venv/bin/python -m benchmarks.network                        a minute and a half on two cores
    sudo .venv/bin/python -m benchmarks.network --mbit 800 100 --rounds 12
    sudo .venv/bin/python -m benchmarks.network --pp 1                 two processes, one core each

A pair of virtual Ethernet devices joins namespaces a and b; a token bucket (`tc`) limits the rate of each end.
Data-parallel rank 0 of a DualPipe pipeline runs in a, rank 1 in b, and the experts of each layer are spread over both.
So the all-to-all and the gradient reduction cross the link; transfers between pipeline ranks do not. The timed steps
are complete trainer steps.

One set of processes keeps training. In each round, each link (one of them unlimited) runs one step without overlap and
one with overlap. The link time is the time that the all-to-all of a step needs at the given rate: the bytes that the
kernel counts during the forwards and backwards. If these take longer than over the unlimited link, the difference is
the part of the link time that was not hidden. Processes that share a core hide some communication even without overlap,
because one computes while another waits.

Requires root and iproute2; otherwise the benchmark is skipped. The names of the namespaces contain the process id. They
are removed at the end.
"""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import tyro

from benchmarks.common import exit_on_signals, ignore_signals, quartiles, ratios, run_options, table, take_turns
from moe_dualpipe.runtime import StepResult
from moe_dualpipe.runtime.groups import init_world
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.training.config import ParallelConfig
from moe_dualpipe.training.options import Request
from moe_dualpipe.training.resolve import prepare
from moe_dualpipe.training.step import Trainer

ADDRESSES, PORT = ("10.213.77.1", "10.213.77.2"), "29400"
BURST = "20kb"  # small: after an idle time, this much is sent without a limit
MTU = 16000  # large: small packets would take processor time from the model
WARM_UP = 1


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    mbit: tuple[float, ...] = (400.0, 200.0)
    """Link rates in Mbit/s, each way. An unlimited link is always measured too."""
    pp: int = 2
    """Pipeline ranks on each side of the link."""
    rounds: int = 8
    """Rounds. In each, every link runs one step without overlap and one with overlap."""
    limit_s: float = 480.0
    """Time limit in seconds."""


@dataclass(frozen=True)
class Steps:
    """Measured steps. seconds: of each whole step. pipeline: seconds of its forwards and backwards.

    megabytes: sent over the link per step, each way. pipeline_megabytes: those sent during the forwards and backwards.
    """

    seconds: list[float]
    pipeline: list[float]
    megabytes: float
    pipeline_megabytes: float


@dataclass(frozen=True)
class Row:
    """Steps over one link, without and with overlap. 0 Mbit/s means unlimited."""

    mbit: float
    plain: Steps
    overlapped: Steps

    @property
    def link_seconds(self) -> float:
        """Seconds that the all-to-all of one step needs at this rate; 0 if unlimited."""
        return 8 * self.plain.pipeline_megabytes / self.mbit if self.mbit else 0.0


class UnavailableError(Exception):
    """The network cannot be created on this machine; the message says why."""


# ---- The network ----


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=20)


def set_rate(device: str, mbit: float) -> None:
    """Limit `device`, in the namespace of this process, to `mbit` Mbit/s; 0: unlimited."""
    subprocess.run(f"tc qdisc delete dev {device} root".split(), capture_output=True, timeout=20)
    if mbit:
        _run(f"tc qdisc add dev {device} root tbf rate {round(mbit * 1e6)}bit burst {BURST} latency 300ms")


@contextmanager
def network() -> Iterator[tuple[str, str]]:
    """Create two namespaces joined by a link; yields their names, which are also those of the devices.

    Raises UnavailableError if the user or machine does not allow it.
    """
    if os.geteuid() != 0:
        raise UnavailableError("network namespaces need root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise UnavailableError(f"{' and '.join(missing)} not found: install iproute2")
    first, second = names = f"moe{os.getpid()}a", f"moe{os.getpid()}b"
    with ExitStack() as made:
        try:
            for name in names:
                made.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True, timeout=20)
                _run(f"ip netns add {name}")
            # Create both ends inside their namespaces, not among the devices of the machine.
            _run(f"ip link add {first} netns {first} type veth peer name {second} netns {second}")
            for name, address in zip(names, ADDRESSES, strict=True):
                _run(f"ip -n {name} address add {address}/30 dev {name}")
                _run(f"ip -n {name} link set lo up")
                _run(f"ip -n {name} link set {name} mtu {MTU} up")
                _run(f"ip netns exec {name} tc qdisc add dev {name} root tbf rate 1gbit burst {BURST} latency 300ms")
        except subprocess.CalledProcessError as error:
            raise UnavailableError(f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}") from None
        yield names


# ---- One rank ----


def rank_main() -> None:
    """Run one rank, given by the environment, with options from the command line. Rank 0 writes the rows to a file."""
    options, device, folder = Options(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
    signal.alarm(int(options.limit_s))  # in case the parent dies
    torch.set_num_threads(1)
    launch = Launch.from_environment()
    config = run_options(options.pp, ParallelConfig(pp=options.pp, ep=2), str(folder))
    init_world(torch.device("cpu"), launch, config.health.timeout)
    trainer = Trainer(prepare(Request(config), launch))
    rows = measure_links(trainer, options, device)
    if launch.rank == 0:
        (folder / "rows.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    dist.destroy_process_group()


def measure_links(trainer: Trainer, options: Options, device: str) -> list[Row]:
    """Time one step of each link and overlap setting in turn, for all rounds. Collective."""
    links, steps = (0.0, *options.mbit), itertools.count()
    inside = _watch_pipeline(trainer, device)

    def one_step(mbit: float, overlap: bool) -> _Step:
        dist.barrier()
        if trainer.layout.pp_rank == 0:  # one process in each namespace
            set_rate(device, mbit)
        dist.barrier()
        trainer.executor.overlap = overlap
        start = _bytes_sent(device)
        seconds = trainer.step(next(steps)).record["seconds"]
        return _Step(seconds, inside[-1][0], _bytes_sent(device) - start, inside[-1][1])

    cases = {(mbit, overlap): partial(one_step, mbit, overlap) for mbit in links for overlap in (False, True)}
    measured = take_turns(options.rounds, cases, WARM_UP)
    return [Row(mbit, _combine(measured[mbit, False]), _combine(measured[mbit, True])) for mbit in links]


class _Step(NamedTuple):
    """One step on one rank: seconds of the step and of its pipeline, and bytes sent during each."""

    seconds: float
    pipeline: float
    sent: int
    pipeline_sent: int


def _combine(seen: list[_Step]) -> Steps:
    """Combine the ranks: the times of the slowest rank, and the mean bytes of all ranks. Collective."""
    by_round = torch.tensor(seen, dtype=torch.float64)
    seconds, sent = by_round[:, :2].contiguous(), by_round[:, 2:].mean(0)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(sent)
    whole, pipeline = seconds.T.tolist()
    return Steps(whole, pipeline, *(1e-6 * sent / dist.get_world_size()).tolist())


def _watch_pipeline(trainer: Trainer, device: str) -> list[tuple[float, int]]:
    """Return a list that grows with each step: seconds of its pipeline, and bytes sent during it."""
    seen: list[tuple[float, int]] = []
    step = trainer.executor.step

    def watched(*args: Any, **kwargs: Any) -> StepResult:
        start, sent = time.perf_counter(), _bytes_sent(device)
        result = step(*args, **kwargs)
        seen.append((time.perf_counter() - start, _bytes_sent(device) - sent))
        return result

    trainer.executor.step = watched
    return seen


def _bytes_sent(device: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


# ---- All ranks ----


def measure(options: Options) -> list[Row]:
    """Start the ranks and return their rows, the unlimited link first.

    Raises UnavailableError if the network cannot be created, TimeoutError or RuntimeError if the ranks fail.
    """
    deadline = time.monotonic() + options.limit_s
    with exit_on_signals(), tempfile.TemporaryDirectory() as folder, network() as names:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(2 * options.pp):
                processes.append(_start(rank, names[rank % 2], options, Path(folder)))
            while any(process.poll() is None for process in processes):
                if failed := [rank for rank, process in enumerate(processes) if process.poll()]:
                    log = Path(folder, f"{failed[0]}.log").read_text()
                    raise RuntimeError(f"rank {failed[0]} failed:\n{log[-4000:]}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the ranks did not finish within {options.limit_s:g} s")
                time.sleep(0.2)
        finally:
            ignore_signals()
            for process in processes:
                process.kill()
                process.wait()
        rows = json.loads(Path(folder, "rows.json").read_text())
    return [Row(row["mbit"], Steps(**row["plain"]), Steps(**row["overlapped"])) for row in rows]


def _start(rank: int, namespace: str, options: Options, folder: Path) -> "subprocess.Popen[bytes]":
    """Start a rank. Its number is pipeline rank x 2 + data rank, so ranks alternate between the namespaces."""
    world = str(2 * options.pp)
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": namespace, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    program = "from benchmarks.network import rank_main; rank_main()"
    arguments = [json.dumps(dataclasses.asdict(options)), namespace, str(folder)]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", program, *arguments],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def format_rows(rows: list[Row]) -> str:
    """Format medians and quartiles over the rounds. Each ratio compares two steps of the same round."""
    columns = (
        "link | link time, ms | ms per step, no overlap | quartiles | ms per step, overlap | quartiles "
        "| overlap / none | quartiles | hidden, no overlap | hidden, overlap"
    )
    cells, free = [], rows[0]
    for row in rows:
        limit = (f"{row.mbit:g} Mbit/s", f"{1e3 * row.link_seconds:.0f}") if row.mbit else ("no limit", "-")
        steps = (quartiles([1e3 * second for second in steps.seconds], ".0f") for steps in (row.plain, row.overlapped))
        ratio = quartiles(ratios(row.overlapped.seconds, row.plain.seconds), ".2f")
        hidden = []
        for limited, unlimited in ((row.plain, free.plain), (row.overlapped, free.overlapped)):
            shown = statistics.median(limited.pipeline) - statistics.median(unlimited.pipeline)
            hidden.append(f"{1 - shown / row.link_seconds:.0%}" if row.mbit else "-")
        cells.append([*limit, *itertools.chain(*steps), *ratio, *hidden])
    return table(columns, cells)


def report(options: Options) -> None:
    """Measure and print, or print why this machine cannot."""
    try:
        rows = measure(options)
    except UnavailableError as error:
        print(f"skipped: {error}")
        return
    sent = rows[0].plain
    print(
        f"{2 * options.pp} processes on {os.cpu_count()} cores, 1 thread each, pp={options.pp} ep=2, preset tiny; "
        f"torch {torch.__version__}, gloo\n"
        f"{options.rounds} rounds; {sent.megabytes:.1f} MB per step cross the link each way, "
        f"{sent.pipeline_megabytes:.1f} MB of them in the all-to-all"
    )
    print(format_rows(rows))


def main() -> None:
    report(tyro.cli(Options, description=__doc__))


if __name__ == "__main__":
    main()
