"""The laws of custom experts, routers, attention and blocks. `LAWS` at the end is the table.

Most laws say that two ways to compute the same results and gradients agree. The reference is one call for each row, in
fp64 and in one process; for attention and blocks, a row is a sequence.
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...expert_parallel.parameters import expert_ids, global_tensors
from ...kernels.routing import ExpertOrder, expert_order
from ...kernels.weight_grads import WeightGrads, bind
from ...messages import plural
from ...models import KVCache, MoE
from ...models.attention import document_mask
from ...models.attention_layer import attend_gathered, project
from ...models.context_parallel import Context
from ...models.per_expert import PerExpert
from ...overlap.host_syncs import host_syncs
from ...runtime.buffers import WAY_OUT
from .first_difference import row_errors
from .laws import Broken, Law, Suspect, Unchecked
from .subject import (
    INPUT,
    RESULT,
    Attention,
    Case,
    Experts,
    Interleaved,
    Results,
    Router,
    Subject,
    prepare,
    random_like,
    small_gradient,
    wider,
    worst_row,
)

_STEP, _GRADIENT = 1e-6, 1e-5  # finite differences in fp64: the step, and the largest valid relative error
_STEP_FP32, _GRADIENT_FP32 = 1e-2, 5e-2
_DIRECTIONS = 2
_MANY_EXPERTS = 17
_ROUNDINGS = 4
"""A layer in bf16 may have this many times the error that rounding its inputs and weights causes."""
_LARGE = 1000.0
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}


# ---- what a call may depend on, and change ----


def is_built(subject: Subject) -> str:
    """The layer can be built; an expert layer also with some of the experts."""
    number = subject.config.num_experts
    for size in (1, max(number // 2, 1), number):
        subject.like(experts=range(size)).build(0)
    return plural(sum(parameter.numel() for parameter in subject.module.parameters()), "parameter")


def results_are_valid(subject: Subject) -> str:
    """Results of all shapes in all dtypes have the right type, shape and dtype; they and their gradients are finite."""
    hint = "There may be no rows, so do not divide by their number. Weights are finite, also those of id -1"
    return _are_finite(subject, [*subject.sizes()], hint)


def large_values_stay_finite(subject: Subject) -> str:
    case = subject.draw(1)
    hint = f"Inputs are {_LARGE:,.0f} times as large: subtract the maximum before exp, as softmax does"
    return _are_finite(subject, [replace(case, x=_LARGE * case.x)], f"{hint}, and divide by sums that cannot be 0")


def _are_finite(subject: Subject, cases: Sequence[Case], hint: str) -> str:
    for dtype in _NAMES:
        module = subject.build(0).to(dtype)
        for case in (one.to(dtype) for one in cases):
            for label, tensor in subject.results(case, module=module).items():
                if tensor is not None and not (finite := tensor.isfinite()).all():
                    row = (~finite).nonzero()[0].tolist()
                    at = f" at {subject.row_name(case, row)}" if label == RESULT else ""
                    raise Broken(f"with {subject.describe(case)}, {label} has NaN or infinity{at}. {hint}")
    return f"{plural(len(cases), 'shape')} in {', '.join(_NAMES.values())}"


def has_no_state(subject: Subject) -> str:
    """Calls on A, A, B, A with the same random seed give the results of a new layer, and change no buffer.

    A and B have the same sizes; those of experts have other offsets.
    """
    a, b = subject.draw(1), subject.draw(2)
    before = copy.deepcopy(subject.module.state_dict())
    for train in (True, False):
        subject.outputs(a, train)
        for name, tensor in subject.module.state_dict().items():
            if torch.is_tensor(tensor) and not torch.equal(tensor, before[name]):
                raise Broken(f"forward changes {name.removeprefix(subject.prefix)}: {WAY_OUT}")
    hint = "Forward must not keep state in `self`, such as a counter, read torch.empty, or change `x.data`"
    hint_b = (
        "Forward keeps state in `self`, such as a cache, sizes or a running mean. A pipeline alternates between "
        "micro-batches, so compute everything anew in each call"
    )
    for train in (True, False):
        new = subject.results(b, train, module=subject.build(0))
        first, second, between, last = (subject.results(case, train) for case in (a, a, b, a))
        subject.compare(a, second, first, "in a second call with the same input", hint, 0)
        subject.compare(a, last, first, "after a call with another input", hint_b, 0)
        subject.compare(b, between, new, "after a call with another input", hint_b, 0)
    if not torch.equal(subject.outputs(a, False, seed=1)[0], subject.outputs(a, False, seed=2)[0]):
        raise Broken(
            "forward draws random numbers in eval mode, too: two calls with the same input differ. Draw them only if "
            "`self.training`"
        )
    return "inputs A, A, B, A: all results of A are bit-equal"


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


class _ListedCollectives(TorchDispatchMode):
    """Lists the collectives that are launched in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            tensor = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.launches.append(f"{func.overloadpacket.__name__.strip('_')}, {dtype}{[*tensor.shape]}")
        return func(*args, **(kwargs or {}))


