"""Machines in network namespaces: each rank has a network card and a host name of its own, joined by a switch.

Needs root, and the programs ip, tc, nsenter and unshare. The namespaces end with their processes. The network that
this machine has is not touched.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NEW_UTS, _NEW_NET = 0x04000000, 0x40000000
CARD = "eth0"


def why_not() -> str:
    """Why there can be no such machines here; "" if there can."""
    if missing := [program for program in ("ip", "tc", "nsenter", "unshare") if shutil.which(program) is None]:
        return f"needs {', '.join(missing)}"
    made = ["ip link add one type veth peer name two", "tc qdisc add dev one root handle 1: htb default 1"]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-ec", "\n".join(made)], capture_output=True, text=True, check=False
    )
    return f"no network namespaces: {done.stderr.strip()[:200]}" if done.returncode else ""


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def host(rank: int) -> str:
    return f"node-{'abcdefgh'[rank]}"


def enter_machine(rank: int, folder: Path) -> None:
    """Move this process to a machine of its own, and wait until `connected` has joined it to the switch."""
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(_NEW_UTS | _NEW_NET):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(host(rank))
    (folder / f"entered-{rank}").touch()
    _wait_for(folder / "connected")


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


def connect(holder: int, processes: Sequence[Any], folder: Path, limits: dict[tuple[int, int], str]) -> None:
    """Join the machines of `processes` to the switch. limits: rates such as "40mbit" of packets from a rank to another.

    The rate "none" drops them.
    """
    for rank, process in enumerate(processes):
        _wait_for(folder / f"entered-{rank}")
        join(holder, rank, process.pid, {to: rate for (source, to), rate in limits.items() if source == rank})
    (folder / "connected").touch()


def join(holder: int, rank: int, process: int, slow: dict[int, str] | None = None) -> None:
    """Join the machine of a process to the switch. slow: the rates of packets to other ranks, as in `connect`."""
    run_in(
        holder, f"ip link add port{rank} type veth peer name {CARD} netns {process}",
        f"ip link set port{rank} master switch up",
    )  # fmt: skip
    commands = ["ip link set lo up", f"ip address add {address(rank)}/24 dev {CARD}", f"ip link set {CARD} up"]
    slow = slow or {}
    commands += [f"ip route add blackhole {address(to)}" for to, rate in slow.items() if rate == "none"]
    commands += _throttle({to: rate for to, rate in slow.items() if rate != "none"})
    run_in(process, *commands)


def _throttle(rates: dict[int, str]) -> list[str]:
    commands = [f"tc qdisc add dev {CARD} root handle 1: htb default 1"] * bool(rates)
    for to, rate in rates.items():
        chosen = f"1:{to + 16:x}"
        commands.append(f"tc class add dev {CARD} parent 1: classid {chosen} htb rate {rate} burst 16k")
        match = f"u32 match ip dst {address(to)}/32 flowid {chosen}"
        commands.append(f"tc filter add dev {CARD} parent 1: protocol ip {match}")
    return commands


def run_in(process: int, *commands: str) -> None:
    """Run shell commands in the network namespace of a process."""
    words = ["nsenter", "--target", str(process), "--net", "sh", "-ec", "\n".join(commands)]
    subprocess.run(words, check=True, capture_output=True, text=True)


def _wait_for(file: Path) -> None:
    end = time.monotonic() + 30
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no {file}")
        time.sleep(0.01)


def environment(rank: int, size: int, port: int = 29500) -> None:
    """What a launcher sets."""
    os.environ |= {"MASTER_ADDR": address(0), "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": CARD}
