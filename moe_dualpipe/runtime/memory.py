"""How much memory this process can still allocate, on its machine or in its container, and on its GPU.

A program that uses too much main memory gets no error: the machine swaps until it no longer responds, or the kernel
kills a process. So the free amount must be known beforehand.
"""

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

KB = 1024
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let glibc's malloc keep up to 256 MiB of freed memory, also from blocks of up to 32 MiB.

    Otherwise the operating system takes it back, and clears new pages in each step: 4 to 9% of the time of a small
    model. With another C library, this does nothing.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_TRIM_THRESHOLD, 256 * KB**2)
        mallopt(_MMAP_THRESHOLD, 32 * KB**2)


def queue_copy(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`t` on `device`. The host waits for nothing: a copy from memory that is not pinned waits for all queued work."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not t.is_cuda else t.to(device)


def free_main_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that processes of this machine or container can still allocate, swap included; None if unknown.

    Memory that the kernel can take back, such as cached files, counts as free. Known only on Linux.
    """
    try:
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        sizes = {words[0]: KB * int(words[1]) for words in lines if len(words) > 1}
        swap = sizes.get("SwapFree:", 0)
        free = sizes["MemAvailable:"] + swap
    except (OSError, ValueError, KeyError):
        return None
    return max(0, min([free, *(left + swap for left in _left_in_cgroups(proc, cgroups))]))


def free_gpu_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that no process uses."""
    return torch.cuda.mem_get_info(device)[0]


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Bytes left below each limit of this process: of its control groups (version 1 or 2) and of their parents."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = cgroups / "memory" if controllers else cgroups
            limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else (
                "memory.max", "memory.current"
            )  # fmt: skip
            # In a container, this may be the path on the host. Then only the root exists.
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                folder = root / group.relative_to("/")
                with suppress(OSError, ValueError):  # the file is missing, or contains "max": unlimited
                    left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                    yield left + _reclaimable(folder / "memory.stat")


def _reclaimable(stat: Path) -> int:
    """Bytes of cached files and kernel caches that a control group contains."""
    names = {"file", "slab_reclaimable", "total_cache"}  # the last one is of version 1
    pairs = (line.split() for line in stat.read_text().splitlines())
    return sum(int(size) for name, size in pairs if name in names)
