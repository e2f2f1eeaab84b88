"""Patches of Triton's interpreter for the tests of kernels: TMA reductions, rounding, speed, and checks of accesses."""

import time
from dataclasses import replace
from functools import wraps
from inspect import signature
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

Builder = interpreter.InterpreterBuilder


def _descriptor_add(builder, _kind, descriptor, value, indices):
    pointers, mask = descriptor.materialize_pointers(indices)
    before = _with_defaults(builder.create_masked_load, pointers, mask)
    total = TensorHandle(before.data + value.data, value.dtype)
    return _with_defaults(builder.create_masked_store, pointers, total, mask)


def _with_defaults(method, *arguments):
    """The call with None for all further parameters: Triton 3.9 has fewer of them."""
    return method(*arguments, *[None] * (len(signature(method).parameters) - len(arguments)))


def add_tma_reductions(monkeypatch):
    """Let `descriptor.atomic_add` run in the interpreter."""
    monkeypatch.setattr(Builder, "create_descriptor_reduce", _descriptor_add, raising=False)


def check_accesses(monkeypatch):
    """Let a kernel fail that reads or writes outside its arguments, also if the value would change no result.

    `addresses`, of one-sided transfers, gives access to the memory of all ranks. A product writes each element once, so
    no order of its programs changes a result, and a row tile does not touch the next expert.
    """
    prepare = interpreter.GridExecutor._init_args_hst
    memory = SimpleNamespace(starts=np.zeros(0, np.uint64), ends=np.zeros(0, np.uint64), kernel="", written=None)

    def arguments(executor, given, named):
        on_host = prepare(executor, given, named)
        values = {**dict(zip(executor.arg_names, on_host[0], strict=False)), **on_host[1]}
        tensors = {name: getattr(value, "base", value) for name, value in values.items()}  # base: of a TMA descriptor
        tensors = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor) and t.numel()}
        areas = [area_of(t) for t in tensors.values()]
        for name, t in tensors.items():
            problem = "does not begin at a multiple of 16 bytes: a GPU would compile another variant"
            assert t.data_ptr() % 16 == 0, f"{executor.fn.__name__}: {name} {problem}"
        if "addresses" in values:
            size = 4 * values["R"] * values["REGION"]
            areas += [(start, start + size) for start in values["addresses"].tolist()]
        merged: list[tuple[int, int]] = []
        for start, end in sorted(areas):
            if merged and start <= merged[-1][1]:
                start, end = merged[-1][0], max(end, merged.pop()[1])
            merged.append((start, end))
        memory.starts, memory.ends = np.array(merged, dtype=np.uint64).reshape(-1, 2).T
        memory.kernel, memory.written = executor.fn.__name__, set() if "PRECISION" in values else None
        return on_host

    def checked(name, mask_at):
        method = getattr(Builder, name)

        @wraps(method)
        def call(builder, *values, **named):
            pointers = next(value for value in values if isinstance(value, TensorHandle))
            addresses, size = pointers.data, pointers.get_element_ty().primitive_bitwidth // 8
            if mask_at is not None:
                mask = np.asarray(values[mask_at].data, dtype=bool)
                addresses = np.broadcast_to(addresses, mask.shape)[mask]
            area = np.searchsorted(memory.starts, addresses, "right")
            inside = (area > 0) & (addresses + np.uint64(size) <= memory.ends[area - 1])
            assert inside.all(), f"{memory.kernel}: {name} outside of its arguments"
            if name == "create_masked_store" and memory.written is not None:
                before = len(memory.written)
                memory.written.update(addresses.tolist())
                assert len(memory.written) == before + addresses.size, f"{memory.kernel}: an element is written twice"
            return method(builder, *values, **named)

        monkeypatch.setattr(Builder, name, call)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", arguments)
    checked("create_masked_load", 1)
    checked("create_masked_store", 2)
    checked("create_atomic_rmw", 3)
    checked("create_atomic_cas", None)


def area_of(t: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first byte of a tensor to the end of its last element."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def call_directly(monkeypatch):
    """Call the functions of a kernel without replacing what is in triton.language again: its launch has done that.

    Triton's own functions use tl.core, which a launch does not replace. It stays replaced after the first call.
    Integers are not checked for overflow, which takes half the time: an index that overflows leaves its tensor.
    """
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    replaced = False

    def call(function, *args, **named):
        nonlocal replaced
        if not replaced and any(value is tl.core for value in function.fn.__globals__.values()):
            interpreter._patch_lang(function.fn)
            replaced = True
        return function.rewrite()(*args, **named)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


def compute_fp8(monkeypatch):
    """Let the interpreter round to e4m3 as GPUs do, and multiply with the scales of MX."""
    cast = Builder.create_fp_to_fp

    def rounded(builder, source, dtype, mode):
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.float8e4nv):
            return cast(builder, source, dtype, mode)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn)
        return TensorHandle(values.view(torch.uint8).numpy(), tl.float8e4nv)

    def dot_scaled(_builder, a, of_a, _format_a, b, of_b, _format_b, _fast, _pack_a, _pack_b, acc):
        scales = (np.exp2(of.data.astype(np.float32) - 127).repeat(32, 1) for of in (of_a, of_b))
        a_MK, b_NK = (s * from_fp8(numbers) for s, numbers in zip(scales, (a.data, b.data.T), strict=True))
        return TensorHandle(acc.data + a_MK @ b_NK.T, tl.float32)

    monkeypatch.setattr(Builder, "create_fp_to_fp", rounded)
    monkeypatch.setattr(Builder, "create_dot_scaled", dot_scaled, raising=False)


def from_fp8(numbers: np.ndarray) -> np.ndarray:
    """Bytes that hold numbers in e4m3, in fp32."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).view(torch.float8_e4m3fn).float().numpy()


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
