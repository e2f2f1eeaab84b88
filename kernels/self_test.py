"""Compare the Triton kernels with plain torch on a small problem, before a run trusts them on its GPU.

The compiler may be newer than this project, or the GPU unknown to it, and wrong code gives no error: Triton
3.7.1 has computed wrong input gradients on a B300 (Liger-Kernel, pull request 1294). So routing and experts run forward
and backward once, with the widths of the model. A result is wrong if its distance from float64 is more than four times
that of plain torch. This takes milliseconds beside the compilation of the kernels, which the run needs anyway. A file
in the user's cache lists what has passed, for each GPU, versions and sizes.

N rows, K choices per row, E experts, D model dim, F inner width.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from .experts import experts
from .gpu.configs import user_table_path
from .options import Kernels, RoutingOptions
from .routing import expert_order, route

ROWS = 50, 900  # with three experts, tiles for few and for many rows
Results = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What is compared: the operators of a layer with these sizes, on `device`, the current one, in `dtype`."""

    hidden_size: int
    expert_size: int
    num_experts: int
    routing: RoutingOptions
    device: torch.device
    dtype: torch.dtype

    def first_difference(self) -> str | None:
        """Say which result of the Triton kernels is wrong; None if none is, or if the cache says so."""
        if (key := self._key()) in _read_passed():
            return None
        for run in self._problems():
            exact, plain = run(torch.float64, "reference"), run(self.dtype, "reference")
            for name, result in run(self.dtype, "triton").items():
                error, of_plain = _distance(result, exact[name]), _distance(plain[name], exact[name])
                if not error <= 4 * of_plain + max(1e-6, torch.finfo(self.dtype).eps):  # NaN is a difference
                    errors = f"relative error {error:.1e}, plain torch {of_plain:.1e}"
                    return f"the Triton kernels compute a wrong {name} on {self._gpu()} ({errors})"
        path = _passed_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{key}\n")
        return None

    def _problems(self) -> Iterator[Callable[[torch.dtype, Kernels], Results]]:
        normal = torch.Generator(self.device).manual_seed(0)

        def randn(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=normal, device=self.device).to(dtype)

        logits_NE, grads_NK = randn(ROWS[0], self.num_experts), randn(ROWS[0], self.routing.k, dtype=torch.float32)
        yield lambda dtype, kernels: _route(logits_NE.to(dtype), grads_NK, self.routing, kernels)
        gate_up_EGD = randn(3, 2 * self.expert_size, self.hidden_size) * self.hidden_size**-0.5
        down_EDF = randn(3, self.hidden_size, self.expert_size) * self.expert_size**-0.5
        for num_rows in ROWS:
            x_ND, dy_ND = randn(num_rows, self.hidden_size), randn(num_rows, self.hidden_size)
            weights_NK = randn(num_rows, 2, dtype=torch.float32).sigmoid()
            given = x_ND, gate_up_EGD, down_EDF, weights_NK
            for inside in (False, True):
                yield lambda dtype, kernels, given=given, dy=dy_ND, inside=inside: _experts(
                    [t.to(torch.promote_types(t.dtype, dtype)) for t in given], dy.to(dtype), inside, kernels
                )

    def _gpu(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "this CPU"

    def _key(self) -> str:
        tf32 = torch.backends.cuda.matmul.fp32_precision
        digest = hashlib.sha256(repr((self._gpu(), torch.__version__, triton.__version__, tf32, self)).encode())
        folder = Path(__file__).parent
        for path in (*sorted(folder.glob("*.py")), *sorted(folder.glob("gpu/*.*")), user_table_path()):
            digest.update(path.read_bytes() if path.exists() else b"")
        return digest.hexdigest()


def _route(logits_NE: Tensor, grads_NK: Tensor, options: RoutingOptions, kernels: Kernels) -> Results:
    logits_NE = logits_NE.detach().requires_grad_()
    weights_NK, ids_NK = route(logits_NE, **dataclasses.asdict(options), kernels=kernels)
    (d_logits,) = torch.autograd.grad(weights_NK, logits_NE, grads_NK.to(weights_NK.dtype))
    return {
        "choice of experts": ids_NK,
        "routing weight": weights_NK.detach(),
        "gradient of the router's logits": d_logits,
    }


def _experts(given: list[Tensor], dy_ND: Tensor, weight_inside: bool, kernels: Kernels) -> Results:
    """Expert 0 has all rows, expert 1 none, expert 2 four of five. With `weight_inside`, weight gradients are added."""
    x_ND, gate_up_EGD, down_EDF, weights_NK = leaves = [t.detach().clone().requires_grad_() for t in given]
    for w in (gate_up_EGD, down_EDF) if weight_inside else ():
        w.grad_dtype = torch.promote_types(w.dtype, torch.float32)
        w.grad = torch.ones_like(w, dtype=w.grad_dtype)
    ids_NK = torch.tensor([[0, 2]], device=dy_ND.device).repeat(len(dy_ND), 1)
    ids_NK[::5, 1] = -1
    order = expert_order(ids_NK, 3, 2 * len(dy_ND) - int((ids_NK < 0).sum()), kernels)
    y_ND = experts(
        x_ND, gate_up_EGD, down_EDF, order, weights_NK, weight_inside=weight_inside, accumulate=weight_inside,
        kernels=kernels,
    )  # fmt: skip
    y_ND.backward(dy_ND)
    names = ("x", "gate and up", "down", "the routing weights")
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in zip(names, leaves, strict=True)}
    return {"output of the experts": y_ND.detach(), **gradients}  # type: ignore[dict-item]


def _distance(result: Tensor, exact: Tensor) -> float:
    norm = exact.double().norm()
    return float((result.double() - exact.double()).norm() / norm) if norm > 0 else float(result.double().norm())


def _passed_path() -> Path:
    return user_table_path().with_name("self_test.txt")


def _read_passed() -> set[str]:
    path = _passed_path()
    return set(path.read_text().split()) if path.exists() else set()
