"""Machines in network namespaces that run commands, can be lost without a word, and come back.

Each has a network card, a host name and process ids of its own (`namespaces.py`).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import namespaces
from .runs import ROOT

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
        names = "".join(f"{namespaces.address(i)} {namespaces.host(i)}\n" for i in range(8))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def log(self, machine: int) -> str:
        return (self.folder / f"{machine}.log").read_text(errors="replace")

    def start(self, machine: int, words: Sequence[object], **environment: str) -> None:
        """Start a machine that runs a command."""
        joined = self.folder / f"joined-{machine}"
        joined.unlink(missing_ok=True)
        shell = _ENTER.format(name=namespaces.host(machine), joined=joined.name)
        outer = os.environ | {"GLOO_SOCKET_IFNAME": namespaces.CARD, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        outer["PATH"] = f"{Path(sys.executable).parent}:{outer['PATH']}"
        unshare = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self.folder / f"{machine}.log", "ab") as log:
            process = subprocess.Popen(
                [*unshare, "sh", "-ec", shell, "sh", *map(str, words)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=outer | environment, cwd=self.folder,
            )  # fmt: skip
        self.processes[machine] = process
        _wait_for_namespace(process.pid)
        namespaces.join(self.holder, machine, process.pid)
        joined.touch()

    def lose(self, machine: int) -> None:
        """Cut a machine off, then end its processes: no packet says so."""
        namespaces.run_in(self.holder, f"ip link delete port{machine}")
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
    """Wait until `unshare` has entered its namespaces."""
    end = time.monotonic() + 30
    while os.readlink(f"/proc/{process}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert time.monotonic() < end
        time.sleep(0.01)
