"""Fuse chains of small operators with torch.compile: norms, rotations, activations, sums.

Each operator of a chain reads and writes whole tensors. torch.compile turns a chain, and its backward, into one or two
kernels that read each tensor once. What it gets here are plain functions without side effects. Products, attention,
communication and deferred weight gradients stay outside, so whether the functions are compiled changes only rounding.
"""

import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

BACKEND = "inductor"


def fuse(fn: F, compiled: bool, rows_vary: bool = False) -> F:
    """Return `fn` compiled, or `fn` itself if `compiled` is False or gradients are disabled.

    fn: a module-level function of tensors, modules and constants. All layers that call it with the same shapes share
    one graph. rows_vary: the lengths of inputs change from call to call, so the graph must not depend on them.

    Without gradients, as in text generation, shapes often change, and each new shape would be compiled.
    """
    return _compiled(fn, rows_vary) if compiled and torch.is_grad_enabled() else fn


@cache
def _compiled(fn: F, rows_vary: bool) -> F:
    return torch.compile(fn, dynamic=rows_vary, backend=BACKEND)


def find_compiler() -> str | None:
    """The C++ compiler that torch.compile uses on a CPU: $CXX, else g++ (clang++ on macOS). None: there is none."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))
