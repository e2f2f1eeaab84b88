"""Machines in network namespaces that run commands, can be lost without a word, and come back.

Each has a network card, a host name and process ids of its own; a switch joins them. Needs root, and the programs ip,
nsenter and unshare. The namespaces end with their processes. The network that this machine has is not touched.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .runs import ROOT

CARD = "eth0"


def why_not() -> str:
    """Why there can be no such machines here; "" if there can."""
    if missing := [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]:
        return f"needs {', '.join(missing)}"
    made = ["unshare", "--net", "ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    return f"no network namespaces: {done.stderr.strip()[:200]}" if done.returncode else ""


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def host(rank: int) -> str:
    return f"node-{'abcdefgh'[rank]}"


@contextmanager
def switch() -> Iterator[int]:
    """A namespace with a switch; yields the process that holds it."""
    holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        run_in(holder.pid, "ip link add switch type bridge", "ip link set switch up")
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def join(holder: int, rank: int, process: int) -> None:
    """Join the machine of a process to the switch."""
    run_in(
        holder, f"ip link add port{rank} type veth peer name {CARD} netns {process}",
        f"ip link set port{rank} master switch up",
    )  # fmt: skip
    card = f"ip address add {address(rank)}/24 dev {CARD}", f"ip link set {CARD} up"
    run_in(process, "ip link set lo up", *card)


def run_in(process: int, *commands: str) -> None:
    """Run shell commands in the network namespace of a process."""
    words = ["nsenter", "--target", str(process), "--net", "sh", "-ec", "\n".join(commands)]
    subprocess.run(words, check=True, capture_output=True, text=True)


_ENTER = """
mount --bind hosts /etc/hosts
hostname {name}
while [ ! -e {joined} ]; do sleep 0.02; done
exec "$@"
"""


class Machines:
    """Machines of the switch that the process `holder` holds. What they print is in files of `folder`."""

    def __init__(self, holder: int, folder: Path):
        self.holder, self.folder = holder, folder
        self.processes: dict[int, subprocess.Popen] = {}
        names = "".join(f"{address(i)} {host(i)}\n" for i in range(8))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def log(self, machine: int) -> str:
        return (self.folder / f"{machine}.log").read_text(errors="replace")

    def start(self, machine: int, words: Sequence[object], **environment: str) -> None:
        """Start a machine that runs a command."""
        joined = self.folder / f"joined-{machine}"
        joined.unlink(missing_ok=True)
        shell = _ENTER.format(name=host(machine), joined=joined.name)
        outer = os.environ | {"GLOO_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        outer["PATH"] = f"{Path(sys.executable).parent}:{outer['PATH']}"
        unshare = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self.folder / f"{machine}.log", "ab") as log:
            process = subprocess.Popen(
                [*unshare, "sh", "-ec", shell, "sh", *map(str, words)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=outer | environment, cwd=self.folder,
            )  # fmt: skip
        self.processes[machine] = process
        _wait_for_namespace(process.pid)
        join(self.holder, machine, process.pid)
        joined.touch()

    def lose(self, machine: int) -> None:
        """Cut a machine off, then end its processes: no packet says so."""
        run_in(self.holder, f"ip link delete port{machine}")
        self._kill(machine)

    def signal(self, machine: int, number: int = signal.SIGTERM) -> None:
        """Send a signal to the command of a machine."""
        path = Path(f"/proc/{self.processes[machine].pid}/task/{self.processes[machine].pid}/children")
        os.kill(int(path.read_text().split()[0]), number)

    def exit_code(self, machine: int, seconds: float = 60) -> int:
        return self.processes[machine].wait(seconds)

    def close(self) -> None:
        for machine in [*self.processes]:
            self._kill(machine)

    def _kill(self, machine: int) -> None:
        process = self.processes.pop(machine)
        process.kill()  # ends the first process of its namespace of process ids, and so all
        process.wait()


def _wait_for_namespace(process: int) -> None:
    """Wait until `unshare` has entered its"""
    end = time.monotonic() + 30
    while os.readlink(f"/proc/{process}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert time.monotonic() < end
        time.sleep(0.01)
