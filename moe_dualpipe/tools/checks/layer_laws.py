"""The table of laws of a layer: experts, routers, attention and blocks.

Most laws are an equality: two ways to compute the same results and gradients agree. The plain way, which the others are
compared with, runs each row (of a sequence layer: each sequence) in a call of its own, in fp64 and in one process.
"""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...expert_parallel.parameters import expert_ids, global_tensors
from ...kernels.routing import expert_order
from ...kernels.weight_grads import WeightGrads, bind
from ...messages import plural
from ...models.attention import document_mask
from ...models.kv_cache import KVCache
from ...models.moe import MoE
from ...models.per_expert import PerExpert
from ...pipeline.recording_group import Recorder, recording_world
from ...schedule.launches import CommLaunch
from .host_syncs import host_syncs
from .laws import Broken, Law, Suspect, Unchecked
from .pairs import Interleaved, compare_overlapped
from .subject import (
    INPUT,
    RESULT,
    SMALL_GRADIENT,
    Case,
    Results,
    Subject,
    largest_gradient,
    prepare,
    random_like,
    row_errors,
    same,
    worst_row,
)
from .subjects import Attention, Experts, Router, wider

_STEP, _GRADIENT = 1e-6, 1e-5  # finite differences in fp64: the step, and the largest valid relative error
_STEP_FP32, _GRADIENT_FP32 = 1e-2, 5e-2
_DIRECTIONS = 2
_MANY_EXPERTS = 17
_ROUNDINGS = 4
"""How many roundings of its inputs and weights explain the error of a layer in bf16."""
_LARGE = 1000.0
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}


# ---- what a call may depend on, and change ----