def launches_nothing(subject: Subject) -> str:
    """The layer launches no collective. It runs as one of two ranks, of which the other does not exist."""
    if dist.is_initialized():
        raise Unchecked("this process is a rank of a run: check the layer in a process of its own")
    hook, listed = sys.excepthook, _ListedCollectives()  # torch replaces the hook
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with listed:
            subject.results(subject.draw(1), module=subject.build(0))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
    if launches := listed.launches:
        raise Broken(
            f"the layer launches {plural(len(launches), 'collective')} of all ranks, first {launches[0]}. Other ranks "
            "run other layers and micro-batches at this time, so a run would hang or mix up tensors. Add losses with "
            "`attach`"
        )
    return "none"


# ---- rows ----


def _largest_change(subject: Subject, case: Case, part: Any, train: bool = False) -> tuple[str, float]:
    """Change a part of the input. Returns the name and change of the row, outside this part, that changes most."""
    x = case.x.clone()
    x[part] = 3 * random_like(x[part], 3)
    (found, *others), (before, *decisions) = (subject.outputs(one, train) for one in (replace(case, x=x), case))
    errors = row_errors(found, before)
    for a, b in zip(others, decisions, strict=True):
        errors += (a != b).any(-1).double()
    errors[part] = 0
    row, error = worst_row(errors)
    return subject.row_name(case, row), error


def rows_are_independent(subject: Subject) -> str:
    """If a part of the input changes, no other row changes, in training and in eval mode."""
    worst = 0.0
    for train in (True, False):
        for name, part in subject.parts():
            row, error = _largest_change(subject, subject.draw(1), part, train)
            worst = max(worst, error)
            if error > subject.limit:
                mode, finding = "training" if train else "eval", Suspect if isinstance(subject, Router) else Broken
                text = f"in {mode} mode, the result of {row} changes by {error:.1e} (relative) if {name} changes"
                raise finding(f"{text}. {subject.rule}")
    return f"largest change of other rows {worst:.0e} of {subject.limit:.0e}"


def any_number_of_rows(subject: Subject) -> str:
    """For all shapes, and with 17 experts or more, results and gradients are those of one call for each row."""
    moved = (_largest_change(subject, subject.draw(1), part)[1] for _, part in subject.parts())
    if isinstance(subject, Router) and any(error > subject.limit for error in moved):
        raise Unchecked("choices depend on other tokens of the batch")
    shapes, warning = 0, ""
    for one in [subject] if isinstance(subject, Attention) else _with_many_experts(subject):
        usual = one.results(one.draw(1), one.modes[0])
        for case in one.sizes():
            for train in one.modes if one is subject else one.modes[:1]:
                found, alone = one.results(case, train), one.results(case, train, forward=one.alone)
                when = f"from that of each {one.row} alone, with {one.describe(case)}"
                one.compare(case, found, alone, when, one.rule)
                missing = [n for n, grad in found.items() if grad is None and usual[n] is not None and any(case.counts)]
                if missing and not isinstance(one.module, PerExpert):
                    warning = warning or f"{missing[0]} is None with {one.describe(case)}"
            shapes += 1
    if warning:
        raise Suspect(
            f"{warning}. It counts as zero here, but DDP and FSDP wait for it: run every expert, also on no rows"
        )
    return f"{plural(shapes, 'shape')}, {len(found)} results and gradients each"


