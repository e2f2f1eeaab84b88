"""The laws of an expert layer (`ExpertLayer` in models/experts.py).

M rows in expert-major order, E experts, K choices a row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...expert_parallel.parameters import expert_ids, global_tensors
from ...kernels.routing import expert_order
from ...messages import plural
from ...models.build_experts import ExpertBuilder
from ...models.config import ModelConfig
from ...models.moe import MoE
from . import shared_laws as shared
from .laws import Broken, Law, Unchecked
from .pairs import Interleaved, compare_overlapped
from .subject import Outputs, Subject, check_like, prepare, random_like, row_errors, worst_row


class Experts(Subject):
    """The expert layer that `config` names, with the experts `local`, called with `counts` rows of each.

    None: all experts, with an uneven number of rows, at least 2. Example: [3, 2, 5, 4].
    """

    def __init__(
        self, config: ModelConfig, device: str = "cpu", local: range | None = None, counts: Sequence[int] | None = None
    ):
        super().__init__(config, device)
        self.local = range(config.num_experts) if local is None else local
        self.counts = [2 + (3 * e + 1) % 4 for e in self.local] if counts is None else [*counts]

    def build(self, seed: int) -> nn.Module:
        layer = ExpertBuilder(self.config, self.config.num_layers - 1, seed).build(self.local)
        return prepare(layer, seed, device=self.device)

    def part(self, local: range) -> "Experts":
        """A layer of the experts `local` alone."""
        part = Experts(self.config, self.device, local, [self.counts[e] for e in local])
        part.module.train(self.module.training)
        return part

    def ranks(self, ep: int) -> "list[Experts]":
        """The layers of all expert-parallel ranks."""
        size = self.config.num_experts // ep
        return [self.part(range(rank * size, (rank + 1) * size)) for rank in range(ep)]

    def draw(self, seed: int) -> Tensor:
        return self.random(seed, sum(self.counts))

    def row_name(self, row: Sequence[int]) -> str:
        return row_name(self.counts, row[0], self.local.start)

    def call(self, module: Any, x: Tensor) -> Outputs:
        """A layer that takes an order gets one choice of weight 1 per row. x: rows in expert-major order."""
        counts_E = torch.tensor(self.counts, device=x.device)
        if getattr(module, "takes_order", False):
            ids_M = torch.arange(len(counts_E), device=x.device).repeat_interleave(counts_E)
            order = expert_order(ids_M[:, None], len(counts_E), len(x))
            y_MD = module(x, order, x.new_ones(len(x), 1, dtype=torch.promote_types(x.dtype, torch.float32)))
        else:
            y_MD = module(x, nn.functional.pad(counts_E.cumsum(0), (1, 0)).to(torch.int32))
        return check_like(x, y_MD, self)


def row_name(counts: Sequence[int], row: int, first_expert: int = 0) -> str:
    """Example: counts [3, 2] and row 4 -> "row 1 of expert 1"."""
    expert = 0
    while expert < len(counts) - 1 and row >= counts[expert]:
        row -= counts[expert]
        expert += 1
    return f"row {row} of expert {first_expert + expert}"


def is_built(experts: Experts) -> str:
    sizes = sorted({1, max(experts.config.num_experts // 2, 1), experts.config.num_experts}, reverse=True)
    for size in sizes:
        Experts(experts.config, experts.device, range(size)).build(0)
    return f"with {', '.join(map(str, sizes))} experts"


# ---- rows ----


def rows_are_independent(experts: Experts) -> str:
    """The result of a row is that of this row alone: in any order, with any number of rows of any experts."""
    num_experts, number = experts.config.num_experts, 7
    x = experts.random(4, number)
    one = [[int(e == expert) for e in range(num_experts)] for expert in range(num_experts)]
    alone_EMD = torch.stack([torch.cat([_call(experts, row, counts) for row in x.split(1)]) for counts in one])
    cases = [experts.counts, [0] * num_experts, *([number * n for n in counts] for counts in one)]
    cases += [[3] + [0] * (num_experts - 2) + [4]] if num_experts > 1 else []
    for counts in cases:
        of_expert = [expert for expert, n in enumerate(counts) for _ in range(n)]
        of_row = [m % number for m in range(sum(counts))]
        y, expected = _call(experts, x[of_row], counts), alone_EMD[of_expert, of_row]
        row, error = worst_row(row_errors(y, expected))
        if error > experts.tolerance(expected):
            raise Broken(
                f"with {counts} rows per expert, {_with(experts, counts).row_name(row)} has a relative difference of "
                f"{error:.1e} from the result of this row alone. The result of a row must depend only on this row and "
                "the weights of its expert: not on the position of the row, the number of rows, or statistics over "
                "rows, such as a mean or BatchNorm. An expert may have no rows, or all of them: row m belongs to "
                "expert e if expert_offsets[e] <= m < expert_offsets[e + 1]"
            )
    return f"{plural(len(cases), 'division')} of rows"


def _with(experts: Experts, counts: list[int]) -> Experts:
    return Experts(experts.config, experts.device, experts.local, counts)


def _call(experts: Experts, x: Tensor, counts: list[int]) -> Tensor:
    """Forward and, without a result, backward with other numbers of rows."""
    leaf, when = x.clone().requires_grad_(), f"with {counts} rows per expert"
    try:
        y = _with(experts, counts).call(experts.module, leaf)[0]
        if y.requires_grad:
            y.sum().backward()
    except Broken as fault:
        raise Broken(f"{when}, {fault}") from None
    except Exception as error:
        error.add_note(when)
        raise
    experts.module.zero_grad()
    return y.detach()


def choices_are_weighted(experts: Experts) -> str:
    """With several choices per row: the weighted sum of the experts' results, and the gradients of the weights."""
    module = experts.module
    if not getattr(module, "takes_order", False):
        raise Unchecked("takes_order is False: the model computes the weighted sum of the results")
    num_experts = experts.config.num_experts
    x_ND = experts.random(8, 6)
    ids_NK = torch.tensor([[n % num_experts, (n + 1) % num_experts if n % 3 else -1] for n in range(6)]).to(x_ND.device)
    weights_NK = (0.1 + torch.rand(6, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)).to(x_ND)
    # On a GPU, a model does not wait for the exact number of choices.
    order = expert_order(ids_NK, num_experts, ids_NK.numel() if ids_NK.is_cuda else int((ids_NK >= 0).sum()))
    leaf = weights_NK.clone().requires_grad_()
    y_ND = module(x_ND, order, leaf)
    v_ND = random_like(y_ND, 10)
    y_ND.backward(v_ND)
    module.zero_grad()
    expected, grads = torch.zeros_like(y_ND), torch.zeros_like(leaf)
    for n, k in (ids_NK >= 0).nonzero().tolist():
        row = _call(experts, x_ND[n : n + 1], [int(e == ids_NK[n, k]) for e in range(num_experts)])[0]
        expected[n] += weights_NK[n, k] * row
        grads[n, k] = (row * v_ND[n]).sum()
    limit = experts.tolerance(expected)
    (n,), error = worst_row(row_errors(y_ND.detach(), expected))
    if error > limit:
        raise Broken(
            f"the result of row {n}, with experts {ids_NK[n].tolist()}, differs by {error:.1e} from the sum of their "
            "results, weighted by weights_NK. Skip positions of -1, and indices past expert_offsets[-1]"
        )
    hint = "the router needs it: multiply the results by weights_NK"
    shared.check_equal("the gradient of weights_NK", leaf.grad, grads, max(limit, 1e-6), "", hint)
    return f"{plural(int((ids_NK >= 0).sum()), 'choice')} of {plural(len(x_ND), 'row')}"


