"""What Triton's interpreter lacks for the tests of kernels: TMA reductions, and a record of what kernels write."""

from collections import Counter

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

Builder = interpreter.InterpreterBuilder


def _descriptor_add(builder, _kind, descriptor, value, indices):
    pointers, mask = descriptor.materialize_pointers(indices)
    before = builder.create_masked_load(pointers, mask, None, None, None, False)
    return builder.create_masked_store(pointers, TensorHandle(before.data + value.data, value.dtype), mask, None, None)


def add_tma_reductions(monkeypatch):
    """Let `descriptor.atomic_add` run in the interpreter."""
    monkeypatch.setattr(Builder, "create_descriptor_reduce", _descriptor_add, raising=False)


def record_writes(monkeypatch):
    """Return a counter of writes by address, which stores and TMA reductions update."""
    store, writes = Builder.create_masked_store, Counter()

    def recorded(builder, pointers, value, mask, *options):
        inside = np.asarray(mask.data)
        writes.update(np.broadcast_to(pointers.data, inside.shape)[inside].tolist())
        return store(builder, pointers, value, mask, *options)

    monkeypatch.setattr(Builder, "create_masked_store", recorded)
    return writes