def _with_many_experts(subject: Subject) -> list[Subject]:
    """The layer, and the same with 17 experts or more."""
    config = subject.config
    number = _MANY_EXPERTS + -_MANY_EXPERTS % config.expert_groups  # groups are of one size
    return [subject, *[subject.like(replace(config, num_experts=number))] * (config.num_experts < number)]


def choices_are_weighted(experts: Experts) -> str:
    """With several choices per row, the result is the weighted sum of the experts' results. Weights have gradients."""
    if not getattr(experts.module, "takes_order", False):
        raise Unchecked("takes_order is False: the model computes the weighted sum of the results")
    number, case = experts.config.num_experts, experts.draw(1)
    rows = torch.arange(len(case.x), device=case.x.device)
    second = torch.where((rows % 3 > 0) & (number > 1), (rows + 1) % number, -1)
    ids_NK = torch.stack([rows % number, second], 1)
    leaf = (0.1 + random_like(ids_NK.double(), 9).abs()).requires_grad_()

    def order(ids: Tensor) -> ExpertOrder:
        # On a GPU, a model does not wait for the exact number of choices.
        return expert_order(ids, number, ids.numel() if ids.is_cuda else int((ids >= 0).sum()))

    def together(module: Any, case: Case) -> tuple[Tensor]:
        return (module(case.x, order(ids_NK), leaf),)

    def each(module: Any, case: Case) -> tuple[Any]:
        columns = zip(leaf.split(1, 1), ids_NK.split(1, 1), strict=True)
        return (sum(w_N1 * module(case.x, order(ids_N1), torch.ones_like(w_N1)) for w_N1, ids_N1 in columns),)

    compared = list[Results]()
    for forward in (together, each):
        leaf.grad = None
        results = experts.results(case, experts.modes[0], forward=forward)
        compared.append(results | {"the gradient of weights_NK": leaf.grad})
    hint = (
        "Multiply by weights_NK, whose gradient the router needs. Skip ids of -1, and what is past expert_offsets[-1]"
    )
    experts.compare(case, compared[0], compared[1], "from the weighted sum of the results of its experts", hint)
    return plural(len(case.x), "row")


def any_memory_layout(subject: Subject) -> str:
    """Inputs may be views with any strides and offset. The gradient of the result may be expanded, as that of a sum."""
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
    """Results in bf16 and fp32 are near those in fp64, from the same rounded inputs and weights.

    The tolerance is a multiple of the change that rounding the inputs and weights causes in fp64.
    """
    wide = wider(subject)
    *_, case, _ = wide.sizes()
    case = replace(case, x=case.rows, index=None)  # the gradient of repeated rows would be a sum in bf16
    exact, measured = wide.results(case, False), list[str]()
    for dtype in (torch.float32, torch.bfloat16) if subject.exact else (torch.bfloat16,):
        module, double = wide.build(0).to(dtype), wide.build(0).to(dtype).double()
        rounded = wide.results(case.to(dtype).to(torch.float64), False, module=double)
        found = wide.results(case.to(dtype), False, module=module)
        measured.append(f"{_NAMES[dtype]} {_largest_share(wide, dtype, found, rounded, exact):.2g}")
    if not subject.exact and not isinstance(subject, Router):
        raise Suspect(
            "the layer computes in fp32 or less although its input is in fp64, so the check finds only differences "
            "above 0.1%. Compute in `x.dtype`, or in `torch.promote_types(x.dtype, torch.float32)`"
        )
    return f"largest errors, as a share of what rounding explains: {', '.join(measured)}"


