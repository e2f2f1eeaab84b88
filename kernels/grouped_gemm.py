"""Grouped matrix products: one product per expert, over rows sorted by expert. Use them to write your own experts.

The expert MLP of a Mixture-of-Experts layer consists of many small products with sizes that depend on the router. With
the rows in expert-major order they are one grouped product:

    offsets = [0, 2, 2, 3]          expert 0 has rows 0-1, expert 1 has no rows, expert 2 has row 2
    y[0:2] = x[0:2] W[0]^T,         y[2:3] = x[2:3] W[2]^T

`grouped_linear` is the differentiable layer. `grouped_mm` (forward and input gradient) and `grouped_wgrad` (weight
gradient) are its products. As in `linear`, a split backward can defer the weight gradient.

The plain-torch version uses `torch.nn.functional.grouped_mm` where possible (on CUDA in bf16 it needs no host sync). It
loops over experts otherwise, and for products in oneDNN (products.py). The Triton kernels are in gpu/gemm.py and
gpu/wgrad.py.

M rows, I input width, O output width, E experts.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .backend import Kernels, aligned, check_contiguous, check_contiguous_rows, forbid_double_backward, use_triton
from .fuse import is_traced, opaque
from .linear import apply_autocast, compute_or_defer, grad_dtype
from .products import chosen_library, generates_code, in_onednn, rows_step
from .weight_grads import WeightGrads


@dataclass(frozen=True, slots=True)
class GroupedGemmOptions:
    """Options of the operators with expert weights. `grouped_linear` documents the fields."""

    weight_grads: WeightGrads | None = None
    accumulate: bool = False
    num_sms: int | None = None
    kernels: Kernels = "auto"

    def check(self, **parameters: Tensor) -> None:
        """Raise ValueError for num_sms below 1, and for `parameters` whose gradients cannot be accumulated in fp32."""
        if self.num_sms is not None and self.num_sms < 1:
            raise ValueError(f"num_sms must be at least 1, or None for all: got {self.num_sms}")
        trained = {n: p for n, p in parameters.items() if p.requires_grad and torch.is_grad_enabled()}
        for name, parameter in trained.items() if self.accumulate else ():
            if not parameter.is_leaf:
                problem = f"{name} must be a leaf, not computed from other tensors"
                raise ValueError(f"accumulate=True adds to {name}.grad: {problem}")
            if (dtype := grad_dtype(parameter)) not in (torch.float32, torch.float64):
                problem = f"the gradient of {name} is {dtype}: set {name}.grad_dtype = torch.float32"
                raise ValueError(f"accumulate=True adds in float32, but {problem}")


# ---- the products ----


def grouped_mm(
    x_MI: Tensor, w_EOI: Tensor, expert_offsets: Tensor, transposed: bool = False, num_sms: int | None = None,
    kernels: Kernels = "auto",
) -> Tensor:  # fmt: skip
    """Return y[m] = W[e] x[m], [M, O] from [M, I]; if `transposed`, W[e]^T x[m], [M, I] from [M, O].

    Arguments and errors are those of `grouped_linear`. Not differentiable.
    """
    _check(x_MI, w_EOI, expert_offsets, w_EOI.shape[1 if transposed else -1])
    GroupedGemmOptions(num_sms=num_sms).check()
    return _grouped_mm(x_MI, w_EOI, expert_offsets, transposed, num_sms, kernels)


def _grouped_mm(
    x_MI: Tensor, w_EOI: Tensor, expert_offsets: Tensor, transposed: bool, num_sms: int | None, kernels: Kernels
) -> Tensor:
    if not use_triton(kernels, x_MI, w_EOI, expert_offsets):
        return _grouped_mm_reference(x_MI, w_EOI if transposed else w_EOI.mT, expert_offsets[1:])
    from .gpu.gemm import rows_times_weights
    from .gpu.tiles import Tiling

    tiling = Tiling(aligned("expert_offsets", expert_offsets.contiguous()), len(x_MI))
    x_MI, w_EOI = check_contiguous_rows("x", x_MI), aligned("w", check_contiguous("w", w_EOI))
    return rows_times_weights("up_backward" if transposed else "down", x_MI, w_EOI, tiling, transposed, None, num_sms)


def grouped_wgrad(
    dy_MO: Tensor, x_MI: Tensor, expert_offsets: Tensor, dtype: torch.dtype | None = None,
    add_to: Tensor | None = None, num_sms: int | None = None, kernels: Kernels = "auto",
) -> Tensor:  # fmt: skip
    """Return dW [E, O, I], with dW[e] = the sum of dy[m] x[m]^T over the rows m of expert e, or zeros without rows.

    expert_offsets: as in `grouped_linear`. dtype: of the result; None: that of x. add_to: add dW to this tensor in
    place, in its dtype, and return it. Sums are taken in fp32. Not differentiable.
    """
    if dy_MO.ndim != 2 or x_MI.ndim != 2 or len(dy_MO) != len(x_MI) or dy_MO.dtype != x_MI.dtype:
        got = f"{[*dy_MO.shape]} in {dy_MO.dtype} and {[*x_MI.shape]} in {x_MI.dtype}"
        raise ValueError(f"grouped_wgrad needs dy [M, O] and x [M, I] of the same dtype: got {got}")
    shape = (len(expert_offsets) - 1, dy_MO.shape[1], x_MI.shape[1])
    check_offsets(expert_offsets, shape[0], len(x_MI))
    GroupedGemmOptions(num_sms=num_sms).check()
    if add_to is not None and add_to.shape != shape:
        raise ValueError(f"add_to must be {[*shape]}: got {[*add_to.shape]}")
    return _grouped_wgrad(dy_MO, x_MI, expert_offsets, dtype or x_MI.dtype, num_sms, kernels, add_to)


def _grouped_wgrad(
    dy_MO: Tensor, x_MI: Tensor, expert_offsets: Tensor, dtype: torch.dtype, num_sms: int | None, kernels: Kernels,
    add_to: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if not use_triton(kernels, x_MI, dy_MO, expert_offsets, add_to):
        grad_EOI = _grouped_mm_reference(dy_MO.mT, x_MI, expert_offsets[1:])
        return grad_EOI.to(dtype) if add_to is None else add_to.add_(grad_EOI)
    from .gpu.wgrad import weight_gradients

    dy_MO, x_MI = check_contiguous_rows("dy", dy_MO), check_contiguous_rows("x", x_MI)
    offsets = aligned("expert_offsets", expert_offsets.contiguous())
    return weight_gradients(dy_MO, x_MI, offsets, dtype, add_to=add_to, num_sms=num_sms)


def _like_grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    return a.new_empty(len(a), b.shape[2]) if b.ndim == 3 else a.new_empty(len(ends_E), len(a), b.shape[1])


@opaque(_like_grouped_mm)
def _grouped_mm_reference(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """One product per expert e, over the rows from ends_E[e - 1] to ends_E[e].

    a [M, I] and b [E, I, O] give [M, O]. a [I, M] and b [M, O] give [E, I, O], which is zero for experts without rows.
    """
    rounded = generates_code(a) and not torch.is_grad_enabled()  # what is written in place has no second derivative
    grouped = a.dtype in (torch.bfloat16, torch.float16, torch.float32) and not in_onednn(a)
    if grouped and not rounded and _fits_grouped_mm(a) and _fits_grouped_mm(b):
        return F.grouped_mm(a, b, offs=ends_E.contiguous()).contiguous()
    ends = ends_E.tolist()
    if rounded:
        return _grouped_mm_onednn(a, b, ends)
    y = _like_grouped_mm(a, b, ends_E)
    for e, (start, end) in enumerate(pairwise([0, *ends])):
        if b.ndim == 3:
            y[start:end] = a[start:end] @ b[e]
        else:
            y[e] = a[:, start:end] @ b[start:end]
    if b.ndim == 3:
        y[ends[-1] :] = 0
    return y


def _grouped_mm_onednn(a: Tensor, b: Tensor, ends: list[int]) -> Tensor:
    """`_grouped_mm_reference` in oneDNN. Numbers of rows become multiples of `rows_step`, so there are few shapes."""
    experts = [(start, end, rows_step(end - start)) for start, end in pairwise([0, *ends])]
    if b.ndim == 2:
        y_EIO = a.new_empty(len(ends), len(a), b.shape[1])
        if a.dtype != torch.float32:  # a sum of two products would be rounded twice: rows of zeros are appended
            for y_IO, (start, end, step) in zip(y_EIO, experts, strict=True):
                rows = [F.pad(t[start:end], (0, 0, 0, (start - end) % step)) for t in (a.mT, b)]
                torch.mm(rows[0].mT, rows[1], out=y_IO)
            return y_EIO
        parts = [
            (y_IO, start, end - (end - start) % step, end)
            for y_IO, (start, end, step) in zip(y_EIO, experts, strict=True)
        ]
        with chosen_library(b[: len(b) // len(ends)], len(a)):
            for y_IO, start, middle, _ in parts:
                torch.mm(a[:, start:middle], b[start:middle], out=y_IO)
        for y_IO, _, middle, end in parts:
            if middle < end:
                y_IO.addmm_(a[:, middle:end], b[middle:end])
        return y_EIO
    y_MO = a.new_empty(len(a), b.shape[2])
    with chosen_library(a[: len(a) // len(ends)], b.shape[2]):
        for w_IO, (start, end, step) in zip(b, experts, strict=True):
            stop = end + (start - end) % step
            if stop <= len(a):  # rows from `end` on are those of later experts, which write them again
                torch.mm(a[start:stop], w_IO, out=y_MO[start:stop])
            else:
                first = max(0, len(a) - (stop - start))
                y_MO[start:end] = (a[first:] @ w_IO)[start - first : end - first]
    y_MO[ends[-1] :] = 0
    return y_MO


def _fits_grouped_mm(t: Tensor) -> bool:
    """Whether F.grouped_mm accepts `t`: rows or columns are contiguous, and a multiple of 16 bytes apart."""
    (rows, columns), (down, across) = t.shape[-2:], t.stride()[-2:]
    apart, length = (down, columns) if across == 1 else (across, rows)
    return 1 in (down, across) and apart >= length and apart * t.element_size() % 16 == 0


# ---- the layer ----


class GroupedLinearFunction(torch.autograd.Function):
    """`grouped_linear` of arguments that are checked already."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, w_EOI: Tensor, expert_offsets: Tensor, options: GroupedGemmOptions) -> Tensor:
        ctx.save_for_backward(x_MI if ctx.needs_input_grad[1] else None, w_EOI, expert_offsets)
        ctx.parameter, ctx.options = w_EOI, options
        return _grouped_mm(x_MI, w_EOI, expert_offsets, False, options.num_sms, options.kernels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dy_MO, options = grads[0].contiguous(), ctx.options
        if use_triton(options.kernels, dy_MO):
            forbid_double_backward()
        x_MI, w_EOI, expert_offsets = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _grouped_mm(dy_MO, w_EOI, expert_offsets, True, options.num_sms, options.kernels)
        if ctx.needs_input_grad[1]:
            dtype = grad_dtype(ctx.parameter)
            weight_grad = partial(_grouped_wgrad, dy_MO, x_MI, expert_offsets, dtype, options.num_sms, options.kernels)
            grad_w = compute_or_defer(options.weight_grads, ctx.parameter, weight_grad, weight_grad, options.accumulate)
        return grad_x, grad_w, None, None


def grouped_linear(
    x_MI: Tensor, w_EOI: Tensor, expert_offsets: Tensor, weight_grads: WeightGrads | None = None, *,
    accumulate: bool = False, num_sms: int | None = None, kernels: Kernels = "auto",
) -> Tensor:  # fmt: skip
    """Return y_MO with y[m] = W[e] x[m] for the rows m of each expert e. The module docstring has an example.

    x_MI: [M, I], rows sorted by expert. w_EOI: [E, O, I]. expert_offsets: [E + 1] int32, from 0 to M, never falling.
    On a GPU these values are not checked, because that would be a host sync: with others, the result is undefined.
    weight_grads: defers the weight gradient during a split backward; None: never deferred.
    accumulate: backward adds the weight gradient to `w.grad` in fp32 instead of returning it to autograd, unless w has
    hooks.
    num_sms: maximum number of multiprocessors that the Triton products use, which leaves the others to communication.
    kernels: see backend.py. Triton needs a contiguous w and cannot be differentiated twice.
    Raises ValueError if shapes, dtypes or devices do not match.
    """
    options = GroupedGemmOptions(weight_grads, accumulate, num_sms, kernels)
    x_MI, w_EOI = apply_autocast(x_MI, w_EOI)
    _check(x_MI, w_EOI, expert_offsets, w_EOI.shape[-1])
    options.check(w=w_EOI)
    return GroupedLinearFunction.apply(x_MI, w_EOI, expert_offsets, options)  # type: ignore[return-value]


def _check(x: Tensor, w: Tensor, expert_offsets: Tensor, width: int) -> None:
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != width:
        raise ValueError(f"a grouped product needs x [M, I] and w [E, O, I]: got {[*x.shape]} and {[*w.shape]}")
    if x.dtype != w.dtype:
        raise ValueError(f"a grouped product needs x and w of the same dtype: got {x.dtype} and {w.dtype}")
    check_offsets(expert_offsets, w.shape[0], len(x))


def check_offsets(expert_offsets: Tensor, num_experts: int, num_rows: int) -> None:
    if expert_offsets.shape != (num_experts + 1,) or expert_offsets.dtype != torch.int32:
        got = f"{[*expert_offsets.shape]} in {expert_offsets.dtype}"
        raise ValueError(f"{num_experts} experts need {num_experts + 1} offsets in int32: got {got}")
    if expert_offsets.is_cuda or is_traced(expert_offsets):  # reading the values would be a host sync
        return
    offsets = expert_offsets.tolist()
    first, last = offsets[0], offsets[-1]
    if first != 0:
        raise ValueError(f"the first offset must be 0: got {first}")
    if last != num_rows:
        raise ValueError(f"the last offset must be the number of rows: got {last} of {num_rows}")
    for expert, (start, stop) in enumerate(pairwise(offsets)):
        if stop < start:
            raise ValueError(f"offsets must not fall: expert {expert} would have the rows from {start} to {stop}")
