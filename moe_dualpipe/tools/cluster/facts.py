"""What one rank knows about its machine. Facts travel as JSON, between versions of this project that may differ.

So each field has a default, and fields that the receiver does not know are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU of a rank. Memory in bytes."""

    name: str = ""
    memory: int = 0
    free: int = 0


@dataclass(frozen=True, slots=True)
class Disk:
    """The output folder, or the nearest folder above it that exists.

    free: bytes. write_speed: bytes per second; None if nothing was written. error: why it cannot be written; "" if it
    can. mark: path of a file in this folder that the other machines look for; "" on all machines but the first.
    """

    folder: str = ""
    free: int = 0
    write_speed: float | None = None
    error: str = ""
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """A rank, its machine, and its process. Sizes in bytes; None where a machine has no such thing.

    boot: tells machines of the same name apart. versions: by name, such as "torch". num_gpus: GPUs that torch finds.
    gpu_files: GPUs that the operating system shows. gpu: the GPU of this rank. infiniband: state and rate of each port.
    settings: environment variables of NCCL and gloo. address: what the machine's own name resolves to. shm: free space
    in /dev/shm. open_files, locked_memory: limits of this process; -1: unlimited. port: the rendezvous port, if this
    process was to open it. port_in_use: whether another program has it. clock: seconds by which this machine's clock is
    ahead of rank 0's, plus the time that a message takes. sees_mark: whether this machine finds the `Disk.mark` of the
    first one. failed: what could not be gathered, and why.
    """

    rank: int = 0
    host: str = "localhost"
    boot: str = ""
    local_rank: int = 0
    local_size: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 0
    gpu_files: int = 0
    gpu: Gpu | None = None
    infiniband: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    shm: int | None = None
    open_files: int = -1
    locked_memory: int = -1
    port: int | None = None
    port_in_use: bool = False
    disk: Disk | None = None
    clock: float | None = None
    sees_mark: bool | None = None
    failed: str = ""

    @property
    def machine(self) -> tuple[str, str]:
        return self.host, self.boot

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Facts":
        facts = _known(cls, values)
        gpu, disk = values.get("gpu"), values.get("disk")
        return replace(facts, gpu=_known(Gpu, gpu) if gpu else None, disk=_known(Disk, disk) if disk else None)


def _known(cls: type, values: Mapping[str, Any]) -> Any:
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
        members.setdefault(one.machine, []).append(one)
    hosts = [host for host, _ in members]
    names = [f"{host}#{hosts[: i + 1].count(host)}" if hosts.count(host) > 1 else host for i, host in enumerate(hosts)]
    return [Machine(name, tuple(ranks)) for name, ranks in zip(names, members.values(), strict=True)]
