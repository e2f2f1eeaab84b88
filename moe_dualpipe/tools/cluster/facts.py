"""What one rank knows about its machine. Facts travel as JSON, between versions of this project that may differ.

So each field has a default, and fields that the receiver does not know are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Facts:
    """A rank, its machine, and its process. Sizes in bytes; None where a machine has no such thing.

    boot: tells machines of the same name apart. alike: facts that should be the same on all machines, in words, by
    name: versions, settings of NCCL and gloo, GPUs, InfiniBand ports. num_gpus: GPUs that torch finds. gpu_files: GPUs
    that the operating system shows. gpu_used: share of the memory of this rank's GPU that is in use; None without GPU.
    address: what the machine's own name resolves to. shm: free space in /dev/shm. open_files, locked_memory: limits of
    this process; -1: unlimited. folder, free, unwritable: the output folder or the nearest one above it that exists,
    its free space, and why it cannot be written. mark: a file in this folder that other machines look for. clock:
    seconds by which this machine's clock is ahead of rank 0's, plus the time that a message takes. sees_mark: whether
    this machine finds the mark of rank 0. failed: what could not be gathered, and why.
    """

    rank: int = 0
    host: str = "localhost"
    boot: str = ""
    local_rank: int = 0
    local_size: int = 1
    alike: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 0
    gpu_files: int = 0
    gpu_used: float | None = None
    address: str = ""
    shm: int | None = None
    open_files: int = -1
    locked_memory: int = -1
    folder: str = ""
    free: int | None = None
    unwritable: str = ""
    mark: str = ""
    clock: float | None = None
    sees_mark: bool | None = None
    failed: str = ""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Facts":
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, and its ranks in order. `name` is the host's name, numbered if several machines have the same."""

    name: str
    ranks: tuple[Facts, ...]

    @property
    def first(self) -> Facts:
        """The facts of its first rank, which also speak for the machine."""
        return self.ranks[0]

    @property
    def numbers(self) -> list[int]:
        return [facts.rank for facts in self.ranks]


def machines_of(facts: Sequence[Facts]) -> list[Machine]:
    """The machines, in the order of their first ranks."""
    members: dict[tuple[str, str], list[Facts]] = {}
    for one in sorted(facts, key=lambda one: one.rank):
        members.setdefault((one.host, one.boot), []).append(one)
    hosts = [host for host, _ in members]
    names = [f"{host}#{hosts[: i + 1].count(host)}" if hosts.count(host) > 1 else host for i, host in enumerate(hosts)]
    return [Machine(name, tuple(ranks)) for name, ranks in zip(names, members.values(), strict=True)]
