"""What one rank finds out about its machine. It reads the system, and writes only into the output folder.

Facts travel as JSON, between versions of this project that may differ.

So each field has a default, and fields that the receiver does not know are dropped.
"""

import os
import platform
import re
import resource
import secrets
import shutil
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from ... import __version__
from ...messages import describe
from ...runtime.launch import Launch, count_gpus
from .bounded_calls import Steps

_SETTINGS = re.compile(r"(NCCL|GLOO|TORCH_NCCL)_\w+|CUDA_DEVICE_MAX_CONNECTIONS")


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


def gather_facts(launch: Launch, out: Path, steps: Steps, environment: Mapping[str, str] = os.environ) -> Facts:
    """The facts of this rank. The first rank of each machine also writes a file into `out`."""
    steps.start("reading the versions")
    alike = read_versions()
    steps.start("looking for GPUs")
    gpus, gpu_used = find_gpus(launch.local_rank)
    folder: dict[str, Any] = {}
    if launch.local_rank == 0:
        steps.start(f"writing to {out}")
        folder = try_folder(out, mark=launch.rank == 0)
    steps.start("looking at the network")
    alike |= {"GPUs": gpus, "InfiniBand ports": infiniband_ports(), "number of processes": str(launch.local_world_size)}
    alike |= {name: value for name, value in sorted(environment.items()) if _SETTINGS.fullmatch(name)}
    shm = Path("/dev/shm")
    return Facts(
        rank=launch.rank, host=socket.gethostname(), boot=_read(Path("/proc/sys/kernel/random/boot_id")),
        local_rank=launch.local_rank, local_size=launch.local_world_size, alike=alike, num_gpus=count_gpus(),
        gpu_files=len([*Path("/dev").glob("nvidia[0-9]*")]), gpu_used=gpu_used, address=own_address(),
        shm=shutil.disk_usage(shm).free if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        **folder,
    )  # fmt: skip


def read_versions(driver: Path = Path("/proc/driver/nvidia/version")) -> dict[str, str]:
    """The versions that all ranks should share. NCCL, CUDA and driver: only where they are."""
    import torch

    found = {"Python": platform.python_version(), "torch": torch.__version__, "moe-dualpipe": __version__}
    with suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        with suppress(ImportError, AttributeError, RuntimeError):  # a build without NCCL
            nccl: Any = import_module("torch.cuda.nccl")
            found["NCCL"] = ".".join(map(str, nccl.version()))
    if match := re.search(r"Module.*?\s(\d+\.\d[\d.]*)\s", _read(driver) + "\n"):
        found["driver"] = match[1]
    return found


def find_gpus(local_rank: int) -> tuple[str, float | None]:
    """The GPUs of this machine, such as "8 x NVIDIA H100 80GB HBM3, 79 GiB", and the used share of this rank's."""
    import torch

    number = count_gpus()
    each: list[Any] = [torch.cuda.get_device_properties(i) for i in range(number)]
    kinds = Counter(f"{one.name}, {one.total_memory >> 30} GiB" for one in each)
    used = None
    if local_rank < number:
        free, total = torch.cuda.mem_get_info(local_rank)
        used = 1 - free / total
    return " and ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())), used


def infiniband_ports(devices: Path = Path("/sys/class/infiniband")) -> str:
    """State and rate of the ports of InfiniBand and RoCE cards: "8 x ACTIVE, 400 Gb/sec (4X NDR)"."""
    ports = Counter(
        f"{_read(port / 'state').partition(':')[2].strip()}, {_read(port / 'rate')}"
        for port in devices.glob("*/ports/*")
    )
    return "; ".join(f"{count} x {state}" for state, count in sorted(ports.items()))


def own_address() -> str:
    """The address that the machine's own name resolves to; "" if it does not. gloo listens there by default."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def try_folder(out: Path, mark: bool) -> dict[str, Any]:
    """Write a file into `out`, or the nearest folder above it that exists. Returns fields of `Facts`.

    mark: keep the file, for other machines to look for. `remove_mark` removes it.
    """
    folder = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    file, found = folder / f".check-cluster-{secrets.token_hex(8)}", {"folder": str(folder)}
    try:
        file.touch()
        if not mark:
            file.unlink()
    except OSError as error:
        found["unwritable"] = describe(error)
    return found | {"free": shutil.disk_usage(folder).free, "mark": str(file) if mark else ""}


def remove_mark(facts: Facts) -> None:
    if facts.mark:
        with suppress(OSError):
            Path(facts.mark).unlink(missing_ok=True)


def _read(path: Path) -> str:
    """The text of a small file, without spaces around it; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
