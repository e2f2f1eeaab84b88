"""The laws of an expert layer (`ExpertLayer` in models/experts.py).

M rows in expert-major order, E experts, K choices a row.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.routing import expert_order
from ...messages import plural
from ...models.moe import MoE
from . import shared_laws as shared
from .experts_ranks import is_saved_for_any_ep, one_expert_at_a_time, parts_equal_the_whole
from .experts_subject import Experts, call, row_name, starts
from .laws import Broken, Law, Unchecked
from .pairs import Interleaved, compare_overlapped
from .subject import Subject, prepare, random_like, relative, row_errors, worst_row


def is_built(experts: Experts) -> str:
    sizes = sorted({1, max(experts.config.num_experts // 2, 1), experts.config.num_experts}, reverse=True)
    for size in sizes:
        experts.built(range(size))
    return f"with {', '.join(map(str, sizes))} experts"


def returns_rows(experts: Experts) -> str:
    dtypes = torch.float64, torch.float32, torch.bfloat16
    for dtype in dtypes:
        layer = copy.deepcopy(experts.module).to(dtype)
        x = experts.rows(sum(experts.counts), 1, dtype)
        with torch.no_grad():
            y = call(layer, x, experts.counts)
        _check_finite(y, experts.counts, f"in {dtype}")
    return f"{[*x.shape]} in fp64, fp32, bf16"


def _check_finite(y: Tensor, counts: Sequence[int], when: str) -> None:
    if not (finite := y.isfinite().all(-1)).all():
        raise Broken(f"the result has NaN or infinity at {row_name(counts, int((~finite).nonzero()[0]))}, {when}")


# ---- rows ----


def all_rows_are_used(experts: Experts) -> str:
    """The result of a row depends on the row, unless its expert has no weights, such as an expert that returns 0."""
    subject = experts.whole()
    x = subject.draw(1)
    with_weights = {e for ids in subject.held.values() if ids.layout != "shared" for e in ids.ids}
    y, moved = subject.run(x)[0], subject.run(x + 0.5 * random_like(x, 2))[0]
    counts, unused = experts.counts, []
    for e, start in enumerate(starts(counts)):
        same = [m for m in range(start, start + counts[e]) if torch.equal(y[m], moved[m])]
        if len(same) < counts[e] or e in with_weights:
            unused += same
    if unused:
        row, value = unused[0], "0" if not y[unused[0]].any() else "a constant"
        more = f", also for {plural(len(unused) - 1, 'other row')}" if len(unused) > 1 else ""
        raise Broken(
            f"the result of {row_name(counts, row)} (of {counts[_expert(counts, row)]}) does not depend on the row: it "
            f"is {value}{more}. Check the bounds of loops over experts and rows: row m belongs to expert e if "
            "expert_offsets[e] <= m < expert_offsets[e + 1]. An expert may have any number of rows"
        )
    return plural(len(x), "row")


def rows_are_independent(experts: Experts) -> str:
    """If the rows of one expert change, or a single row, the results of all other rows stay the same."""
    subject, counts = experts.whole(), experts.counts
    x = subject.draw(1)
    y, limit = subject.run(x)[0], subject.tolerance(subject.run(x)[0])
    groups = [range(s, s + n) for s, n in zip(starts(counts), counts, strict=True)]
    worst = 0.0
    for group in [*groups, *(range(m, m + 1) for m in range(len(x)))]:
        changed = x.clone()
        changed[group.start : group.stop] = 3 * random_like(changed[group.start : group.stop], 3)
        errors = row_errors(subject.run(changed)[0], y)
        errors[group.start : group.stop] = 0
        (row,), error = worst_row(errors)
        if error > limit:
            expert = _expert(counts, group.start)
            cause = row_name(counts, group.start) if len(group) == 1 else f"the rows of expert {expert}"
            raise Broken(
                f"the result of {row_name(counts, row)} changes by {error:.1e} (relative) if {cause} change"
                f"{'s' * (len(group) == 1)}. The result of a token must not depend on the other tokens in its batch: "
                "compute each row from this row and the weights of its expert, without statistics over rows, such as "
                "a mean or BatchNorm"
            )
        worst = max(worst, error)
    return f"largest change of other rows {worst:.0e} of {limit:.0e}"


def order_does_not_matter(experts: Experts) -> str:
    """Reverse the rows of each expert."""
    subject, counts = experts.whole(), experts.counts
    x = subject.draw(1)
    order = [m for s, n in zip(starts(counts), counts, strict=True) for m in reversed(range(s, s + n))]
    y = subject.run(x)[0]
    limit = subject.tolerance(y)
    (row,), error = worst_row(row_errors(subject.run(x[order])[0], y[order]))
    if error > limit:
        raise Broken(
            f"if the rows of each expert are reversed, the results are not the same in reverse order: the row moved "
            f"to {row_name(counts, row)} has a relative difference of {error:.1e}. The result must not depend on the "
            "position of a row: check indices, and that results are written back in the order of the rows"
        )
    return f"largest difference {error:.0e} of {limit:.0e}"


def any_number_of_rows(experts: Experts) -> str:
    """No rows, one row, experts without rows, all rows for one expert. Compared with each row computed alone."""
    counts = experts.counts
    subject = experts.whole()
    num_experts, number = len(counts), 7
    x = experts.rows(number, 4)
    one = [[int(e == expert) for e in range(num_experts)] for expert in range(num_experts)]
    with torch.no_grad():
        alone = [torch.cat([_call(subject.module, x[m : m + 1], c) for m in range(number)]) for c in one]
    cases = [[0] * num_experts, *one, *([number * n for n in c] for c in one)]
    cases += [[3] + [0] * (num_experts - 2) + [4]] if num_experts > 1 else []
    for case in cases:
        _check_case(subject, x[: sum(case)], case, alone)
    return plural(len(cases), "division") + " of rows"


def _check_case(subject: Subject, x: Tensor, counts: list[int], alone: list[Tensor]) -> None:
    leaf, when = x.clone().requires_grad_(), f"with {_rows_of(counts)}"
    y = _call(subject.module, leaf, counts)
    if y.requires_grad:
        y.sum().backward()
    subject.module.zero_grad()
    expected = torch.cat([alone[e][s : s + n] for e, (s, n) in enumerate(zip(starts(counts), counts, strict=True))])
    _check_finite(y, counts, when)
    row, error = worst_row(row_errors(y.detach(), expected))
    if error > subject.tolerance(expected):
        raise Broken(
            f"{when}, {row_name(counts, row[0])} has a relative difference of {error:.1e} from the result of this row "
            "alone. An expert may have no rows, or all of them: check how forward splits the rows"
        )


def _call(module: Any, x: Tensor, counts: list[int]) -> Tensor:
    try:
        return call(module, x, counts)
    except Broken as fault:
        raise Broken(f"with {_rows_of(counts)}, {fault}") from None
    except Exception as error:
        error.add_note(f"with {_rows_of(counts)}")
        raise


def _rows_of(counts: list[int]) -> str:
    return f"{counts} rows per expert"


def _expert(counts: Sequence[int], row: int) -> int:
    return max(e for e, start in enumerate(starts(counts)) if start <= row)


# ---- the pipeline ----


def overlapped_equals_sequential(experts: Experts) -> str:
    """Two micro-batches at a time in an MoE layer give bit-equal results."""
    config = dataclasses.replace(experts.config, experts="swiglu", expert_options="", router="topk", router_options="")
    moe = prepare(MoE(config, Interleaved(config.num_experts), 0), device=experts.device)
    moe.experts = experts.module
    moe.train(experts.module.training)
    return compare_overlapped(moe, experts.rows(9, 5), experts.rows(9, 6), "experts.")


# ---- layers that take an order ----


def choices_are_weighted(experts: Experts) -> str:
    """With several choices per row: the weighted sum of the experts' results, and the gradients of the weights."""
    subject = experts.whole()
    if not getattr(subject.module, "takes_order", False):
        raise Unchecked("takes_order is False: the model computes the weighted sum of the results")
    num_experts, module = experts.config.num_experts, subject.module
    x_ND = experts.rows(6, 8)
    ids_NK = torch.tensor([[n % num_experts, (n + 1) % num_experts if n % 3 else -1] for n in range(6)]).to(x_ND.device)
    weights_NK = (0.1 + torch.rand(6, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)).to(x_ND)
    # On a GPU, a model does not wait for the exact number of choices.
    order = expert_order(ids_NK, num_experts, ids_NK.numel() if ids_NK.is_cuda else int((ids_NK >= 0).sum()))
    leaf = weights_NK.clone().requires_grad_()
    y_ND = module(x_ND, order, leaf)
    v_ND = random_like(y_ND, 10)
    y_ND.backward(v_ND)
    module.zero_grad()
    one = [[int(e == expert) for e in range(num_experts)] for expert in range(num_experts)]
    expected, grads = torch.zeros_like(y_ND), torch.zeros_like(leaf)
    with torch.no_grad():
        for n, k in (ids_NK >= 0).nonzero().tolist():
            row = call(module, x_ND[n : n + 1], one[int(ids_NK[n, k])])[0]
            expected[n] += weights_NK[n, k] * row
            grads[n, k] = (row * v_ND[n]).sum()
    limit = subject.tolerance(expected)
    (n,), error = worst_row(row_errors(y_ND.detach(), expected))
    if error > limit:
        raise Broken(
            f"the result of row {n}, with experts {ids_NK[n].tolist()}, differs by {error:.1e} from the sum of their "
            "results, weighted by weights_NK. Skip positions of -1, and indices past expert_offsets[-1]"
        )
    if leaf.grad is None or (error := relative(leaf.grad, grads)) > max(limit, 1e-6):
        got = "is missing" if leaf.grad is None else f"differs by {error:.1e}"
        raise Broken(f"the gradient of weights_NK {got}: the router needs it. Multiply the results by weights_NK")
    return f"{plural(int((ids_NK >= 0).sum()), 'choice')} of {plural(len(x_ND), 'row')}"


