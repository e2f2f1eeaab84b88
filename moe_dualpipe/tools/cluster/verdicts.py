"""What is wrong with the machines of a run: pure functions from the facts of all ranks to a list of problems."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...messages import list_ranks, plural
from .facts import Facts, Machine, machines_of

GB = 10**9
MAX_CLOCK = 5.0
"""Seconds by which clocks may differ, more than a message may take."""
MIN_SHM = 2**30
"""Bytes of /dev/shm. A container has 64 MB by default."""
MIN_WRITE = 20e6
"""Bytes per second of the output folder."""
MIN_GPU_FREE = 0.9
"""Share of a GPU's memory that is free before a run."""
_PRIVATE_SETTING = re.compile(r".*_IFNAME|NCCL_(IB_HCA|DEBUG.*|HOSTID|TOPO\w*|GRAPH\w*|.*_FILE)")
"""Settings that may differ between machines."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, where, and the way out, in words. stops: links cannot be measured before it is solved."""

    where: str
    what: str
    way_out: str
    stops: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.way_out}"


def find_problems(
    facts: Sequence[Facts], world_size: int, min_free: int = 10 * GB, device: str = "auto"
) -> list[Problem]:
    """The problems of the machines whose facts are given, worst first.

    min_free: bytes that the run needs in the output folder. device: auto, cpu or cuda.
    """
    machines = machines_of([one for one in facts if not one.failed])
    return [
        *(Problem(f"rank {one.rank} on {one.host}", one.failed, "look at this machine first", True)
          for one in facts if one.failed),
        *_versions(machines), *_gpus(machines, device), *_settings(machines), *_infiniband(machines),
        *_addresses(machines), *_ports(machines), *_clocks(machines), *_disks(machines, min_free),
        *_limits(machines, world_size),
    ]  # fmt: skip


def device_of(facts: Sequence[Facts], wanted: str) -> str:
    """cpu or cuda: auto is cuda if each rank has a GPU."""
    if wanted != "auto":
        return wanted
    return "cuda" if facts and all(one.gpu is not None for one in facts) else "cpu"


def machine_name(machine: Machine) -> str:
    return f"{machine.name} ({list_ranks(machine.numbers) if len(machine.ranks) < 3 else _span(machine.numbers)})"


def _span(ranks: Sequence[int]) -> str:
    return f"ranks {ranks[0]}-{ranks[-1]}" if ranks[-1] - ranks[0] == len(ranks) - 1 else list_ranks(ranks)


def _rank(machine: Machine, one: Facts) -> str:
    return f"rank {one.rank} on {machine.name}"


def different(
    machines: Sequence[Machine], value_of: Callable[[Machine], str], what: str, way_out: str, stops: bool = False
) -> Iterator[Problem]:
    """A problem for each machine whose value is not that of most. In a tie, the first machine's value counts."""
    values = {machine.name: value_of(machine) for machine in machines}
    if len({*values.values()}) < 2:
        return
    usual, number = Counter(values.values()).most_common(1)[0]
    examples = [name for name, value in values.items() if value == usual]
    others = f"on {examples[0]}" if number == 1 else f"on {number} other machines, such as {examples[0]}"
    for machine in machines:
        if (value := values[machine.name]) != usual:
            found = f"{what} {value or 'none'}, but {usual or 'none'} {others}"
            yield Problem(machine_name(machine), found, way_out, stops)


def _versions(machines: Sequence[Machine]) -> Iterator[Problem]:
    for machine in machines:
        for name in _names(one.versions for one in machine.ranks):
            values = {one.versions.get(name, "none") for one in machine.ranks}
            if len(values) > 1:
                found = f"{name} differs between its ranks: {', '.join(sorted(values))}"
                yield Problem(machine_name(machine), found, "start all ranks with the same Python environment", True)
    for name in _names(machine.first.versions for machine in machines):
        stops = name in ("torch", "NCCL", "moe-dualpipe")
        way_out = "install the same version on all machines"

        def version(machine: Machine, name: str = name) -> str:
            return machine.first.versions.get(name, "")

        yield from different(machines, version, name, way_out, stops)


def _names(mappings: Iterable[Iterable[str]]) -> list[str]:
    return [*dict.fromkeys(name for mapping in mappings for name in mapping)]


def _gpus(machines: Sequence[Machine], device: str) -> Iterator[Problem]:
    if device == "cpu":
        return
    for machine in machines:
        first, name = machine.first, machine_name(machine)
        if first.gpu_files and not first.num_gpus:
            built = "its CUDA version needs another driver" if "CUDA" in first.versions else "it is built without CUDA"
            found = f"{plural(first.gpu_files, 'GPU')}, but torch finds none: {built}"
            yield Problem(name, found, "install torch for CUDA and a driver that fits, or use --device cpu", True)
        elif device == "cuda" and not first.num_gpus:
            yield Problem(name, "torch finds no GPU", "use --device cpu, or give the container its GPUs", True)
        elif first.num_gpus and first.num_gpus < first.local_size:
            here = f"{plural(first.local_size, 'process', 'es')}, but {plural(first.num_gpus, 'GPU')}"
            way_out = f"start at most {first.num_gpus} with --nproc-per-node, or use --device cpu"
            yield Problem(name, here, way_out, True)
        for one in machine.ranks:
            if one.gpu is not None and one.gpu.free < MIN_GPU_FREE * one.gpu.memory:
                used, total = (one.gpu.memory - one.gpu.free) / 2**30, one.gpu.memory / 2**30
                found = f"{used:.0f} of {total:.0f} GiB of GPU {one.local_rank} are in use"
                yield Problem(_rank(machine, one), found, "end the other program (nvidia-smi lists it)")
    yield from different(machines, gpu_text, "GPUs:", "use equal machines: all ranks wait for the slowest one")
    yield from different(
        machines, lambda machine: str(machine.first.local_size), "number of processes",
        "start as many on each machine, with the same --nproc-per-node",
    )  # fmt: skip


