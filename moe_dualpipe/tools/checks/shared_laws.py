"""Laws for all kinds of layers: what a call may depend on, gradients, and checkpoints."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.weight_grads import WeightGrads, bind
from ...messages import plural
from .host_syncs import host_syncs
from .laws import Broken, Law, Suspect, Unchecked
from .subject import Subject, random_like, relative, row_errors, worst_row

_STEP, _GRADIENT = 1e-6, 1e-5  # finite differences in fp64: the step, and the largest valid relative error
_STEP_FP32, _GRADIENT_FP32 = 1e-2, 5e-2
_DIRECTIONS = 2
_INPUT = "the input"


# ---- what a call may depend on, and change ----


def is_built(subject: Subject) -> str:
    return plural(sum(parameter.numel() for parameter in subject.module.parameters()), "parameter")


def returns_its_dtype(subject: Subject) -> str:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        module = copy.deepcopy(subject.module).to(dtype)
        for x in subject.examples():
            with torch.no_grad():
                subject.call(module, x.to(dtype))
    return f"{[*subject.run(subject.draw(1))[0].shape]} in fp64, fp32, bf16"


def input_is_not_written(subject: Subject) -> str:
    x = subject.draw(1)
    before = x.clone()
    subject.run(x)
    error, row = _largest(row_errors(x, before))
    if error:
        raise Broken(
            f"forward changes its input in place, first at {subject.row_name(row)}, but other layers use this tensor, "
            "too. Replace in-place operations such as `x += y` and `x.mul_(y)` with `x = x + y` and `x = x * y`"
        )
    return "unchanged"


def is_deterministic(subject: Subject) -> str:
    """Two calls with the same input, and with the same values of `averaged_buffers`.

    A layer with such buffers, or that draws random numbers in training, is put into eval mode for the other laws.
    """
    x = subject.draw(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = subject.run(x)
        if _same(first, subject.run(x)):
            if subject.averaged:
                subject.module.eval()
            return "two calls are bit-equal" + "; other checks use eval mode" * bool(subject.averaged)
        torch.manual_seed(1)
        if _same(first, subject.run(x)):
            subject.module.eval()
            if _same(subject.run(x), subject.run(x)):
                raise Unchecked("forward draws random numbers in training, as for dropout; other checks use eval mode")
            raise Broken(
                "forward draws random numbers in eval mode, too: two calls with the same input differ. Draw them only "
                "if `self.training`"
            )
        subject.run(x)
    error, row = _largest(row_errors(subject.run(x)[0], first[0]))
    raise Broken(
        f"two calls with the same input differ{_at(subject, row, error)}. Check that forward does not keep state in "
        "`self` between calls, such as a counter or a running mean, and does not read uninitialized memory, such as "
        "that of torch.empty"
    )


def has_no_state(subject: Subject) -> str:
    """Run inputs A, B, A. Both results of A must be equal, and that of B must equal the result of a new layer."""
    a, b = subject.draw(1), subject.draw(2)
    new = subject.build(0).train(subject.module.training)
    with torch.no_grad():
        alone = subject.call(new, b)
    first, between, again = subject.run(a), subject.run(b), subject.run(a)
    for found, expected in ((again, first), (between, alone)):
        if not _same(found, expected):
            error, row = _largest(row_errors(found[0], expected[0]))
            raise Broken(
                f"a call changes the result of a later call with another input{_at(subject, row, error)}: forward "
                "keeps state in `self`, such as a cache or a running mean. A pipeline alternates between "
                "micro-batches, so compute everything anew in each call"
            )
    return "inputs A, B, A: both results of A are bit-equal"


def needs_no_host_sync(subject: Subject) -> str:
    x = subject.draw(1).requires_grad_()
    with host_syncs(subject.device) as found:
        y = subject.call(subject.module, x)[0]
        if y.requires_grad:
            y.sum().backward()
    subject.module.zero_grad()
    if found:
        calls = ", ".join(f"{call} at {place}" for place, call in found.items())
        raise Suspect(
            f"the host waits for the GPU: {calls}. The result is correct, but each wait leaves the GPU without work, "
            "and communication cannot overlap. Keep sizes on the GPU; `grouped_linear` of moe_dualpipe.kernels reads "
            "expert_offsets there"
        )
    return "none"


# ---- gradients ----


def parameters_get_gradients(subject: Subject) -> str:
    x = subject.draw(1)
    y, *_ = subject.backward(x)
    missing = [(label, view) for label, view, grad in subject.weights() if grad is None or not bool(grad.any())]
    if not missing:
        number = sum(1 for _ in subject.weights())
        return plural(number, "weight") if number else "no trained parameters"
    label, view = missing[0]
    kept = view.clone()
    view += random_like(view, 3)
    used = not _same(subject.run(x), (y,))
    view.copy_(kept)
    more = f" (like {plural(len(missing) - 1, 'other weight')})" if len(missing) > 1 else ""
    if used:
        raise Broken(
            f"{label} gets no gradient{more}, although the result depends on it: autograd is cut off by .detach(), "
            ".data, torch.no_grad() or a new torch.tensor. Remove this call, or freeze the weight with "
            "requires_grad=False"
        )
    raise Broken(f"{label} gets no gradient{more}: the result does not depend on it. Use it in forward, or remove it")


def gradients_are_right(subject: Subject) -> str:
    """Directional derivatives of each expert's part of each parameter, and of the input."""
    x = subject.draw(1)
    exact = subject.computes_in_fp64(subject.run(x)[0])
    step, limit = (_STEP, _GRADIENT) if exact else (_STEP_FP32, _GRADIENT_FP32)
    worst, count = 0.0, 0
    for seed in range(_DIRECTIONS):
        for label, tensor, grad in _gradients(subject, x, 1.0, seed):
            direction = random_like(tensor, seed + 10)
            expected, kept_rows = _derivative(subject, x, tensor, direction, step, seed)
            if grad is None and label == _INPUT and abs(expected) > 1e-12:
                raise Broken(
                    "the input gets no gradient: autograd is cut off by .detach(), .data or torch.no_grad(), so "
                    "earlier layers would not train"
                )
            if grad is None or not (grad.any() or label == _INPUT):  # of weights: another law
                continue
            if kept_rows is not None:
                grad = next(g for name, _, g in _gradients(subject, x, kept_rows, seed) if name == label)
                assert grad is not None
            got = float((grad.double() * direction).sum())
            error = abs(got - expected) / max(abs(expected), 1e-3 * float(grad.norm() * direction.norm()), 1e-300)
            if not error <= limit:
                ratio = f"{got / expected:.3g}" if abs(expected) > 1e-12 else "1"
                times = f" ({ratio} times as much)" if ratio != "1" else ""
                raise Broken(
                    f"the gradient of {label} is wrong: in a random direction, finite differences give {expected:.6g}, "
                    f"but backward gives {got:.6g}{times}. Check the backward of your autograd functions and hooks, "
                    "and what forward computes under torch.no_grad() or from .detach()"
                )
            worst, count = max(worst, error), count + 1
    what = "" if exact else ", the layer computes in fp32"
    return f"{plural(count, 'derivative')}, largest error {worst:.0e} of {limit:.0e}{what}"


