"""Memory that two processes share: one writes, the other reads.

A segment has no name in any file system. It is passed to the other process as a file descriptor, and the kernel frees
it when no process maps it, so a process that is killed leaves nothing behind. On Linux it is an anonymous file, not
limited by the size of /dev/shm; elsewhere, a temporary file without a name.
"""

import mmap
import os
import tempfile
from functools import lru_cache

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; each field of a message starts at a multiple of it, a cache line
MIN_BYTES = 1 << 16
Layout = tuple[tuple[int, torch.dtype], ...]
"""The width and dtype of each field of a message."""


class Segment:
    """A mapped segment. `fd` belongs to the caller, who closes it."""

    def __init__(self, fd: int):
        self.bytes = os.fstat(fd).st_size
        self._memory = mmap.mmap(fd, self.bytes)
        self._views: dict[Layout, list[Tensor]] = {}

    def fields(self, layout: Layout) -> list[Tensor]:
        """A view for each field, one after the other, with as many rows as fit: at least one. Made once per layout."""
        if layout not in self._views:
            rows, start, views = num_rows(self.bytes, layout), 0, []
            for width, dtype in layout:
                view = torch.frombuffer(self._memory, dtype=dtype, count=rows * width, offset=start)
                views.append(view.view(rows, width))
                start += -(-view.nbytes // ALIGNMENT) * ALIGNMENT
            self._views[layout] = views
        return self._views[layout]


def num_bytes(rows: int, layout: Layout) -> int:
    """Bytes in which `rows` rows fit. Example: 3 rows of 5 and of 1 in fp32 -> 72 + 64."""
    return rows * sum(width * dtype.itemsize for width, dtype in layout) + ALIGNMENT * (len(layout) - 1)


@lru_cache(maxsize=256)
def num_rows(size: int, layout: Layout) -> int:
    """How many rows fit in `size` bytes."""
    return (size - num_bytes(0, layout)) // (num_bytes(1, layout) - num_bytes(0, layout))


def create_file(size: int) -> int:
    """The file descriptor of a new segment of at least `size` bytes, rounded up to a power of two."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("moe-dualpipe")
    else:
        with tempfile.TemporaryFile() as file:  # it has no name, or has lost it already
            fd = os.dup(file.fileno())
    os.ftruncate(fd, max(MIN_BYTES, 1 << (size - 1).bit_length()))
    return fd
