"""Machines that are cut off, frozen or suspended in the middle of a run: the ranks of all machines must end, or go on.

Each machine is a network and a process namespace of this one, with torchrun and one rank in it; a bridge joins them.
Machine 0 has the rendezvous store. Linux, as root.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.runs import ROOT, TEXT

from .attack import Attack, UnableError

PORT = 29_500
LIMIT = 90.0
"""Seconds until a process counts as hanging."""
OPTIONS = [
    *("--num-layers", "8", "--seq-len", "16", "--batch-size", "8", "--micro-batch-size", "1", "--sample-tokens", "0"),
    *("--set", "model.hidden_size=32", "model.head_dim=8", "metrics.eval_sequences=8"),
    *("--data", TEXT, "--device", "cpu", "--steps", "1000000", "--timeout", "20"),
]


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True, timeout=20)


class Machines:
    """Namespaces joined by a bridge. Machine i has the address 10.77.0.(i + 1)."""

    def __init__(self, count: int):
        self.bridge, self.count = f"moe{os.getpid()}b", count
        self.names = [f"moe{os.getpid()}n{i}" for i in range(count)]

    @contextmanager
    def joined(self) -> Iterator["Machines"]:
        with ExitStack() as made:
            for name in (self.bridge, *self.names):
                made.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True, timeout=20)
                _ip(f"netns add {name}")
                _ip(f"-n {name} link set lo up")
            _ip(f"-n {self.bridge} link add bridge type bridge")
            _ip(f"-n {self.bridge} link set bridge up")
            for i, name in enumerate(self.names):
                _ip(f"link add eth netns {name} type veth peer name port{i} netns {self.bridge}")
                _ip(f"-n {name} address add {self.address(i)}/24 dev eth")
                _ip(f"-n {name} link set eth up")
                _ip(f"-n {self.bridge} link set port{i} master bridge up")
            yield self

    @staticmethod
    def address(machine: int) -> str:
        return f"10.77.0.{machine + 1}"

    def plug(self, machine: int, way: str) -> None:
        """way: up or down. Pulls the cable at the bridge: the machine keeps its address, and its packets are lost."""
        _ip(f"-n {self.bridge} link set port{machine} {way}")


class Run:
    """torchrun with one rank on each machine. static: the static rendezvous instead of c10d."""

    def __init__(self, machines: Machines, folder: Path, static: bool = False):
        self.folder, self.size, self.mark = folder, machines.count, f"{os.getpid()}-{time.monotonic_ns()}"
        self.agents: list[subprocess.Popen[bytes]] = []
        for i, name in enumerate(machines.names):
            if static:
                meeting = ["--node-rank", str(i), "--master-addr", machines.address(0), "--master-port", str(PORT)]
            else:
                endpoint = f"{machines.address(0)}:{PORT}"
                host = ["--rdzv-conf", f"is_host={int(i == 0)}", "--local-addr", machines.address(i)]
                meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "soak", *host]
            launch = ["--nnodes", str(machines.count), "--nproc-per-node", "1", *meeting]
            options = [*OPTIONS, "--out", str(folder / "run"), "--pp", str(machines.count)]
            program = [sys.executable, "-m", "torch.distributed.run", *launch, "train.py", *options]
            environment = os.environ | {
                "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth", "SOAK_MARK": self.mark,
                "SOAK_MACHINE": str(i),
            }  # fmt: skip
            with self.log(i).open("wb") as log:
                self.agents.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--mount-proc", *program], cwd=ROOT,
                        env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    )
                )  # fmt: skip

    def log(self, machine: int) -> Path:
        return self.folder / f"machine{machine}.log"

    def processes(self, machine: int, ranks_only: bool = False) -> list[int]:
        """The processes on a machine that still run: ranks, and the agent."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            of_rank = any(entry.startswith(b"LOCAL_RANK=") for entry in environment)
            wanted = {f"SOAK_MARK={self.mark}".encode(), f"SOAK_MACHINE={machine}".encode()}
            if state not in "ZX" and wanted <= {*environment} and (of_rank or not ranks_only):
                found.append(int(folder.name))
        return found

    def signal(self, machine: int, number: int) -> None:
        for pid in self.processes(machine):
            os.kill(pid, number)

    def steps_done(self) -> int:
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_text().count('"loss"') if path.exists() else 0

    def wait_for(self, what: str, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not happened():
            if time.monotonic() > end:
                raise AssertionError(f"not within {LIMIT:g} s: {what}")
            time.sleep(0.1)

    def wait_until_gone(self, *machines: int) -> None:
        for i in machines:
            self.wait_for(f"the ranks of machine {i} end", lambda i=i: not self.processes(i, ranks_only=True))

    def expect(self, machine: int, text: str) -> None:
        if text not in self.log(machine).read_text(errors="replace"):
            raise AssertionError(f"machine {machine} does not print {text!r}")

    def close(self) -> None:
        for i in range(self.size):
            self.signal(i, signal.SIGKILL)
        for agent in self.agents:
            agent.wait()


SILENT = "no answer from the rendezvous store"
LOST = "vanished: no sign of life"


@dataclass(frozen=True)
class Case:
    """A fault, and what must come of it. `act` gets the machines and the run, after its third step or at `early`."""

    name: str
    machines: int
    act: Callable[[Machines, Run], None]
    static: bool = False
    early: bool = False
    """Whether `act` begins as soon as there are ranks."""


def cut(machine: int) -> Callable[[Machines, Run], None]:
    """Cut off `machine`: its ranks and all others end, and say why."""

    def act(machines: Machines, run: Run) -> None:
        machines.plug(machine, "down")
        run.wait_until_gone(*range(machines.count))
        for i in range(machines.count):
            with_store = i == 0 if machine == 0 else i != machine
            run.expect(i, f"rank {i} stops: ")
            run.expect(i, LOST if with_store else SILENT)

    return act


def freeze(machine: int) -> Callable[[Machines, Run], None]:
    """Stop all processes of `machine`: the others end, and those of the machine when it runs again."""

    def act(machines: Machines, run: Run) -> None:
        others = [i for i in range(machines.count) if i != machine]
        run.signal(machine, signal.SIGSTOP)
        run.wait_until_gone(*others)
        for i in others:
            run.expect(i, f"rank {i} stops: ")
            run.expect(i, SILENT if machine == 0 else f"rank {machine} {LOST}")
        run.signal(machine, signal.SIGCONT)
        run.wait_until_gone(machine)

    return act


def cut_at_the_start(machines: Machines, run: Run) -> None:
    """Cut off machine 0 while the ranks start: at the latest after 1.5 x --timeout, they all end."""
    machines.plug(0, "down")
    run.wait_until_gone(*range(machines.count))


def suspend_all(machines: Machines, run: Run) -> None:
    """Stop every process of all machines for longer than the patience: the run goes on."""
    for number, pause in ((signal.SIGSTOP, 15.0), (signal.SIGCONT, 0.0)):
        for i in range(machines.count):
            run.signal(i, number)
        time.sleep(pause)
    goes_on(machines, run)


def short_outage(machines: Machines, run: Run) -> None:
    """Pull the cable of the store's machine for less than the patience: the run goes on."""
    machines.plug(0, "down")
    time.sleep(3.0)
    machines.plug(0, "up")
    goes_on(machines, run)


def goes_on(machines: Machines, run: Run) -> None:
    done = run.steps_done()
    run.wait_for("ten more steps", lambda: run.steps_done() >= done + 10)
    for i in range(machines.count):
        assert " stops: " not in run.log(i).read_text(errors="replace")


CASES = [
    Case("cut off the store's machine", 2, cut(0)),
    Case("cut off the other machine", 2, cut(1)),
    Case("cut off the store's machine, static rendezvous", 2, cut(0), static=True),
    Case("cut off the other machine, static rendezvous", 2, cut(1), static=True),
    *(Case(f"cut off machine {i} of 3", 3, cut(i)) for i in range(3)),
    Case("freeze the store's machine", 2, freeze(0)),
    Case("freeze the other machine", 2, freeze(1)),
    Case("freeze the store's machine of 3", 3, freeze(0)),
    Case("cut off while the ranks start", 2, cut_at_the_start, early=True),
    Case("suspend all machines", 2, suspend_all),
    Case("a short outage", 2, short_outage),
]


def attack(case: Case, _: random.Random, folder: Path) -> None:
    """Run `case`. An error has the ends of the logs."""
    check_available()
    with Machines(case.machines).joined() as machines:
        run = Run(machines, folder, case.static)
        try:
            run.wait_for("the ranks start", lambda: all(run.processes(i, True) for i in range(case.machines)))
            if not case.early:
                run.wait_for("three steps", lambda: run.steps_done() >= 3)
            case.act(machines, run)
        except AssertionError as error:
            logs = [run.log(i).read_text(errors="replace")[-2000:] for i in range(case.machines)]
            ends = "\n".join(f"--- machine {i}:\n{log}" for i, log in enumerate(logs))
            raise AssertionError(f"{case.name}: {error}\n{ends}") from None
        finally:
            run.close()


def check_available() -> None:
    """Raise UnableError if this machine cannot have namespaces."""
    if os.geteuid() != 0:
        raise UnableError("needs root, for network namespaces")
    if missing := [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]:
        raise UnableError(f"needs {' and '.join(missing)} (iproute2, util-linux)")


ATTACKS = (
    Attack(
        "machine cut off, frozen or suspended", "the ranks of all machines end, saying why; a short outage ends none",
        len(CASES), tuple(partial(attack, case) for case in CASES),
    ),
)  # fmt: skip