def _gradients(
    subject: Subject, x: Tensor, factor: float | Tensor, seed: int
) -> list[tuple[str, Tensor, Tensor | None]]:
    """Names, values and gradients of the input and of the weights. Gradients of attached losses are subtracted."""
    found = []
    for scale in (factor, 0.0):
        x_grad = subject.backward(x, seed, scale)[2]
        weights = [(name, view, None if grad is None else grad.clone()) for name, view, grad in subject.weights()]
        found.append([(_INPUT, x, x_grad), *weights])
    return [
        (name, tensor, grad if grad is None or own is None else grad - own)
        for (name, tensor, grad), (_, _, own) in zip(*found, strict=True)
    ]


def _derivative(
    subject: Subject, x: Tensor, tensor: Tensor, direction: Tensor, step: float, seed: int
) -> tuple[float, Tensor | None]:
    """d/dt of sum(v * y) at t = 0, with `tensor` replaced by tensor + t * direction.

    Rows whose decisions (other outputs, such as expert ids) differ between -step and step are left out. The second
    result is then 1 for rows that count and 0 for the others; None if all rows count.
    """
    kept, ends = tensor.clone(), []
    for t in (step, -step):
        tensor.copy_(kept + t * direction)
        ends.append(subject.run(x))
    tensor.copy_(kept)
    (above, *decisions), (below, *others) = ends
    counted = torch.ones_like(above[..., :1])
    for a, b in zip(decisions, others, strict=True):
        if not a.is_floating_point():
            counted *= (a == b).all(-1, keepdim=True)
    slopes = (above.double() - below.double()) * random_like(above, seed) * counted / (2 * step)
    return float(slopes.sum()), None if counted.all() else counted


