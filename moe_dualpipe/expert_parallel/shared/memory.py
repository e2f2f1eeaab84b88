"""Memory that two processes share: one writes, the other reads.

A segment has no name in any file system. It is passed to the other process as a file descriptor, and the kernel frees
it when no process maps it, so a process that is killed leaves nothing behind. On Linux it is an anonymous file, not
limited by the size of /dev/shm; elsewhere, a temporary file without a name.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; each field of a message starts at a multiple of it, a cache line
MIN_BYTES = 1 << 16


class Segment:
    """A mapped segment. `fd` belongs to the caller, who closes it."""

    def __init__(self, fd: int):
        self.bytes = os.fstat(fd).st_size
        self._memory = mmap.mmap(fd, self.bytes)

    def fields(self, like: Sequence[Tensor], num_rows: int) -> list[Tensor]:
        """Views for `num_rows` >= 1 rows of fields with the widths and dtypes of `like`, one field after the other."""
        views, start = [], 0
        for t in like:
            width = t.shape[1]
            view = torch.frombuffer(self._memory, dtype=t.dtype, count=num_rows * width, offset=start)
            views.append(view.view(num_rows, width))
            start += field_bytes(t, num_rows)
        return views


def field_bytes(like: Tensor, num_rows: int) -> int:
    """The length of a field in a segment, a multiple of ALIGNMENT. Example: 3 rows of 5 in fp32 -> 64."""
    return -(-num_rows * like.shape[1] * like.element_size() // ALIGNMENT) * ALIGNMENT


def create_file(num_bytes: int) -> int:
    """The file descriptor of a new segment of at least `num_bytes`, rounded up to a power of two."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("moe-dualpipe")
    else:
        with tempfile.TemporaryFile() as file:  # it has no name, or has lost it already
            fd = os.dup(file.fileno())
    os.ftruncate(fd, max(MIN_BYTES, 1 << (num_bytes - 1).bit_length()))
    return fd