# ---- ranks ----


def parts_equal_the_whole(experts: Experts) -> str:
    """Results, input gradients and weight gradients of two layers with half of the experts, and of one per expert.

    The gradients of what all experts share are summed over the layers.
    """
    number, compared = experts.config.num_experts, 0
    y, v, x_grad = experts.backward(experts.draw(1))
    expected = {label: grad for label, _, grad in experts.weights()}
    common = getattr(experts.module, "common", frozenset())
    shared_names = common | {name for name, ids in experts.held.items() if ids.layout == "shared"}
    limit = experts.tolerance(y)
    hint = (
        "Results and gradients must not depend on the experts of this rank: expert_offsets[e] and weights[e] belong to "
        "the same local expert e, and weights are stacked as [num_local_experts, ...] (not config.num_experts)"
    ) + f". All experts share {', '.join(sorted(shared_names))}" * bool(shared_names)
    sizes = sorted({2, number} if number % 2 == 0 else {number})
    for ep in sizes:
        start, sums = 0, dict[str, Tensor]()
        for rank, part in enumerate(experts.ranks(ep)):
            rows = slice(start, start := start + sum(part.counts))
            leaf = experts.draw(1)[rows].requires_grad_()
            found = part.call(part.module, leaf)[0]
            if found.requires_grad:
                found.backward(v[rows])
            pairs = [("the result", found.detach(), y[rows])]
            pairs += [("the gradient of the input", leaf.grad, x_grad[rows])] if x_grad is not None else []
            pairs += [
                (f"the gradient of {label}", grad, expected[label])
                for label, _, grad in part.weights()
                if label not in shared_names
            ]
            for label, _, grad in part.weights():
                if label in common and grad is not None:
                    sums[label] = sums.get(label, 0) + grad
            if rank == ep - 1:
                pairs += [
                    (f"the sum over ranks of the gradient of {n}", sums.get(n), expected[n])
                    for n in common
                    if n in expected
                ]
            where = f" on rank {rank} of {ep}, with experts {part.local[0]}-{part.local[-1]}"
            for label, got, wanted in pairs:
                shared.check_equal(label, got, wanted, limit, where, hint)
            compared += len(pairs)
    return f"{plural(compared, 'tensor')} within {limit:.0e}; ep={', '.join(map(str, sizes))}"


