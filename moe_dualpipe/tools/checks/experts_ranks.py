"""The laws of an expert layer across ranks: results and checkpoints do not depend on how the experts are divided."""

from typing import Any

from torch import Tensor

from ...expert_parallel.parameters import expert_ids, global_tensors
from ...messages import plural
from . import shared_laws as shared
from .experts_subject import Experts, starts
from .laws import Broken, Unchecked
from .subject import relative, row_errors, worst_row


def one_expert_at_a_time(experts: Experts) -> str:
    """Compare each expert with a layer that has only this expert."""
    whole, counts = experts.whole(), experts.counts
    x = whole.draw(1)
    y, worst = whole.run(x)[0], 0.0
    limit = whole.tolerance(y)
    for e, (start, number) in enumerate(zip(starts(counts), counts, strict=True)):
        single = experts.part(range(e, e + 1), [number])
        found = single.run(x[start : start + number])[0]
        (row,), error = worst_row(row_errors(found, y[start : start + number]))
        if error > limit:
            names = sorted({name for name, ids in whole.held.items() if ids.layout == "shared"})
            shared_names = f" All experts share {', '.join(names)}." if names else ""
            raise Broken(
                f"expert {e} gives different results in a layer with all experts and in a layer with this expert "
                f"alone: row {row} of expert {e} has a relative difference of {error:.1e}.{shared_names} Check that "
                "expert_offsets[e] and weights[e] belong to the same local expert e, that weights are stacked as "
                "[num_local_experts, ...] (not config.num_experts), and that results do not depend on the number of "
                "experts in the layer"
            )
        worst = max(worst, error)
    return f"{plural(len(counts), 'expert')}, largest difference {worst:.0e} of {limit:.0e}"


def parts_equal_the_whole(experts: Experts) -> str:
    """ep=2: two layers with half of the experts each. Compares results, input gradients and weight gradients."""
    if experts.config.num_experts % 2:
        raise Unchecked(f"{experts.config.num_experts} experts cannot be divided among 2 ranks")
    whole, counts, half = experts.whole(), experts.counts, experts.config.num_experts // 2
    x, first_rows = whole.draw(1), sum(counts[:half])
    y, v, x_grad = whole.backward(x)
    expected = {label: grad for label, _, grad in whole.weights()}
    shared_names = {name for name, ids in whole.held.items() if ids.layout == "shared"}
    limit, compared = whole.tolerance(y), 0
    for rank, rows in enumerate((slice(0, first_rows), slice(first_rows, None))):
        local = range(rank * half, (rank + 1) * half)
        part = experts.part(local, counts[local.start : local.stop])
        leaf = x[rows].clone().requires_grad_()
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
        for label, got, wanted in pairs:
            _compare_parts(label, got, wanted, f"rank {rank} with experts {local[0]}-{local[-1]}", limit)
        compared += len(pairs)
    return f"{plural(compared, 'tensor')} within {limit:.0e}"


def _compare_parts(label: str, got: Tensor | None, wanted: Tensor | None, where: str, limit: float) -> None:
    if (got is None or not got.any()) and (wanted is None or not wanted.any()):
        return
    error = relative(got, wanted) if got is not None and wanted is not None else float("inf")
    if error > limit:
        factor = ""
        if got is not None and wanted is not None and wanted.any():
            factor = f", and is about {float((got * wanted).sum() / wanted.square().sum()):.3g} times as large"
        raise Broken(
            f"with two expert-parallel ranks, {label} differs by {error:.1e} on {where}{factor}. Results and gradients "
            "must not depend on the number of experts on this rank (num_local_experts)"
        )


def is_saved_for_any_ep(experts: Experts) -> str:
    """Names and shapes of global tensors are the same however the experts are divided."""
    subject = experts.whole()
    saved = shared.checkpoint_is_complete(subject)
    wanted, whole_only = _global_tensors(subject.module)
    sizes = [size for size in (2, 4) if experts.config.num_experts % size == 0]
    for size in sizes:
        number = experts.config.num_experts // size
        ranks = [experts.built(range(r * number, (r + 1) * number)) for r in range(size)]
        found = {name: shape for rank in ranks for name, shape in _global_tensors(rank)[0].items()}
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
            f"all experts of a rank share {', '.join(whole_only)}: each rank trains its own copy, and a checkpoint "
            "loads only with the same --ep. If each expert has its own weights, stack them along the first dimension"
        )
    return f"{saved}; ep={', '.join(map(str, [1, *sizes]))}"


def _global_tensors(layer: Any) -> tuple[dict[str, list[int]], list[str]]:
    """The shapes of the tensors of each expert, by global name, and the names of the tensors that all share."""
    held, found, whole_only = expert_ids(layer), {}, []
    for name, tensor in layer.state_dict().items():
        if name not in held:
            continue
        if held[name].layout == "shared":
            whole_only.append(name)
            continue
        found |= {key: [*view.shape] for key, view in global_tensors(name, tensor, held[name])}
    return found, whole_only
