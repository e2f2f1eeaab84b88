"""Machines in network namespaces: each rank has a network card and a host name of its own, joined by a switch.

Needs root, and the programs ip, nsenter and unshare. The namespaces end with their processes. The network that
this machine has is not touched.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

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
