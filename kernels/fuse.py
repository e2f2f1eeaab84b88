"""Fuse chains of small operators with torch.compile: norms, rotations, activations, sums.

Each operator of a chain reads and writes whole tensors. torch.compile turns a chain, and its backward, into one or two
kernels that read each tensor once. What it gets here are plain functions without side effects. Products, attention,
communication and deferred weight gradients stay outside, so whether the functions are compiled changes only rounding.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])

BACKEND = "inductor"
_OPERATORS = torch.library.Library("moe_dualpipe", "FRAGMENT")


def fuse(fn: F, compiled: bool, rows_vary: bool = False) -> F:
    """Return `fn` compiled, or `fn` itself if `compiled` is False or gradients are disabled.

    fn: a module-level function of tensors, modules and constants. All layers that call it with the same shapes share
    one graph. rows_vary: the lengths of inputs change from call to call, so the graph must not depend on them.

    Without gradients, as in text generation, shapes often change, and each new shape would be compiled.
    """
    return _compiled(fn, rows_vary) if compiled and torch.is_grad_enabled() else fn


@cache
def _compiled(fn: F, rows_vary: bool) -> F:
    return torch.compile(fn, dynamic=rows_vary, backend=BACKEND)  # type: ignore[return-value]


def copy_compiled(x: Tensor) -> Tensor:
    """`x`; in a compiled function, a copy. It may not be a view of an input: torch would not fuse its backward."""
    return x.clone() if torch.compiler.is_compiling() else x


def opaque(like: Callable[..., Any]) -> Callable[[F], F]:
    """Hide a function from torch.compile, which calls it as one operator. For code that it cannot trace.

    The function takes annotated positional tensors and numbers, and returns new tensors. like: returns empty ones of
    the same shapes, dtypes and strides.
    """

    def decorate(fn: F) -> F:
        # torch.library.custom_op does the same, but each call takes 11 us longer.
        name = fn.__name__.strip("_")
        _OPERATORS.define(name + torch.library.infer_schema(fn, mutates_args=()))
        _OPERATORS.impl(name, fn, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moe_dualpipe::{name}", like, lib=_OPERATORS)
        operator = getattr(torch.ops.moe_dualpipe, name).default

        @wraps(fn)
        def call(*arguments: Any) -> Any:
            return operator(*arguments) if any(map(is_traced, arguments)) else fn(*arguments)

        return call  # type: ignore[return-value]

    return decorate


def is_traced(value: Any) -> bool:
    """Whether this is a tensor without values, with which torch.compile or torch.export traces."""
    return isinstance(value, FakeTensor | FunctionalTensor) or (isinstance(value, Tensor) and is_compiling())


def missing_for_compile() -> str | None:
    """What torch.compile needs and this machine lacks, with what to do; None: nothing."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"a C++ compiler, but {compiler} was not found: install it, or set CXX to another one"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python's header files, but Python.h was not found: install python3-dev"
    return None
