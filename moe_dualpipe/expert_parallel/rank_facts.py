"""What the ranks that share experts tell each other about their machines, to choose the same backend."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

SEVERAL_MACHINES = "the ranks that share experts are on several machines"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank knows. machine: equal for ranks of one machine. gpu: an id of this rank's GPU; "" on CPUs.

    peers: the GPUs whose memory this rank's GPU can access. missing: why the package of the backend cannot be imported.
    """

    device_type: str
    machine: str
    gpu: str = ""
    peers: frozenset[str] = frozenset()
    missing: str = ""


def find_machine() -> str:
    """A text that two processes share if Unix sockets can connect them.

    On Linux: the boot and the network namespace; elsewhere: the host name.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()


def find_facts(device: torch.device, missing: str = "") -> RankFacts:
    """The facts of this rank."""
    if device.type != "cuda":
        return RankFacts(device.type, find_machine(), missing=missing)
    own = torch.cuda.current_device() if device.index is None else device.index
    others = [i for i in range(torch.cuda.device_count()) if i != own and torch.cuda.can_device_access_peer(own, i)]
    return RankFacts("cuda", find_machine(), _gpu_id(own), frozenset(map(_gpu_id, others)), missing)


def _gpu_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def several_machines(facts: Sequence[RankFacts]) -> bool:
    return len({one.machine for one in facts}) > 1


def all_on(device_type: str, facts: Sequence[RankFacts]) -> bool:
    return all(one.device_type == device_type for one in facts)