def is_saved_for_any_ep(experts: Experts) -> str:
    """Names and shapes of global tensors are the same however the experts are divided."""
    saved = shared.checkpoint_is_complete(experts)
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
    return f"{saved}; ep={', '.join(map(str, [1, *sizes]))}"


def _global_tensors(layer: Any) -> tuple[dict[str, list[int]], list[str]]:
    """The shapes of the tensors of each expert, by global name, and the names of the tensors that all share."""
    held, state = expert_ids(layer), layer.state_dict()
    whole_only = [name for name in state if name in held and held[name].layout == "shared"]
    of_experts = [name for name in state if name in held and held[name].layout != "shared"]
    tensors = (pair for name in of_experts for pair in global_tensors(name, state[name], held[name]))
    return {name: [*view.shape] for name, view in tensors}, whole_only


# ---- the pipeline ----


def overlapped_equals_sequential(experts: Experts) -> str:
    """Two micro-batches at a time in an MoE layer give bit-equal results."""
    config = dataclasses.replace(experts.config, experts="swiglu", expert_options="", router="topk", router_options="")
    moe = prepare(MoE(config, Interleaved(config.num_experts), 0), device=experts.device)
    moe.experts = experts.module
    moe.train(experts.module.training)
    return compare_overlapped(moe, experts.random(5, 9), experts.random(6, 9), "experts.")


def experts_laws() -> list[Law]:
    alone, saved = "rows independent", "saved and loaded"
    own = [
        Law(alone, rows_are_independent),
        Law("choices of a row", choices_are_weighted, [alone]),
        Law(saved, is_saved_for_any_ep),
    ]
    last = Law("any ep equals ep=1", parts_equal_the_whole, [alone, saved, shared.GRADIENTS])
    overlapped = Law(shared.OVERLAPPED, overlapped_equals_sequential, [alone, shared.SPLIT])
    return [*shared.laws("rows in, rows out", own, overlapped, is_built), last]
