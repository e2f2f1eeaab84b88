"""Counts what a layer launches on a GPU: Triton kernels, and operators of torch that are not views or allocations."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter, jit

from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.expert_parallel import local as local_backend
from moe_dualpipe.kernels.experts import experts
from tests.support.kernels import DEVICE

ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided"}


class Launches(TorchDispatchMode):
    """Names of the launches inside this context."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = []
        cls, run = (jit.JITFunction, "run") if DEVICE == "cuda" else (interpreter.GridExecutor, "__call__")
        launch = getattr(cls, run)

        def recorded(kernel, *args, **options):
            self.names.append(getattr(kernel, "fn", kernel).__name__)
            with _disable_current_modes():  # the interpreter uses torch
                return launch(kernel, *args, **options)

        monkeypatch.setattr(cls, run, recorded)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.overloadpacket.__name__ not in ALLOCATIONS:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_from_ids_to_the_products_there_are_two_launches(monkeypatch):
    monkeypatch.setattr(local_backend, "count_choices", lambda *_: None)  # as on a GPU
    x, weights = torch.randn(3, 16, device=DEVICE), torch.rand(3, 2, device=DEVICE)
    gate_up, down = torch.randn(2, 16, 16, device=DEVICE), torch.randn(2, 16, 8, device=DEVICE)
    ids = torch.randint(-1, 2, (3, 2), device=DEVICE)
    ep = Local(2, "triton")
    with Launches(monkeypatch) as launches:
        route = ep.prepare(ids)
        x, weights = ep.dispatch(x, route, weights).wait()
        y = experts(x, gate_up, down, route.order, weights, kernels="triton")
        ep.combine(y, route).wait()
    assert launches.names == [
        "count_kernel", "scatter_kernel", "swiglu_up_kernel", "rows_times_weights_kernel", "sum_rows_kernel",
    ]  # fmt: skip
