"""Gather the facts of one rank. Reads the system and writes only into the output folder."""

import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Mapping
from contextlib import closing
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from ... import __version__
from ...runtime.launch import Launch, count_gpus
from .bounded_calls import Steps
from .disks import measure_disk
from .facts import Disk, Facts, Gpu

_SETTINGS = re.compile(r"(NCCL|GLOO|TORCH_NCCL)_\w+|CUDA_DEVICE_MAX_CONNECTIONS")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun, which then has opened the rendezvous port itself."""


def gather_facts(launch: Launch, out: Path, steps: Steps, environment: Mapping[str, str] = os.environ) -> Facts:
    """The facts of this rank. The first rank of each machine also measures the disk of `out`."""
    steps.start("reading the versions")
    versions = read_versions()
    steps.start("looking for GPUs")
    num_gpus, gpu = find_gpus(launch.local_rank)
    shm = Path("/dev/shm")
    disk: Disk | None = None
    if launch.local_rank == 0:
        steps.start(f"writing to {out}")
        disk = measure_disk(out, mark=launch.rank == 0)
    steps.start("looking at the network")
    port = rendezvous_port(launch, environment)
    return Facts(
        rank=launch.rank, host=socket.gethostname(), boot=_read(Path("/proc/sys/kernel/random/boot_id")),
        local_rank=launch.local_rank, local_size=launch.local_world_size, versions=versions, num_gpus=num_gpus,
        gpu_files=len([*Path("/dev").glob("nvidia[0-9]*")]), gpu=gpu, infiniband=infiniband_ports(),
        settings={name: value for name, value in sorted(environment.items()) if _SETTINGS.fullmatch(name)},
        address=own_address(), shm=shutil.disk_usage(shm).free if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        port=port, port_in_use=port is not None and not is_free(port), disk=disk,
    )  # fmt: skip


def read_versions(driver: Path = Path("/proc/driver/nvidia/version")) -> dict[str, str]:
    """The versions that all ranks should share. NCCL, CUDA and driver: only where they are."""
    import torch

    found = {"Python": platform.python_version(), "torch": torch.__version__, "moe-dualpipe": __version__}
    try:
        found["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        found["triton"] = "none"
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        try:
            nccl: Any = import_module("torch.cuda.nccl")
            found["NCCL"] = ".".join(map(str, nccl.version()))
        except (ImportError, AttributeError, RuntimeError):  # a build without NCCL
            found["NCCL"] = "none"
    if match := re.search(r"Module.*?\s(\d+\.\d[\d.]*)\s", _read(driver) + "\n"):
        found["driver"] = match[1]
    return found


def find_gpus(local_rank: int) -> tuple[int, Gpu | None]:
    """The number of GPUs of this machine, and the GPU of this rank."""
    number = count_gpus()
    if local_rank >= number:
        return number, None
    import torch

    properties: Any = torch.cuda.get_device_properties(local_rank)
    free, total = torch.cuda.mem_get_info(local_rank)
    return number, Gpu(properties.name, total, free)


def infiniband_ports(devices: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """State and rate of each port of InfiniBand and RoCE cards: {"mlx5_0/1": "ACTIVE, 400 Gb/sec (4X NDR)"}."""
    found = {}
    for port in sorted(devices.glob("*/ports/*")):
        state, rate = _read(port / "state").partition(":")[2].strip(), _read(port / "rate")
        found[f"{port.parts[-3]}/{port.name}"] = f"{state}, {rate}"
    return found


def own_address() -> str:
    """The address that the machine's own name resolves to; "" if it does not. gloo listens there by default."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def rendezvous_port(launch: Launch, environment: Mapping[str, str]) -> int | None:
    """The port that this process, or torchrun on this machine, will open; None if it is open already, or elsewhere."""
    if launch.rank != 0 or environment.get(AGENT_STORE) == "True":
        return None
    port = environment.get("MASTER_PORT", "29500")
    return int(port) if port.isdecimal() and 0 < int(port) < 2**16 else None


def is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a run that has just ended is free
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _read(path: Path) -> str:
    """The text of a small file, without spaces around it; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
