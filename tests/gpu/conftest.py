"""Tests of the Triton kernels: on a GPU if there is one, else in Triton's interpreter.

With `guards`, every tensor that a launcher allocates is filled with NaN (integers: the largest value) and lies between
two guard areas with the same values. This detects elements that a kernel does not write, and writes out of bounds.
"""

import pytest
import torch

pytest.importorskip("triton")

from tests.machines.interpreter import add_tma_reductions, call_directly, check_accesses

PAD = 64  # guard elements on each side; a multiple of 16 bytes, which keeps the alignment


def poison(dtype):
    dtype = dtype or torch.float32
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


@pytest.fixture
def guards(monkeypatch):
    """Make launchers allocate poisoned memory between guards, which are checked after the test."""
    buffers: list[tuple[torch.Tensor, int]] = []
    allocate = torch.empty

    def empty(*shape, dtype=None, device=None, **options):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if options or 0 in shape:
            return allocate(*shape, dtype=dtype, device=device, **options)
        numel = torch.Size(shape).numel()
        buffer = allocate(numel + 2 * PAD, dtype=dtype, device=device).fill_(poison(dtype))
        buffers.append((buffer, numel))
        return buffer[PAD : PAD + numel].view(shape)

    def new_empty(t, *shape, dtype=None, device=None, **options):
        return empty(*shape, dtype=dtype or t.dtype, device=device or t.device, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda t, **options: new_empty(t, *t.shape, **options))
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield
    monkeypatch.undo()
    for buffer, numel in buffers:
        for guard in (buffer[:PAD], buffer[PAD + numel :]):
            untouched = guard.isnan() if guard.is_floating_point() else guard == poison(guard.dtype)
            assert untouched.all(), f"a kernel wrote outside its {numel} elements of {buffer.dtype}"


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    add_tma_reductions(monkeypatch)
    call_directly(monkeypatch)
    check_accesses(monkeypatch)
