"""The operators of a Mixture-of-Experts layer, each in plain torch and in Triton behind one autograd function.

Import an operator from its module, for example `from moe_dualpipe.kernels.experts import experts`. Everything that
needs triton is in gpu/, which is imported only when Triton is chosen (backend.py). options.py needs no torch, so the
modules are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import backend, cross_entropy, experts, grouped_gemm, linear, options, permute, routing, weight_grads

__all__ = [
    "backend", "cross_entropy", "experts", "grouped_gemm", "linear", "options", "permute", "routing", "weight_grads",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __name__)
