"""Find host syncs: operations of a layer that make the host wait for the GPU.

On CUDA, torch reports them (`torch.cuda.set_sync_debug_mode`). On a CPU, calls that would wait for a GPU are found by
name.
"""

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import CodeLine

_CALLS: dict[Any, str] = {
    Tensor.item: "item()", Tensor.tolist: "tolist()", Tensor.__bool__: "bool()", Tensor.__int__: "int()",
    Tensor.__float__: "float()", Tensor.__index__: "use as an index", Tensor.nonzero: "nonzero()",
    torch.nonzero: "nonzero()", Tensor.masked_select: "masked_select()", torch.masked_select: "masked_select()",
    torch.unique: "unique()", Tensor.unique: "unique()", Tensor.cpu: "cpu()", Tensor.numpy: "numpy()",
    torch.equal: "equal()", Tensor.equal: "equal()", torch.bincount: "bincount()", Tensor.bincount: "bincount()",
    torch.allclose: "allclose()", Tensor.allclose: "allclose()",
}  # fmt: skip
_LIBRARIES = "torch", "warnings", "contextlib", "functools"
_DO_NOT_WAIT = "moe_dualpipe.tools.checks.", "moe_dualpipe.kernels.", "moe_dualpipe.models.layer_calls"


class _Intercept(TorchFunctionMode):
    def __init__(self, report: Callable[[str], None]):
        super().__init__()
        self.report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if call := _waits(func, args, kwargs):
            self.report(call)
        return func(*args, **kwargs)


def _waits(func: Any, args: Any, kwargs: Any) -> str | None:
    """The name of a call that would wait for a GPU; None for other calls."""
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        masked = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
        assigned = func is Tensor.__setitem__ and isinstance(args[2], int | float)
        return "indexing with a mask" if masked and not assigned else None
    if func in (torch.repeat_interleave, Tensor.repeat_interleave):
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
        tensor = isinstance(repeats, Tensor) and kwargs.get("output_size") is None
        return "repeat_interleave() without output_size" if tensor else None
    if func is torch.where and len(args) == 1 and not kwargs:
        return "where() with one argument"
    return _CALLS.get(func)


@contextmanager
def host_syncs(device: str) -> Iterator[dict[str, str]]:
    """Collect the host syncs in this context: the name of each call by `file:line in function`."""
    found: dict[str, str] = {}
    if torch.device(device).type != "cuda":
        with _Intercept(partial(_add, found)):
            yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: (
            _add(found, "a host sync") if "synchroniz" in str(message) else None
        )
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _add(found: dict[str, str], call: str) -> None:
    """Add a call, with the innermost line outside of torch and the standard library.

    Calls in this package's kernels and checks of values are left out: they do not run on a GPU.
    """
    for frame, line in traceback.walk_stack(sys._getframe()):
        name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if name.partition(".")[0] in _LIBRARIES or name == __name__ or file[0] == "<":
            continue
        if not name.startswith(_DO_NOT_WAIT):
            found.setdefault(str(CodeLine(file, line, frame.f_code.co_qualname.rpartition("<locals>.")[2])), call)
        return