def gpu_text(machine: Machine) -> str:
    """Such as "8 x NVIDIA H100 80GB HBM3, 79 GiB"; "" without GPUs."""
    gpus = sorted({(one.gpu.name, one.gpu.memory >> 30) for one in machine.ranks if one.gpu is not None})
    models = " and ".join(f"{name}, {memory} GiB" for name, memory in gpus)
    return f"{machine.first.num_gpus} x {models}" if gpus else ""


def _settings(machines: Sequence[Machine]) -> Iterator[Problem]:
    for name in _names(machine.first.settings for machine in machines):
        if not _PRIVATE_SETTING.fullmatch(name):

            def setting(machine: Machine, name: str = name) -> str:
                return machine.first.settings.get(name, "")

            yield from different(machines, setting, f"{name} is", "set it to the same value on all machines")


def _infiniband(machines: Sequence[Machine]) -> Iterator[Problem]:
    def ports(machine: Machine) -> str:
        counts = Counter(machine.first.infiniband.values())
        return "; ".join(f"{number} x {state}" for state, number in sorted(counts.items()))

    yield from different(machines, ports, "InfiniBand ports:", "check cards and cables with ibstat")
    for machine in machines:
        cards = machine.first.infiniband
        if cards and machine.first.locked_memory not in (-1, None) and machine.first.locked_memory < 2**30:
            found = f"it may lock {machine.first.locked_memory / 2**20:.0f} MiB of memory, and InfiniBand needs more"
            way_out = "ulimit -l unlimited, or for a container --ulimit memlock=-1"
            yield Problem(machine_name(machine), found, way_out)


def _addresses(machines: Sequence[Machine]) -> Iterator[Problem]:
    for machine in machines if len(machines) > 1 else ():
        first = machine.first
        if "GLOO_SOCKET_IFNAME" in first.settings:
            continue
        if not first.address or first.address == "::1" or first.address.startswith("127."):
            place = f"resolves to {first.address}" if first.address else "does not resolve"
            found = f"its name {place}, so gloo would listen where other machines cannot reach it"
            yield Problem(
                machine_name(machine), found,
                "set GLOO_SOCKET_IFNAME to the network interface, such as eth0, or correct /etc/hosts", True,
            )  # fmt: skip


def _ports(machines: Sequence[Machine]) -> Iterator[Problem]:
    for machine in machines:
        for one in machine.ranks:
            if one.port_in_use:
                way_out = f"end the program that ss -ltnp 'sport = {one.port}' names, or choose another --master-port"
                yield Problem(machine.name, f"port {one.port} is in use", way_out, True)


def _clocks(machines: Sequence[Machine]) -> Iterator[Problem]:
    """Clocks that differ from the middle one. Two machines cannot tell which of them is right."""
    known = [machine for machine in machines if machine.first.clock is not None]
    if len(known) < 2:
        return
    clocks = {machine.name: machine.first.clock or 0.0 for machine in known}
    right = sorted(clocks.values())[(len(known) - 1) // 2] if len(known) > 2 else 0.0
    for machine in known:
        ahead = clocks[machine.name] - right
        if abs(ahead) > MAX_CLOCK:
            other = f"that of {known[0].name}" if len(known) == 2 else "those of most machines"
            found = f"its clock is {_duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} {other}"
            yield Problem(machine_name(machine), found, "synchronize the clocks (chronyc makestep, or timedatectl)")


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds > 0.99 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _disks(machines: Sequence[Machine], min_free: int) -> Iterator[Problem]:
    for machine in machines:
        name, disk = machine_name(machine), machine.first.disk
        if disk is None:
            continue
        if disk.error:
            yield Problem(name, f"the output folder cannot be written: {disk.error}", "choose another one with --out")
            continue
        if disk.free < min_free:
            found = f"{disk.folder} has {disk.free / GB:.1f} GB free, and the run needs {min_free / GB:g} GB"
            yield Problem(name, found, "delete old runs, or choose another folder with --out (--min-free changes this)")
        if disk.write_speed is not None and disk.write_speed < MIN_WRITE:
            found = f"{disk.folder} is written at {disk.write_speed / 1e6:.1f} MB/s"
            yield Problem(name, found, "choose a faster disk with --out: the ranks wait while a checkpoint is saved")
        if machine.first.sees_mark is False:
            found = f"{disk.folder} is not the folder of {machines[0].name}"
            way_out = "choose one on a shared file system with --out: all ranks read checkpoints there"
            yield Problem(name, found, way_out)


def _limits(machines: Sequence[Machine], world_size: int) -> Iterator[Problem]:
    for machine in machines:
        name, first = machine_name(machine), machine.first
        if first.shm is not None and first.shm < MIN_SHM:
            found = f"/dev/shm has {first.shm / 2**20:.0f} MiB free, and NCCL and CPU ranks need 1 GiB"
            yield Problem(name, found, "remove old files there, or start the container with --shm-size=8g")
        need = needed_files(world_size, first.num_gpus)
        few = [one for one in machine.ranks if one.open_files not in (-1, None) and one.open_files < need]
        if few:
            found = f"a process may open {few[0].open_files:,} files, and {plural(world_size, 'rank')} need {need:,}"
            yield Problem(name, found, f"ulimit -n {max(65536, need)}, or for a container --ulimit nofile=1048576")


def needed_files(world_size: int, num_gpus: int) -> int:
    """Open files of a process: gloo has a socket to each rank of each group, and NCCL several files for each GPU."""
    return max(512 + 8 * world_size, 4096 if num_gpus else 0)
