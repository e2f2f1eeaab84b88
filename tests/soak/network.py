"""Machines that are cut off, frozen or suspended in the middle of a run: the ranks of all machines must end, or go on.

Each machine is a namespace of this one, with torchrun and one rank in it. Machine 0 has the rendezvous store.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import namespaces
from tests.support.machines import Machines
from tests.support.runs import ROOT, TEXT

from .attack import UnableError

LIMIT = 90.0
"""Seconds until a process counts as hanging."""
OPTIONS = [
    *("--num-layers", 8, "--seq-len", 16, "--batch-size", 8, "--micro-batch-size", 1, "--sample-tokens", 0),
    *("--set", "model.hidden_size=32", "model.head_dim=8", "metrics.eval_sequences=8"),
    *("--data", TEXT, "--device", "cpu", "--steps", 1_000_000, "--timeout", 20, "--out", "run"),
]
SILENT, LOST = "no answer from the rendezvous store", "vanished: no sign of life"


class Cluster:
    """A run with a rank on each of some machines."""

    def __init__(self, machines: Machines, count: int):
        self.machines, self.all = machines, range(count)
        for i in self.all:
            store = ["--rdzv-endpoint", f"{namespaces.address(0)}:29500", "--rdzv-conf", f"is_host={int(i == 0)}"]
            meeting = ["--rdzv-backend", "c10d", *store, "--local-addr", namespaces.address(i)]
            launch = ["torchrun", "--nnodes", count, "--nproc-per-node", 1, *meeting]
            machines.start(i, [*launch, ROOT / "train.py", *OPTIONS, "--pp", count])

    def processes(self, machine: int, ranks_only: bool = False) -> list[int]:
        """The processes on a machine that still run: ranks, and the agent."""
        found, own = [], os.readlink(f"/proc/{self.machines.processes[machine].pid}/ns/net")
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_rank = b"\0LOCAL_RANK=" in (folder / "environ").read_bytes()
                if os.readlink(folder / "ns" / "net") == own and (is_rank or not ranks_only):
                    found.append(int(folder.name))
            except OSError:  # it has ended
                continue
        return found

    def signal(self, machine: int, number: int) -> None:
        for pid in self.processes(machine):
            os.kill(pid, number)

    def plug(self, machine: int, way: str) -> None:
        """way: up or down. Pulls the cable at the switch: the machine keeps its address, and its packets are lost."""
        namespaces.run_in(self.machines.holder, f"ip link set port{machine} {way}")

    def steps_done(self) -> int:
        path = self.machines.folder / "run" / "metrics.jsonl"
        return path.read_text().count('"loss"') if path.exists() else 0

    def wait_for(self, what: str, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not happened():
            assert time.monotonic() < end, f"not within {LIMIT:g} s: {what}"
            time.sleep(0.1)

    def wait_until_gone(self, *machines: int) -> None:
        for i in machines:
            self.wait_for(f"the ranks of machine {i} end", lambda i=i: not self.processes(i, ranks_only=True))


@contextmanager
def started(rng: random.Random, folder: Path, steps: int = 3) -> Iterator[Cluster]:
    """A run on two or three machines, after some steps. An error has the ends of the logs."""
    if why := namespaces.why_not():
        raise UnableError(why)
    with namespaces.switch() as switch:
        machines = Machines(switch, folder)
        try:
            cluster = Cluster(machines, rng.choice([2, 3]))
            cluster.wait_for("the ranks start", lambda: all(cluster.processes(i, True) for i in cluster.all))
            cluster.wait_for("some steps", lambda: cluster.steps_done() >= steps)
            yield cluster
        except AssertionError as error:
            logs = [f"--- machine {i}:\n{machines.log(i)[-2000:]}" for i in machines.processes]
            raise AssertionError("\n".join([str(error), *logs])) from None
        finally:
            machines.close()


def lost_machine(rng: random.Random, folder: Path) -> None:
    """Cut off a machine, or stop all its processes: the others end, and it ends too when its processes run again."""
    with started(rng, folder) as cluster:
        lost, frozen = rng.choice(cluster.all), rng.random() < 0.5
        others = [i for i in cluster.all if i != lost]
        if frozen:
            cluster.signal(lost, signal.SIGSTOP)
        else:
            cluster.plug(lost, "down")
        cluster.wait_until_gone(*others)
        reason = SILENT if lost == 0 else f"rank {lost} {LOST}"
        for i in others:
            assert f"rank {i} stops: {reason}" in cluster.machines.log(i), f"machine {i} does not say {reason!r}"
        if frozen:
            cluster.signal(lost, signal.SIGCONT)
        cluster.wait_until_gone(lost)


def cut_off_at_the_start(rng: random.Random, folder: Path) -> None:
    """Cut off machine 0 while the ranks start: at the latest after 1.5 x --timeout, they all end."""
    with started(rng, folder, steps=0) as cluster:
        cluster.plug(0, "down")
        cluster.wait_until_gone(*cluster.all)


def short_outage(rng: random.Random, folder: Path) -> None:
    """Pull the cable of the store's machine for less than the patience, or stop all processes for longer than that."""
    with started(rng, folder) as cluster:
        if rng.random() < 0.5:
            cluster.plug(0, "down")
            time.sleep(3)
            cluster.plug(0, "up")
        else:
            for number, pause in ((signal.SIGSTOP, 15), (signal.SIGCONT, 0)):
                for i in cluster.all:
                    cluster.signal(i, number)
                time.sleep(pause)
        done = cluster.steps_done()
        cluster.wait_for("ten more steps", lambda: cluster.steps_done() >= done + 10)
        assert not any(" stops: " in cluster.machines.log(i) for i in cluster.all)