def is_built(subject: Subject) -> str:
    if not isinstance(subject, Experts):
        return plural(sum(parameter.numel() for parameter in subject.module.parameters()), "parameter")
    number = subject.config.num_experts
    sizes = sorted({1, max(number // 2, 1), number}, reverse=True)
    for size in sizes:
        Experts(subject.config, subject.device, range(size)).build(0)
    return f"with {', '.join(map(str, sizes))} experts"


def takes_all_shapes(subject: Subject) -> str:
    shapes = [*subject.sizes()]
    for dtype in _NAMES:
        module = subject.build(0).to(dtype)
        for case in shapes:
            subject.outputs(case.to(dtype), module=module)
    return f"{plural(len(shapes), 'shape')} in {', '.join(_NAMES.values())}"


def input_is_not_written(subject: Subject) -> str:
    case = subject.draw(1)
    before = case.x.clone()
    outputs = subject.outputs(case)
    row, error = worst_row(row_errors(case.x, before).view(outputs[0].shape[:-1]))
    if error:
        raise Broken(
            f"forward changes its input in place, first at {subject.row_name(case, row)}, but other layers use this "
            "tensor, too. Replace in-place operations such as `x += y` and `x.mul_(y)` with `x = x + y` and `x = x * y`"
        )
    return "unchanged"


def is_deterministic(subject: Subject) -> str:
    """Two calls with the same input, the same random seed, and the same values of `averaged_buffers`."""
    case = subject.draw(1)
    for train in (True, False):
        first, second = (subject.outputs(case, train) for _ in range(2))
        if not same(first, second):
            row, error = worst_row(row_errors(second[0], first[0]))
            raise Broken(
                f"two calls with the same input differ by {error:.1e} (relative) at {subject.row_name(case, row)}. "
                "Check that forward does not keep state in `self` between calls, such as a counter or a running mean, "
                "and does not read uninitialized memory, such as that of torch.empty"
            )
    if not same(subject.outputs(case, False, seed=1), subject.outputs(case, False, seed=2)):
        raise Broken(
            "forward draws random numbers in eval mode, too: two calls with the same input differ. Draw them only if "
            "`self.training`"
        )
    if subject.averaged:
        return "bit-equal, in training without the change of averaged buffers"
    return "bit-equal" + ", in training with the same random seed" * subject.is_random


def has_no_state(subject: Subject) -> str:
    """Inputs A, B, A on one object: both results of A are equal, and that of B is that of a new layer.

    A and B have the same sizes; those of experts have other offsets.
    """
    a, b = subject.draw(1), subject.draw(2)
    hint = (
        "Forward keeps state in `self`, such as a cache, sizes or a running mean. A pipeline alternates between "
        "micro-batches, so compute everything anew in each call"
    )
    for train in (None, False):
        new = subject.results(b, train, module=subject.build(0))
        first, between, again = (subject.results(case, train) for case in (a, b, a))
        subject.compare(a, again, first, "after a call with another input", hint, 0)
        subject.compare(b, between, new, "after a call with another input", hint, 0)
    return "inputs A, B, A: both results of A are bit-equal"


def needs_no_host_sync(subject: Subject) -> str:
    x = subject.draw(1)
    leaf = replace(x, x=x.x.requires_grad_())
    with host_syncs(subject.device) as found:
        y = subject.call(subject.module, leaf)[0]
        if y.requires_grad:
            y.sum().backward()
    if found:
        calls = ", ".join(f"{call} at {place}" for place, call in found.items())
        raise Suspect(
            f"the host waits for the GPU: {calls}. The result is correct, but each wait leaves the GPU without work, "
            "and communication cannot overlap. Keep sizes on the GPU; `grouped_linear` of moe_dualpipe.kernels reads "
            "expert_offsets there"
        )
    return "none"


def launches_nothing(subject: Subject) -> str:
    """As one of two ranks, whose process group records what is launched."""
    if dist.is_initialized():
        raise Unchecked("this process is a rank of a run: check the layer in a process of its own")
    recorder = Recorder(lambda operation: operation, serial_links=False)
    with recording_world(0, 2) as world:
        world.record_as("all ranks", recorder)
        subject.results(subject.draw(1), module=subject.build(0))
    launches = [step.what for step in recorder.program if isinstance(step, CommLaunch)]
    if launches:
        raise Broken(
            f"the layer launches {plural(len(launches), 'collective')} of all ranks, first {launches[0]}. Other ranks "
            "run other layers and micro-batches at this time, so a run would hang or mix up tensors. Average buffers "
            "with `averaged_buffers`, and add losses with `attach`"
        )
    return "none"


# ---- rows ----


def _moved(subject: Subject, part: Any, may_change: Any, train: bool = False) -> tuple[str, float]:
    """Change a part of the input. Returns the row that changes most, apart from those that may, and its change."""
    case = subject.draw(1)
    x = case.x.clone()
    x[part] = 3 * random_like(x[part], 3)
    (found, *others), (before, *decisions) = (subject.outputs(one, train) for one in (replace(case, x=x), case))
    errors = row_errors(found, before)
    for a, b in zip(others, decisions, strict=True):
        errors += 0 if a.is_floating_point() else (a != b).any(-1).double()
    errors[may_change] = 0
    row, error = worst_row(errors)
    return subject.row_name(case, row), error


def rows_are_independent(subject: Subject) -> str:
    """If a part of the input changes, other rows stay: in eval mode and, with the same random numbers, in training."""
    worst = 0.0
    for train in (False,) if subject.averaged else (True, False):
        for name, part, may_change in subject.parts():
            row, error = _moved(subject, part, may_change, train)
            worst = max(worst, error)
            if error > subject.limit:
                mode, finding = "training" if train else "eval", Suspect if isinstance(subject, Router) else Broken
                text = f"in {mode} mode, the result of {row} changes by {error:.1e} (relative) if {name} changes"
                raise finding(f"{text}. {subject.rule}")
    return f"largest change of other rows {worst:.0e} of {subject.limit:.0e}"


def any_number_of_rows(subject: Subject) -> str:
    """Results and all gradients are those of the rows alone, for all sizes, and with 17 experts or more."""
    moved = (_moved(subject, part, may)[1] for _, part, may in subject.parts())
    if isinstance(subject, Router) and any(error > subject.limit for error in moved):
        raise Unchecked("choices depend on other tokens of the batch")
    subjects, shapes, warning = [subject], 0, ""
    if not isinstance(subject, Attention):
        subjects += _with_many_experts(subject)
    for one in subjects:
        for case in one.sizes():
            for train in one.modes if one is subject else one.modes[:1]:
                found, alone = one.results(case, train), one.results(case, train, how=one.alone)
                when = f"from that of each {one.row} alone, with {one.describe(case)}"
                one.compare(case, found, alone, when, one.rule)
                if isinstance(one, Experts) and not isinstance(one.module, PerExpert):
                    warning = warning or _missing_gradient(one, case, found)
            shapes += 1
    if warning:
        raise Suspect(warning)
    return plural(shapes, "shape") + f", {len(found)} results and gradients each"


def _with_many_experts(subject: Subject) -> list[Subject]:
    config = subject.config
    number = _MANY_EXPERTS + -_MANY_EXPERTS % config.expert_groups  # groups are of one size
    return [subject.like(replace(config, num_experts=number))] * (config.num_experts < number)


def _missing_gradient(experts: Experts, case: Case, found: Results) -> str:
    """A parameter without gradient because its expert has no rows."""
    for expert, count in zip(experts.ids, case.counts, strict=True):
        missing = [n for n, g in found.items() if g is None and f".{expert}." in f"{n}.".replace(" of expert ", ".")]
        if not count and any(case.counts) and missing:
            return (
                f"{missing[0]} is None with {experts.describe(case)}. It counts as zero here, but DDP and FSDP wait "
                "for it: run every expert, also on no rows"
            )
    return ""


def choices_are_weighted(experts: Experts) -> str:
    """With several choices per row: the weighted sum of the experts' results, and the gradients of the weights."""
    if not getattr(experts.module, "takes_order", False):
        raise Unchecked("takes_order is False: the model computes the weighted sum of the results")
    num_experts, case = experts.config.num_experts, experts.draw(1)
    ids_NK = torch.tensor([[n % num_experts, (n + 1) % num_experts if n % 3 else -1] for n in range(len(case.x))])
    ids_NK = ids_NK.to(case.x.device).masked_fill(ids_NK.to(case.x.device)[:, :1] == ids_NK.to(case.x.device), -1)
    ids_NK[:, 0] = torch.arange(len(case.x)) % num_experts
    weights_NK = 0.1 + random_like(ids_NK.double(), 9).abs()
    leaf = weights_NK.clone().requires_grad_()

    def together(module: Any, case: Case) -> tuple[Tensor]:
        # On a GPU, a model does not wait for the exact number of choices.
        order = expert_order(ids_NK, num_experts, ids_NK.numel() if ids_NK.is_cuda else int((ids_NK >= 0).sum()))
        return (module(case.x, order, leaf),)

    def each(module: Any, case: Case) -> tuple[Tensor]:
        result = torch.zeros_like(case.x)
        for n, k in (ids_NK >= 0).nonzero().tolist():
            counts = tuple(int(e == ids_NK[n, k]) for e in range(num_experts))
            row = leaf[n, k] * experts.call(module, Case(case.x[n : n + 1], counts=counts))[0]
            result = result.index_add(0, torch.tensor([n], device=row.device), row)
        return (result,)

    found, expected = [], []
    for results, how in ((found, together), (expected, each)):
        leaf.grad = None
        results.append(experts.results(case, experts.modes[0], how=how) | {"the gradient of weights_NK": leaf.grad})
    hint = (
        "Multiply by weights_NK, whose gradient the router needs. Skip ids of -1, and what is past expert_offsets[-1]"
    )
    experts.compare(case, found[0], expected[0], "from the weighted sum of the results of its experts", hint)
    return f"{plural(int((ids_NK >= 0).sum()), 'choice')} of {plural(len(case.x), 'row')}"


def any_memory_layout(subject: Subject) -> str:
    """Inputs that are not contiguous, or begin inside their memory, and the gradient of a sum, which is expanded."""
    case = subject.draw(1)
    y = subject.outputs(case)[0]
    expected = subject.results(case, v=torch.ones_like(y))
    layouts = {
        "every second column of a tensor": torch.stack([case.x, case.x], -1)[..., 0],
        "transposed": case.x.mT.contiguous().mT,
        "not at the beginning of its memory": torch.cat([case.x.new_zeros(1), case.x.flatten()])[1:].view_as(case.x),
    }
    for name, x in layouts.items():
        found = subject.results(replace(case, x=x), v=torch.ones_like(y[:1]).expand_as(y))
        when = f"if the input is {name}, and the gradient of the result expanded"
        hint = "Use the strides of tensors, or call `.contiguous()` first, in forward and backward"
        subject.compare(case, found, expected, when, hint)
    return f"{plural(len(layouts), 'layout')}"


# ---- precision ----


def is_precise(subject: Subject) -> str:
    """In bf16 and fp32, against the same layer in fp64 with the same rounded inputs and weights.

    The tolerance comes from the layer in fp64: how much the rounding of its inputs and weights changes its results.
    """
    wide = wider(subject)
    *_, case, _ = wide.sizes()
    case = replace(case, x=case.rows, index=None)  # the gradient of repeated rows would be a sum in bf16
    exact, worst = wide.results(case, False), {}
    for dtype in (torch.float32, torch.bfloat16) if subject.exact else (torch.bfloat16,):
        module, double = wide.build(0).to(dtype), wide.build(0).to(dtype).double()
        rounded = wide.results(case.to(dtype).to(torch.float64), False, module=double)
        found = wide.results(case.to(dtype), False, module=module)
        worst[dtype] = max(_precision(wide, dtype, label, found, rounded, exact) for label in found)
    measured = ", ".join(f"{_NAMES[dtype]} {share:.2g}" for dtype, share in worst.items())
    if not subject.exact and not isinstance(subject, Router):
        raise Suspect(
            "the layer computes in fp32 or less although its input is in fp64, so the check finds only differences "
            "above 0.1%. Compute in `x.dtype`, or in `torch.promote_types(x.dtype, torch.float32)`"
        )
    return f"largest errors, as a share of what rounding explains: {measured}"


def _precision(
    subject: Subject, dtype: torch.dtype, label: str, found: Results, rounded: Results, exact: Results
) -> float:
    """The error of a result or gradient in `dtype`, as a multiple of what rounding explains. Raises Broken above 4.

    A typical row counts, because rounding may change the choice of experts in a few rows.
    """
    tensors = [results.get(label) for results in (found, rounded, exact)]
    if any(t is None or not t.is_floating_point() for t in tensors):
        return 0.0
    if subject.adds_losses and label != RESULT:  # one other choice changes the gradients of all weights
        return 0.0
    if label != RESULT and tensors[2].norm() <= subject.limit * largest_gradient(exact):  # type: ignore[union-attr]
        return 0.0  # a sum that cancels
    got, wanted, unrounded = (torch.atleast_1d(t) for t in tensors if t is not None)
    alike = torch.ones_like(got[..., 0], dtype=torch.bool)
    for name in (name for name in found if name.startswith("decision") and label == RESULT):
        alike &= (found[name] == rounded[name]).all(-1) & (found[name] == exact[name]).all(-1)  # type: ignore[union-attr]
    error, plain = (
        float(row_errors(a[alike], wanted[alike]).median()) if alike.any() and wanted.any() else 0.0
        for a in (got, unrounded)
    )
    limit = _ROUNDINGS * max(plain, torch.finfo(dtype).eps / 8)  # its own rounding
    limit *= subject.config.hidden_size**0.5 if dtype == torch.float32 else 1
    if error > limit:
        raise Broken(
            f"in {_NAMES[dtype]}, {label} differs by {error:.1e} (relative, in a typical row) from the same layer in "
            f"fp64 with the same rounded inputs and weights, which explain {limit:.1e}. Add up in fp32, and round "
            "once, at the end of each product"
        )
    return error / limit


def large_values_stay_finite(subject: Subject) -> str:
    case = subject.draw(1)
    for dtype in (torch.float32, torch.bfloat16):
        module = subject.build(0).to(dtype)
        problem = ""
        try:
            found = subject.results(replace(case, x=_LARGE * case.x).to(dtype), module=module)
            bad = [label for label, t in found.items() if t is not None and not t.isfinite().all()]
            problem = f"{bad[0]} has NaN or infinity in {dtype}" if bad else ""
        except Broken as fault:
            problem = str(fault)
        if problem:
            raise Broken(
                f"for inputs {_LARGE:,.0f} times as large, {problem}. Subtract the maximum before exp, as softmax "
                "does, and divide by sums that cannot be 0"
            )
    return f"inputs of {_LARGE:,.0f} in fp32, bf16"


# ---- sequences ----


@contextmanager
def _set(layer: Attention, name: str, value: Any) -> Iterator[None]:
    setattr(layer.module, name, value)
    try:
        yield
    finally:
        setattr(layer.module, name, None)


def cache_equals_all_at_once(layer: Attention) -> str:
    """Text generation: three positions, then one, then two, then one at a time."""
    case, cache, takes, start = layer.draw(1), KVCache(), layer.takes("cache"), 0
    y = layer.outputs(case, False)[0]
    with _set(layer, "cache", cache):
        for number in (3, 1, 2, 1, 1):
            found = layer.outputs(Case(case.x[:, start : start + number]), False)[0]
            row, error = worst_row(row_errors(found, y[:, start : start + number]))
            if error > max(layer.limit, 1e-7):
                hint = (
                    "Append the new keys and values with cache.append(self.layer, ...), and let the new positions, "
                    "which start at cache.length, attend to all earlier ones"
                    if takes
                    else "Without a parameter `cache`, a position must not depend on the length of the sequence"
                )
                raise Broken(
                    f"in generation, position {start + row[1]} of sequence {row[0]} differs by {error:.1e} from the "
                    f"result for the whole sequence, with {plural(number, 'new position')} after {start}. {hint}"
                )
            start += number
            cache.length = start
    return "with the layer's cache" if takes else "no parameter `cache`: the cache stores the inputs"


def mask_is_respected(layer: Attention) -> str:
    """With two documents in a sequence, the second does not depend on the first."""
    if not layer.takes("mask_B1SS"):
        raise Unchecked("no parameter mask_B1SS: --document-mask is an error with this layer")
    case, first = layer.draw(1), 3
    y = layer.outputs(case, False)[0]
    documents_BS = (torch.arange(case.x.shape[1]) >= first).int().expand(case.x.shape[:2]).to(y.device)
    with _set(layer, "mask_B1SS", document_mask(torch.zeros_like(documents_BS))):
        row, error = worst_row(row_errors(layer.outputs(case, False)[0], y))
    if error > max(layer.limit, 1e-7):
        raise Broken(
            f"with a mask of one document, {layer.row_name(case, row)} differs by {error:.1e} from the result without "
            "a mask. mask_B1SS is True where a position may attend to another; it is causal already"
        )
    document = (slice(None), slice(first))
    with _set(layer, "mask_B1SS", document_mask(documents_BS)):
        name, error = _moved(layer, document, document)
    if error > layer.limit:
        raise Broken(
            f"the result of {name}, in document 2, changes by {error:.1e} if document 1 changes: the mask mask_B1SS "
            "is not used"
        )
    return "two documents do not see each other"


# ---- gradients ----


def parameters_get_gradients(subject: Subject) -> str:
    case = subject.draw(1)
    found = subject.results(case)
    weights = [(label, view) for label, view, _ in subject.weights(subject.module)]
    missing = [(label, view) for label, view in weights if not _any(found[f"the gradient of {label}"])]
    if not missing:
        return plural(len(weights), "weight") if weights else "no trained parameters"
    label, view = missing[0]
    before, kept = subject.outputs(case)[0], view.clone()
    view += random_like(view, 3)
    used = not torch.equal(subject.outputs(case)[0], before)
    view.copy_(kept)
    more = f" (like {plural(len(missing) - 1, 'other weight')})" if len(missing) > 1 else ""
    if used:
        raise Broken(
            f"{label} gets no gradient{more}, although the result depends on it: autograd is cut off by .detach(), "
            ".data, torch.no_grad() or a new torch.tensor. Remove this call, or freeze the weight with "
            "requires_grad=False"
        )
    raise Broken(f"{label} gets no gradient{more}: the result does not depend on it. Use it in forward, or remove it")


def _any(grad: Tensor | None) -> bool:
    return grad is not None and bool(grad.any())


def gradients_are_right(subject: Subject) -> str:
    """Directional derivatives of each expert's part of each parameter, and of the input.

    Rows whose decisions, such as expert ids, differ at the two ends of a difference are left out.
    """
    case = subject.draw(1)
    step, limit = (_STEP, _GRADIENT) if subject.exact else (_STEP_FP32, _GRADIENT_FP32)
    worst, count = 0.0, 0
    weights = {f"the gradient of {label}": view for label, view, _ in subject.weights(subject.module)}
    for seed in range(_DIRECTIONS):
        v = random_like(subject.outputs(case)[0], seed)
        grads = subject.results(case, v=v)
        least = SMALL_GRADIENT * largest_gradient(grads)
        for label, tensor in ({INPUT: case.x} | weights).items():
            grad, direction = grads[label], random_like(tensor, seed + 10)
            slopes, counted = _slopes(subject, case, tensor, direction, step)
            if grad is not None and not counted.all():
                grad = subject.results(case, v=v * counted)[label]
            expected = float((slopes * v).sum())
            if grad is None and label == INPUT and abs(expected) > 1e-12:
                raise Broken(
                    "the input gets no gradient: autograd is cut off by .detach(), .data or torch.no_grad(), so "
                    "earlier layers would not train"
                )
            if grad is None or not (grad.any() or label == INPUT):  # of weights: another law
                continue
            got = float((grad.double() * direction).sum())
            error = abs(got - expected) / max(abs(expected), least * float(direction.norm()), 1e-300)
            if not error <= limit:
                ratio = f"{got / expected:.3g}" if abs(expected) > 1e-12 else "1"
                times = f" ({ratio} times as much)" if ratio != "1" else ""
                raise Broken(
                    f"{label} is wrong: in a random direction, finite differences give {expected:.6g}, but backward "
                    f"gives {got:.6g}{times}. Check the backward of your autograd functions and hooks, and what "
                    "forward computes under torch.no_grad() or from .detach()"
                )
            worst, count = max(worst, error), count + 1
    return f"{plural(count, 'derivative')}, largest error {worst:.0e} of {limit:.0e}"


def _slopes(subject: Subject, case: Case, tensor: Tensor, direction: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """d result / dt at t = 0, with `tensor` replaced by tensor + t * direction; and 1 for each row that counts."""
    kept, ends = tensor.clone(), []
    for t in (step, -step):
        tensor.copy_(kept + t * direction)
        ends.append(subject.outputs(case))
    tensor.copy_(kept)
    (above, *decisions), (below, *others) = ends
    counted = torch.ones_like(above[..., :1])
    for a, b in zip(decisions, others, strict=True):
        if not a.is_floating_point():
            counted *= (a == b).all(-1, keepdim=True)
    return (above.double() - below.double()) * counted / (2 * step), counted


def split_equals_whole(subject: Subject) -> str:
    """Deferred weight gradients (kernels/weight_grads.py), twice, so that gradients also accumulate."""
    case = subject.draw(1)
    v = random_like(subject.outputs(case)[0], 0)
    if not subject.call(subject.module, replace(case, x=case.x.clone().requires_grad_()))[0].requires_grad:
        raise Unchecked("the output has no gradients")
    once = subject.results(case, v=v, with_losses=True)
    deferred, number = WeightGrads(), 0
    bind(subject.module, deferred)
    try:
        for key in range(2):
            leaf = replace(case, x=case.x.clone().requires_grad_())
            y = subject.run(subject.module, leaf, None, 0, subject.call)[0]
            with deferred.defer_to(key):
                y.backward(v)
            number = len(deferred._deferred[key])
            deferred.run_deferred(key)
        found = {f"the gradient of {label}": grad for label, _, grad in subject.weights(subject.module)}
    finally:
        bind(subject.module, None)
        subject.module.zero_grad()
    twice = {n: None if grad is None else 2 * grad for n, grad in once.items() if n in found}
    hint = (
        "If `weight_grads.defers(weight)` is true, backward must call `weight_grads.defer` once for this weight and "
        "return None as its gradient; otherwise it must return the gradient"
    )
    expected, found = twice | {INPUT: once[INPUT]}, found | {INPUT: leaf.x.grad}
    subject.compare(case, found, expected, "if weight gradients are deferred", hint)
    return f"equal, {number} deferred" if number else "equal, none deferred"


# ---- the pipeline and checkpoints ----


def overlapped_equals_sequential(subject: Any) -> str:
    """Two micro-batches at a time, for experts and routers in an MoE layer, give bit-equal results."""
    train = subject.modes[0]
    if isinstance(subject, Attention):
        return compare_overlapped(subject.module.train(train), subject.draw(5).x, subject.draw(6).x)
    plain = {"experts": "swiglu", "expert_options": "", "router": "topk", "router_options": ""}
    sizes = {"num_shared_experts": 0, "sequence_loss": 0.0, "z_loss": 0.0}
    config: Any = dataclasses.replace(subject.config, **plain, **sizes)
    moe: Any = prepare(MoE(config, Interleaved(config.num_experts), 0), device=subject.device)
    setattr(moe, subject.kind, subject.module)
    return compare_overlapped(moe.train(train), subject.random(5, 4, 6), subject.random(6, 4, 6), f"{subject.kind}.")


def checkpoint_is_complete(subject: Subject) -> str:
    """A layer with other initial weights gives the same results after it loads the state of the first."""
    case, other = subject.draw(1), subject.build(1)
    try:
        other.load_state_dict(copy.deepcopy(subject.module.state_dict()))
    except RuntimeError as error:
        raise Broken(f"the state of the layer cannot be loaded into the same layer: {error}") from error
    hint = (
        "A tensor of the layer is not in its state_dict(). Store tensors as nn.Parameter or with register_buffer, not "
        "as plain attributes or in lists"
    )
    subject.compare(case, subject.results(case, module=other), subject.results(case), "after saving and loading", hint)
    saved = plural(len(subject.module.state_dict()), "tensor")
    return f"{saved}; ep={_same_names(subject)}" if isinstance(subject, Experts) else saved


def _same_names(experts: Experts) -> str:
    """Names and shapes of global tensors are the same however the experts are divided."""
    wanted, whole_only = _global_tensors(experts.module)
    sizes = [size for size in (2, 4) if experts.config.num_experts % size == 0]
    for size in sizes:
        found = {n: shape for part in experts.ranks(size) for n, shape in _global_tensors(part.module)[0].items()}
        for name in sorted({*wanted} ^ {*found}):
            has, lacks = ("ep=1", f"ep={size}") if name in wanted else (f"ep={size}", "ep=1")
            raise Broken(
                f"a checkpoint with {has} has the tensor {name}, but one with {lacks} does not: stack the weights of "
                "the experts along the first dimension, or use an nn.ModuleList with one module per expert"
            )
        for name, shape in wanted.items():
            if found[name] != shape:
                raise Broken(f"{name} has the shape {shape} with ep=1, and {found[name]} with ep={size}")
    if whole_only:
        raise Unchecked(
            f"the shape of {', '.join(whole_only)} depends on the number of experts: a checkpoint loads only with the "
            "same --ep. If each expert has its own weights, stack them along the first dimension"
        )
    return ", ".join(map(str, [1, *sizes]))


def _global_tensors(layer: Any) -> tuple[dict[str, list[int]], list[str]]:
    """The shapes of the tensors of each expert, by global name, and the names of the tensors that all share."""
    held, state = expert_ids(layer), layer.state_dict()
    whole_only = [name for name in state if name in held and held[name].layout == "shared"]
    of_experts = [name for name in state if name in held and held[name].layout != "shared"]
    tensors = (pair for name in of_experts for pair in global_tensors(name, state[name], held[name]))
    return {name: [*view.shape] for name, view in tensors}, whole_only


def parts_equal_the_whole(experts: Experts) -> str:
    """The layers of two ranks, and of one rank per expert, together compute what one layer computes.

    The gradients of what all experts share are summed over the layers.
    """
    return "; ".join(map(_divided, [experts, *_with_many_experts(experts)]))


def _divided(experts: Any) -> str:
    number, case, train = experts.config.num_experts, experts.draw(1), experts.modes[0]
    v = random_like(experts.outputs(case)[0], 0)
    whole, compared = experts.results(case, train, v=v), 0
    common = {f"the gradient of {name}" for name in getattr(experts.module, "common", ())}
    shared = {name for name, ids in expert_ids(experts.module).items() if ids.layout == "shared"}
    expected = {label: t for label, t in whole.items() if label.removeprefix("the gradient of ") not in shared}
    hint = (
        "Results and gradients must not depend on the experts of this rank: expert_offsets[e] and weights[e] belong to "
        "the same local expert e, and weights are stacked as [num_local_experts, ...] (not config.num_experts)"
    ) + f". All experts share {', '.join(sorted(shared))}" * bool(shared)
    sizes = sorted({2, number} if number % 2 == 0 else {number})
    for ep in sizes:
        start, found = 0, Results()
        for part in experts.ranks(ep):
            counts = tuple(case.counts[e] for e in part.ids)
            rows = slice(start, start := start + sum(counts))
            for label, got in part.results(Case(case.x[rows], counts=counts), train, v=v[rows]).items():
                before = found.get(label)
                if before is None or got is None:
                    found[label] = before if got is None else got
                elif label in (RESULT, INPUT):
                    found[label] = torch.cat([before, got])
                elif label in common:
                    found[label] = before + got
        compared += experts.compare(case, found, expected, f"over {ep} ranks", hint)
    return f"{plural(compared, 'tensor')}, ep={', '.join(map(str, sizes))}"


# ---- the table ----

LAWS: tuple[tuple[Law, ...], ...] = (
    (Law("constructor", is_built),),
    (Law("shapes and dtypes", takes_all_shapes),),
    (Law("input not written", input_is_not_written), Law("deterministic", is_deterministic)),
    (Law("no state", has_no_state), Law("split backward", split_equals_whole)),
    (Law("overlapped equals sequential", overlapped_equals_sequential), Law("no collectives", launches_nothing)),
    (Law("rows independent", rows_are_independent),),
    (
        Law("any number of rows", any_number_of_rows),
        Law("any memory layout", any_memory_layout),
        Law("generation", cache_equals_all_at_once, ["attention", "block"]),
        Law("document mask", mask_is_respected, ["attention", "block"]),
        Law("precision", is_precise),
        Law("large values", large_values_stay_finite),
    ),
    (
        Law("choices of a row", choices_are_weighted, ["experts"]),
        Law("saved and loaded", checkpoint_is_complete),
        Law("parameters get gradients", parameters_get_gradients),
    ),
    (Law("gradients", gradients_are_right), Law("no host sync", needs_no_host_sync)),
    (Law("any ep equals ep=1", parts_equal_the_whole, ["experts"]),),
)
"""The laws by level: those of a level rely on all above."""
