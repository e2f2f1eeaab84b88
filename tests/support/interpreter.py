"""What Triton's interpreter lacks for the tests of kernels: TMA reductions, rounding, speed, and a record of writes."""

import time
from collections import Counter

import numpy as np
import torch
import triton.language as tl
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


def call_directly(monkeypatch):
    """Call the functions of a kernel without replacing what is in triton.language again: its launch has done that.

    Triton's own functions use tl.core, which a launch does not replace. It stays replaced after the first call.
    """
    replaced = False

    def call(function, *args, **named):
        nonlocal replaced
        if not replaced and any(value is tl.core for value in function.fn.__globals__.values()):
            interpreter._patch_lang(function.fn)
            replaced = True
        return function.rewrite()(*args, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


def allocate_nan(monkeypatch):
    """Fill the memory of `Tensor.new_empty` with NaN, or the largest integer."""
    empty = torch.Tensor.new_empty

    def poisoned(t, *shape, **options):
        rows = empty(t, *shape, **options)
        return rows.fill_(torch.nan) if rows.is_floating_point() else rows.fill_(torch.iinfo(rows.dtype).max)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def prepare_rank(monkeypatch):
    """Let this process, one of several ranks, run kernels faster, round to bfloat16 as GPUs do, and wait without load.

    A rank that polls a word again lets others run first.
    """
    call_directly(monkeypatch)
    cast, rmw, polled = Builder.cast_impl, Builder.create_atomic_rmw, [0, 0]

    def rounded(builder, source, dtype):
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, source, dtype)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)

    def patient(builder, kind, pointers, *values):
        address = int(pointers.data.flat[0])
        polled[:] = address, polled[1] + 1 if polled[0] == address else 0
        if polled[1] > 1:
            time.sleep(0.0005)
        return rmw(builder, kind, pointers, *values)

    monkeypatch.setattr(Builder, "cast_impl", rounded)
    monkeypatch.setattr(Builder, "create_atomic_rmw", patient)