def split_equals_whole(subject: Subject) -> str:
    """Deferred weight gradients (kernels/weight_grads.py), twice, so that gradients also accumulate."""
    x = subject.draw(1)
    if not subject.call(subject.module, x.clone().requires_grad_())[0].requires_grad:
        raise Unchecked("the output has no gradients")
    _, _, whole_x = subject.backward(x)
    whole = {label: None if grad is None else grad.clone() for label, _, grad in subject.weights()}
    deferred, limit = WeightGrads(), subject.tolerance(subject.run(x)[0])
    bind(subject.module, deferred)
    subject.module.zero_grad()
    number = 0
    try:
        for key in range(2):
            leaf = x.clone().requires_grad_()
            y = subject.call(subject.module, leaf)[0]
            with deferred.defer_to(key):
                y.backward(random_like(y, 0))
            number = len(deferred._deferred[key])
            deferred.run_deferred(key)
            check_equal("the gradient of the input", leaf.grad, whole_x, limit, _DEFERRED, _HINT)
        for label, _, grad in subject.weights():
            expected = whole[label]
            twice = None if expected is None else 2 * expected
            check_equal(f"the gradient of {label}", grad, twice, limit, _DEFERRED, _HINT)
    finally:
        bind(subject.module, None)
        subject.module.zero_grad()
    return f"equal, {number} deferred" if number else "equal, none deferred"


_DEFERRED = " if weight gradients are deferred"
_HINT = (
    "If `weight_grads.defers(weight)` is true, backward must call `weight_grads.defer` once for this weight and return "
    "None as its gradient; otherwise it must return the gradient"
)


def check_equal(label: str, got: Tensor | None, wanted: Tensor | None, limit: float, when: str, hint: str) -> None:
    """Raise Broken if the tensors differ. None counts as zeros. when: in which case; hint: the way out."""
    if (got is None or not got.any()) and (wanted is None or not wanted.any()):
        return
    error = float("inf") if got is None or wanted is None else relative(got, wanted)
    if error > limit:
        size = "is missing" if got is None else f"differs by {error:.1e}"
        if got is not None and wanted is not None and got.shape == wanted.shape and wanted.any():
            size += f" (about {float((got * wanted).sum() / wanted.square().sum()):.2g} times as large)"
        raise Broken(f"{label} {size}{when}. {hint}")


# ---- checkpoints ----


def checkpoint_is_complete(subject: Subject) -> str:
    """A layer with other initial weights gives the same results after it loads the state of the first."""
    x = subject.draw(1)
    other = subject.build(1)
    try:
        other.load_state_dict(copy.deepcopy(subject.module.state_dict()))
    except RuntimeError as error:
        raise Broken(f"the state of the layer cannot be loaded into the same layer: {error}") from error
    with torch.no_grad():
        loaded = subject.call(other.train(subject.module.training), x)
    expected = subject.run(x)
    error, row = _largest(row_errors(loaded[0], expected[0]))
    if error > subject.tolerance(expected[0]) or not _same(loaded[1:], expected[1:]):
        raise Broken(
            f"after saving and loading, the result differs{_at(subject, row, error)}: a tensor of the layer is not in "
            "its state_dict(). Store tensors as nn.Parameter or with register_buffer, not as plain attributes or in "
            "lists"
        )
    return plural(len(subject.module.state_dict()), "tensor")


# ---- words ----


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=False))


def _largest(errors: Tensor) -> tuple[float, tuple[int, ...]]:
    row, error = worst_row(errors)
    return error, row


def _at(subject: Subject, row: tuple[int, ...], error: float) -> str:
    return f" by {error:.1e} (relative) at {subject.row_name(row)}" if error else ""


# ---- the table ----

BUILT, INPUT, SAME, STATE = "constructor", "input not written", "deterministic", "no state"
PARAMETERS, GRADIENTS, SPLIT = "parameters get gradients", "gradients", "split backward"
OVERLAPPED = "overlapped equals sequential"


def laws(shapes: str, own: Sequence[Law], overlapped: Law, built: Callable[[Any], str] = is_built) -> list[Law]:
    """The laws of a kind of layer. shapes: the name of the law of results. own: its own laws, which need repeatable
    calls; those that others have, too, replace them."""
    repeatable = [BUILT, shapes, INPUT, SAME, STATE]
    rest = [
        Law("saved and loaded", checkpoint_is_complete),
        Law(PARAMETERS, parameters_get_gradients),
        Law(GRADIENTS, gradients_are_right, [PARAMETERS]),
        Law(SPLIT, split_equals_whole),
        overlapped,
        Law("no host sync", needs_no_host_sync),
    ]
    rest = [*own, *(law for law in rest if law.name not in [one.name for one in own])]
    return [
        Law(BUILT, built),
        Law(shapes, returns_its_dtype, [BUILT]),
        Law(INPUT, input_is_not_written, [BUILT, shapes]),
        Law(SAME, is_deterministic, [BUILT, shapes, INPUT]),
        Law(STATE, has_no_state, [BUILT, shapes, SAME]),
        *(Law(law.name, law.check, [*repeatable, *law.needs]) for law in rest),
    ]