def _largest_share(subject: Subject, dtype: torch.dtype, *results: Results) -> float:
    """The largest error of results in `dtype`, relative to the tolerance. Raises Broken above 1.

    results: in `dtype`; in fp64, from the same rounded inputs and weights; in fp64, without rounding. The error of a
    typical row counts, because rounding may change the choice of experts in a few rows.
    """
    largest, least = 0.0, subject.limit * small_gradient(results[2])
    # A single different choice of experts changes the gradients of all weights.
    for label in [RESULT] if subject.adds_losses else results[0]:
        got, wanted, unrounded = (result[label] for result in results)
        if got is None or wanted is None or unrounded is None or not wanted.any():
            continue
        if label != RESULT and unrounded.norm() <= least:  # the smallest gradients are sums that cancel
            continue
        got, wanted, unrounded = (torch.atleast_1d(t) for t in (got, wanted, unrounded))
        error, plain = (float(row_errors(t, wanted).median()) for t in (got, unrounded))
        limit = _ROUNDINGS * max(plain, torch.finfo(dtype).eps / 8)  # its own rounding
        limit *= subject.config.hidden_size**0.5 if dtype == torch.float32 else 1
        if error > limit:
            raise Broken(
                f"in {_NAMES[dtype]}, {label} differs by {error:.1e} (relative, in a typical row) from the same layer "
                f"in fp64 with the same rounded inputs and weights, which explain {limit:.1e}. Add up in fp32, and "
                "round once, at the end of each product"
            )
        largest = max(largest, error / limit)
    return largest


# ---- sequences ----


def cache_equals_all_at_once(layer: Attention) -> str:
    """Generation with a cache, of 3, 1, 2, 1 and 1 positions, gives the results of the whole sequence."""
    case, cache, pieces = layer.draw(1), KVCache(), list[Tensor]()
    y = layer.outputs(case, False)[0]
    for piece in case.x.split([3, 1, 2, 1, 1], 1):
        pieces.append(layer.outputs(replace(case, x=piece, cache=cache), False)[0])
        cache.length += piece.shape[1]
    takes = layer.takes("cache")
    hint = (
        "Append the new keys and values with cache.append(self.layer, ...), and let the new positions, which start at "
        "cache.length, attend to all earlier ones"
        if takes
        else "Without a parameter `cache`, a position must not depend on the length of the sequence"
    )
    when = "in generation, after 3, 1, 2, 1 and 1 new positions, from the result for the whole sequence"
    layer.compare(case, {RESULT: torch.cat(pieces, 1)}, {RESULT: y}, when, hint, max(layer.limit, 1e-7))
    return "with the layer's cache" if takes else "no parameter `cache`: the cache stores the inputs"


def mask_is_respected(layer: Attention) -> str:
    """With two documents in a sequence, the second does not depend on the first."""
    if not layer.takes("mask_B1SS"):
        raise Unchecked("no parameter mask_B1SS: --document-mask is an error with this layer")
    case, first = layer.draw(1), 3
    documents_BS = (torch.arange(case.x.shape[1]) >= first).int().expand(case.x.shape[:2]).to(layer.device)
    one, two = (replace(case, mask_B1SS=document_mask(ids_BS)) for ids_BS in (0 * documents_BS, documents_BS))
    found, y = (layer.outputs(each, False)[0] for each in (one, case))
    hint = "mask_B1SS is True where a position may attend to another; it is causal already"
    when = "with a mask of one document, from the result without a mask"
    layer.compare(case, {RESULT: found}, {RESULT: y}, when, hint, max(layer.limit, 1e-7))
    name, error = _largest_change(layer, two, (slice(None), slice(first)))
    if error > layer.limit:
        raise Broken(
            f"the result of {name}, in document 2, changes by {error:.1e} if document 1 changes: the mask mask_B1SS "
            "is not used"
        )
    return "two documents do not see each other"