# ---- all of them ----

BUILT, ROWS, INPUT, SAME, STATE = "constructor", "rows in, rows out", "input not written", "deterministic", "no state"
USED, ALONE, ORDER, ANY = "all rows used", "rows independent", "row order", "any number of rows"
ORACLE, SAVED, GRADIENTS, PARAMETERS = "each expert alone", "saved and loaded", "gradients", "parameters get gradients"
SPLIT, OVERLAPPED = "split backward", "overlapped equals sequential"


def experts_laws() -> list[Law]:
    call_ = [BUILT, ROWS]
    repeatable = [*call_, INPUT, SAME, STATE]
    return [
        Law(BUILT, is_built),
        Law(ROWS, returns_rows, [BUILT]),
        Law(INPUT, lambda e: shared.input_is_not_written(e.whole()), call_),
        Law(SAME, lambda e: shared.is_deterministic(e.whole()), [*call_, INPUT]),
        Law(STATE, lambda e: shared.has_no_state(e.whole()), [*call_, SAME]),
        Law(USED, all_rows_are_used, repeatable),
        Law(ALONE, rows_are_independent, repeatable),
        Law(ORDER, order_does_not_matter, [*repeatable, USED]),
        Law(ANY, any_number_of_rows, [*repeatable, USED, ALONE, ORDER]),
        Law("choices of a row", choices_are_weighted, [*repeatable, ANY]),
        Law(SAVED, is_saved_for_any_ep, repeatable),
        Law(ORACLE, one_expert_at_a_time, [*repeatable, USED, ALONE, ORDER, ANY, SAVED]),
        Law(PARAMETERS, lambda e: shared.parameters_get_gradients(e.whole()), [*repeatable, USED]),
        Law(GRADIENTS, lambda e: shared.gradients_are_right(e.whole()), [*repeatable, PARAMETERS]),
        Law("ep=2 equals ep=1", parts_equal_the_whole, [*repeatable, ORACLE, SAVED, GRADIENTS]),
        Law(SPLIT, lambda e: shared.split_equals_whole(e.whole()), repeatable),
        Law(OVERLAPPED, overlapped_equals_sequential, [*repeatable, ANY, SPLIT]),
        Law("no host sync", lambda e: shared.needs_no_host_sync(e.whole(), e.device), repeatable),
    ]
