"""Tests of the Triton kernels: on a GPU if there is one, else in Triton's interpreter.

With `guards`, every tensor that a launcher allocates is filled with NaN (integers: the largest value) and lies between
two guard areas with the same values. This detects elements that a kernel does not write, and writes out of bounds.
"""

import pytest
import torch

pytest.importorskip("triton")

from tests.machines.interpreter import add_tma_reductions, call_directly, check_accesses

PAD = 64  # guard elements on each side; a multiple of 16 bytes, which keeps the alignment


class _Guarded:
    def __init__(self):
        self.buffers: list[tuple[torch.Tensor, int]] = []
        self.allocate = torch.empty

    def empty(self, *shape, dtype=None, device=None, **options):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if options or 0 in shape:
            return self.allocate(*shape, dtype=dtype, device=device, **options)
        numel = torch.Size(shape).numel()
        buffer = self.allocate(numel + 2 * PAD, dtype=dtype, device=device).fill_(poison(dtype))
        self.buffers.append((buffer, numel))
        return buffer[PAD : PAD + numel].view(shape)

    def empty_like(self, t, **options):
        return self.empty(*t.shape, dtype=t.dtype, device=t.device, **options)

    def new_empty(self, t, *shape, dtype=None, device=None, **options):
        return self.empty(*shape, dtype=dtype or t.dtype, device=device or t.device, **options)

    def check(self):
        for buffer, numel in self.buffers:
            for guard in (buffer[:PAD], buffer[PAD + numel :]):
                untouched = guard.isnan() if guard.is_floating_point() else guard == poison(guard.dtype)
                assert untouched.all(), f"a kernel wrote outside its {numel} elements of {buffer.dtype}"


def poison(dtype):
    dtype = dtype or torch.float32
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


@pytest.fixture
def guards(monkeypatch):
    """Make launchers allocate poisoned memory between guards, which are checked after the test."""
    guarded = _Guarded()
    monkeypatch.setattr(torch, "empty", guarded.empty)
    monkeypatch.setattr(torch, "empty_like", guarded.empty_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *shape, **options: guarded.new_empty(t, *shape, **options))
    yield guarded
    monkeypatch.undo()
    guarded.check()


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    add_tma_reductions(monkeypatch)
    call_directly(monkeypatch)
    check_accesses(monkeypatch)