class _Place(Context):
    """The place of a rank among `size` that are all in this process."""

    def __init__(self, size: int, rank: int):
        self.size, self.rank = size, rank


def parts_of_sequences_equal_the_whole(layer: Attention) -> str:
    """With `--cp 2`, the results of both ranks are those for the whole sequence."""
    attention, case, places = layer.module.layer, layer.draw(1), [_Place(2, rank) for rank in range(2)]
    if not (hasattr(attention, "project") and hasattr(attention, "attend")):
        raise Unchecked("no methods project and attend: --cp is an error with this layer")
    if hasattr(attention, "gather"):
        raise Unchecked("a transfer of its own, gather, needs several processes")
    y, projected, results = layer.outputs(case, False)[0], [], []
    with torch.no_grad():
        for place in places:
            attention.context = place
            projected.append(project(attention, place.cut(case.x)))
        keys = [_joined(tensors, -2) for tensors in zip(*(tensors for _, *tensors in projected), strict=True)]
        for place, (queries, *_) in zip(places, projected, strict=True):
            attention.context = place
            results.append(attend_gathered(attention, place.cut(case.x), queries, *keys, mask_B1SS=None))
    attention.context = None
    hint = "context.cut selects the positions of a rank; attend gets the tensors of project for all positions, in order"
    found: Results = {RESULT: _joined(results, 1)}
    layer.compare(case, found, {RESULT: y}, "with --cp 2, from the result for the whole sequence", hint, 1e-7)
    return "2 ranks"


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """The positions of all ranks in the order of the sequence."""
    first, second = zip(*(tensor.chunk(2, dim) for tensor in tensors), strict=True)
    return torch.cat([*first, *reversed(second)], dim)


# ---- gradients ----


def gradients_are_right(subject: Subject) -> str:
    """Gradients of the input, and of each expert's part of each parameter, equal finite differences.

    Rows whose decisions, such as expert ids, differ between the two points of a finite difference do not count.
    """
    case = subject.draw(1)
    step, limit = (_STEP, _GRADIENT) if subject.exact else (_STEP_FP32, _GRADIENT_FP32)
    worst, count = 0.0, 0
    weights = {f"the gradient of {label}": view for label, view, _ in subject.weights(subject.module)}
    for seed in range(_DIRECTIONS):
        v = random_like(subject.outputs(case)[0], seed)
        grads = subject.results(case, v=v)
        least = small_gradient(grads)
        for label, tensor in ({INPUT: case.x} | weights).items():
            grad, direction = grads[label], random_like(tensor, seed + 10)
            slopes, counted = _slopes(subject, case, tensor, direction, step)
            if grad is not None and not counted.all():
                grad = subject.results(case, v=v * counted)[label]
            expected = float((slopes * v).sum())
            got = 0.0 if grad is None else float((grad.double() * direction).sum())
            error = abs(got - expected) / max(abs(expected), least * float(direction.norm()))
            if not error <= limit:
                cut = "it is None. Autograd is cut off by .detach(), .data, torch.no_grad() or a new torch.tensor"
                wrong = f"backward gives {got:.6g}. Check the backward of autograd functions and hooks, and .detach()"
                raise Broken(
                    f"{label} is wrong: in a random direction, finite differences give {expected:.6g}, but "
                    f"{wrong if got else cut}"
                )
            worst, count = max(worst, error), count + 1
    unused = {*weights}
    for seed in range(1, 4 * subject.config.num_experts):  # few tokens do not reach all experts of a block
        grads = subject.results(subject.draw(seed)) if unused else {}
        unused = {label for label in unused if (grad := grads[label]) is None or not grad.any()}
    if unused and (subject.config.num_experts > 1 or isinstance(subject, Experts)):  # one expert leaves no choice
        more = f" (like {plural(len(unused) - 1, 'other one')})" if len(unused) > 1 else ""
        raise Broken(f"{min(unused)} is 0{more}: the result does not depend on it. Use it in forward, or remove it")
    return f"{plural(count, 'derivative')}, largest error {worst:.0e} of {limit:.0e}"


def _slopes(subject: Subject, case: Case, tensor: Tensor, direction: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """The derivative of the result as `tensor` moves in `direction`; and 1 for each row that counts, 0 for others."""
    kept, ends = tensor.clone(), []
    for t in (step, -step):
        tensor.copy_(kept + t * direction)
        ends.append(subject.outputs(case))
    tensor.copy_(kept)
    (above, *decisions), (below, *others) = ends
    counted = torch.ones_like(above[..., :1])
    for a, b in zip(decisions, others, strict=True):
        counted *= (a == b).all(-1, keepdim=True)
    return (above.double() - below.double()) * counted / (2 * step), counted


def split_equals_whole(subject: Subject) -> str:
    """Deferred weight gradients (kernels/weight_grads.py) equal those of one backward."""
    case, deferred = subject.draw(1), WeightGrads()

    def backward(y: Tensor, v: Tensor) -> None:
        with deferred.defer_to(0):
            y.backward(v)
        deferred.run_deferred(0)

    once = subject.results(case)
    bind(subject.module, deferred)
    found = subject.results(case, backward=backward)
    bind(subject.module, None)
    hint = (
        "If `weight_grads.defers(weight)` is true, backward must call `weight_grads.defer` once for this weight and "
        "return None as its gradient; otherwise it must return the gradient"
    )
    subject.compare(case, found, once, "if weight gradients are deferred", hint)
    return "equal"


# ---- the pipeline and checkpoints ----


def overlapped_equals_sequential(subject: Any) -> str:
    """Two interleaved micro-batches give the results of one after the other, bit for bit.

    Both forwards run before a backward: state that a forward leaves in the layer is wrong for one of the two. Experts
    and routers run in an MoE layer.
    """
    inputs, module = [subject.draw(seed).x for seed in (5, 6)], subject.module
    if not isinstance(subject, Attention):
        inputs = [subject.random(seed, 4, 6) for seed in (5, 6)]
        config = replace(
            subject.config, experts="swiglu", expert_options="", router="topk", router_options="",
            num_shared_experts=0, sequence_loss=0.0, z_loss=0.0,
        )  # fmt: skip
        module = prepare(MoE(config, Interleaved(config.num_experts), 0), device=subject.device)
        setattr(module, subject.kind, subject.module)
    module.train(subject.modes[0])
    hint = (
        "Forward keeps tensors for later in `self` or in a global variable, and the other micro-batch overwrites "
        "them. Pass them on as outputs, or save them in `ctx` of an autograd function"
    )
    expected, found = (_two_micro_batches(subject, module, inputs, together) for together in (False, True))
    subject.compare(subject.draw(1), found, expected, "if two micro-batches are in flight", hint, 0)
    return f"{plural(len(expected), 'tensor')}, bit-equal"


def _two_micro_batches(subject: Subject, module: Any, inputs: list[Tensor], together: bool) -> Results:
    """Results and gradients of two micro-batches. together: interleaved, as in a pipeline."""
    module.zero_grad()
    a, b = (x.clone().requires_grad_() for x in inputs)
    v = random_like(a, 7)
    if together:
        y_a, y_b = module.interleaved_forward(module, [a], module, [b])
        y_a.backward(v)
    else:
        y_a = module(a)
        y_a.backward(v)
        y_b = module(b)
    y_b.backward(v)
    results: Results = {f"the result of micro-batch {i}": y.detach() for i, y in enumerate((y_a, y_b))}
    results |= {f"the input gradient of micro-batch {i}": x.grad for i, x in enumerate((a, b))}
    results |= {f"the gradient of {label}": grad for label, _, grad in subject.weights(subject.module)}
    module.zero_grad()
    return results


def checkpoint_is_complete(subject: Subject) -> str:
    """A new layer that loads the layer's state gives the same results."""
    case, other = subject.draw(1), subject.build(1)
    other.load_state_dict(copy.deepcopy(subject.module.state_dict()))
    hint = (
        "A tensor of the layer is not in its state_dict(). Store tensors as nn.Parameter or with register_buffer, not "
        "as plain attributes or in lists"
    )
    subject.compare(case, subject.results(case, module=other), subject.results(case), "after saving and loading", hint)
    return plural(len(subject.module.state_dict()), "tensor")


def parts_equal_the_whole(experts: Experts) -> str:
    """Layers with a part of the experts each, on two ranks and on one rank per expert, equal one layer with all.

    Gradients of shared parameters are summed over ranks. Checkpoints have the same tensors.
    """
    return "; ".join(map(_divided, _with_many_experts(experts)))


def _divided(experts: Subject) -> str:
    number, case, train = experts.config.num_experts, experts.draw(1), experts.modes[0]
    v = random_like(experts.outputs(case)[0], 0)
    whole, compared = experts.results(case, train, v=v), 0
    common = {f"the gradient of {name}" for name in getattr(experts.module, "common", ())}
    hint = (
        "Results and gradients must not depend on the experts of this rank: expert_offsets[e] and weights[e] belong to "
        "the same local expert e, and weights are stacked as [num_local_experts, ...] (not config.num_experts)"
    )
    whole |= _saved(experts.module)
    sizes = sorted({2, number} if number % 2 == 0 else {number})
    for ep in sizes:
        parts, start = defaultdict[str, list[Tensor]](list), 0
        for first in range(0, number, number // ep):
            part = experts.like(experts=range(first, first + number // ep))
            counts = case.counts[first : first + number // ep]
            rows = slice(start, start := start + sum(counts))
            results = part.results(Case(case.x[rows], counts), train, v=v[rows])
            for label, got in (results | _saved(part.module)).items():
                parts[label] += [] if got is None else [got]
        found: Results = {label: each[0] for label, each in parts.items() if each}
        found |= {label: torch.cat(parts[label]) for label in (RESULT, INPUT) if parts[label]}
        found |= {label: torch.stack(parts[label]).sum(0) for label in common if parts[label]}
        compared += experts.compare(case, found, whole, f"over {ep} ranks", hint)
    return f"{plural(compared, 'tensor')}, ep={', '.join(map(str, sizes))}"


def _saved(module: Any) -> Results:
    """The tensors of each expert in a checkpoint, by global name."""
    held, state = expert_ids(module), module.state_dict()
    tensors = (pair for name in state if name in held for pair in global_tensors(name, state[name], held[name]))
    return {f"{name} in a checkpoint": view for name, view in tensors}


# ---- the table ----

LAWS: tuple[tuple[Law, ...], ...] = (
    (Law("constructor", is_built),),
    (Law("shapes and dtypes", results_are_valid),),
    (Law("no state", has_no_state),),
    (Law("split backward", split_equals_whole),),
    (Law("overlapped equals sequential", overlapped_equals_sequential), Law("no collectives", launches_nothing)),
    (Law("rows independent", rows_are_independent),),
    (
        Law("any number of rows", any_number_of_rows),
        Law("any memory layout", any_memory_layout),
        Law("generation", cache_equals_all_at_once, ["attention", "block"]),
        Law("document mask", mask_is_respected, ["attention", "block"]),
        Law("context parallelism", parts_of_sequences_equal_the_whole, ["attention"]),
        Law("precision", is_precise),
        Law("large values", large_values_stay_finite),
    ),
    (
        Law("choices of a row", choices_are_weighted, ["experts"]),
        Law("saved and loaded", checkpoint_is_complete),
    ),
    (Law("gradients", gradients_are_right), Law("no host sync", needs_no_host_sync)),
    (Law("any ep equals ep=1", parts_equal_the_whole, ["experts"]),),
)
"""The laws by level. Each level relies on all levels above it."""
