"""Find the first tensor that differs between two recorded runs, and describe it.

Tensors are compared step by step: those of the forward in the order of the model, then those of the backward in the
reverse order. Rounding differences grow slowly from segment to segment; a fault is a jump far above them.

T tokens, S positions, K experts per token.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.recompute import add_up
from ...overlap.labels import DISPATCH, PREPARE
from .compare import BUFFERS, token_errors
from .recorder import At, Record
from .run import STEPS, Results
from .subject import relative
from .variants import Tolerance, Variant


@dataclass(frozen=True, slots=True)
class Recorded:
    """All results and records of a run, by rank."""

    variant: Variant
    num_experts: int
    results: Sequence[Results]
    records: Sequence[Sequence[Record]]


Values = Mapping[int, Sequence[Tensor]]
"""By sequence: tensors [S, ...] that should all equal the reference's."""


def first_difference(run: Recorded, reference: Recorded, tolerance: Tolerance) -> str:
    """Describe the first difference; "" if all is equal within the tolerance."""
    if found := _first_tensor("weights", "initial value", run, reference):
        return found
    runs = _Tensors(run), _Tensors(reference)
    for step in range(STEPS):
        if found := _first_segment(*runs, step, tolerance.tokens):
            return found
        if step == 0 and (found := _first_tensor("buffers", "value after step 1", run, reference, BUFFERS)):
            return found
    return _first_gradient(run, reference, tolerance.parameters)


# ---- weights, buffers and gradients ----


def _first_tensor(kind: str, what: str, run: Recorded, reference: Recorded, limit: float = 0) -> str:
    expected: Mapping[str, Tensor] = getattr(reference.results[0], kind)
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, results in enumerate(run.results):
        for name, tensor in getattr(results, kind).items():
            if name in expected and relative(tensor, expected[name]) > limit:
                ranks[name].append(rank)
    for name in expected:
        if name in ranks:
            on = " and ".join(map(str, ranks[name]))
            return f"the first difference is the {what} of {name} on rank {on}{_more(ranks, 'tensor')}"
    return ""


def _first_gradient(run: Recorded, reference: Recorded, tolerance: float) -> str:
    expected = reference.results[0].gradients
    wrong: dict[str, tuple[int, float]] = {}
    for rank, results in enumerate(run.results):
        for name, grad in results.gradients.items():
            if name in expected and (error := relative(grad, expected[name])) > tolerance:
                wrong.setdefault(name, (rank, error))
    if not wrong:
        return ""
    name = max(wrong, key=lambda name: wrong[name][1])
    rank, error = wrong[name]
    parts = [results.local[name] for results in run.results if name in results.local]
    is_sum = len(parts) > 1 and relative(torch.stack(parts).sum(0), expected[name]) <= tolerance
    where = (
        f"the gradients of the {len(parts)} ranks are correct, but their sum is not"
        if is_sum
        else "the fault is in the weight gradient, because all tensors between segments agree"
    )
    times = _times(run.results[rank].gradients[name].flatten(), expected[name].flatten())
    return (
        f"the first difference is the gradient of {name} on rank {rank}, by {error:.2g} "
        f"(tolerance {tolerance:.2g}){times}: {where}{_more(wrong, 'gradient')}"
    )


def _more(found: Mapping[str, object], noun: str) -> str:
    more = len(found) - 1
    return f"; {more} more {noun}{'s' * (more > 1)} differ{'s' * (more == 1)}" if more else ""


# ---- segments ----


class _Tensors:
    """The records of a run, as tensors [S, ...] of sequences."""

    def __init__(self, run: Recorded):
        self.run = run
        self.by_at: dict[tuple[int, At], list[tuple[int, Record]]] = defaultdict(list)
        for rank, records in enumerate(run.records):
            for record in records:
                self.by_at[record.step, record.at].append((rank, record))

    def order(self, step: int) -> list[At]:
        """The tensors of a step: those of the forward, of the backward, and of forwards recomputed in the backward."""
        ats = dict.fromkeys(at for (s, at) in self.by_at if s == step)
        forward = [at for at in ats if not at.is_gradient and not at.recomputed]
        backward = [grad for at in reversed(forward) if (grad := at._replace(is_gradient=True)) in ats]
        return forward + backward + [at for at in ats if at.recomputed]

    def inputs(self, step: int, at: At) -> int:
        """The number of inputs of the segment of `at`."""
        same = at._replace(index=0, is_gradient=False, recomputed=False)
        return sum(s == step and other._replace(index=0) == same for s, other in self.by_at)

    def values(self, step: int, at: At, expected: Values | None = None) -> Values:
        """expected: the reference's values. They stand in for tokens that have no row on a rank."""
        found: dict[int, list[Tensor]] = defaultdict(list)
        for rank, record in self.by_at.get((step, at), ()):
            if record.rows == "tokens":
                for sequence, tensor in _by_sequence(record):
                    found[sequence].append(tensor)
            elif expected is not None:
                self._add_rows(found, rank, record, expected)
        return found

    def _add_rows(self, found: dict[int, list[Tensor]], rank: int, record: Record, expected: Values) -> None:
        tensor, start = _scaled(record), 0
        for source, ids_TK in self._sources(rank, record):
            rows = _local(ids_TK, rank_in_group(self.run.variant, rank), self.run)
            values = tensor[start : start + len(rows)]
            start += len(rows)
            length = len(ids_TK) // len(source.sequences)
            for i, sequence in enumerate(source.sequences):
                here = (rows >= i * length) & (rows < (i + 1) * length)
                if sequence not in expected or len(values) < len(rows):
                    continue
                if record.rows == "copies":
                    whole = expected[sequence][0].clone()
                    whole[rows[here] - i * length] = values[here].to(whole).view(-1, *whole.shape[1:])
                    found[sequence].append(whole)
                    continue
                if not found[sequence]:
                    found[sequence].append(torch.zeros_like(expected[sequence][0]))
                found[sequence][0][rows[here] - i * length] += values[here].view(-1, *expected[sequence][0].shape[1:])

    def _sources(self, rank: int, record: Record) -> list[tuple[Record, Tensor]]:
        """The decisions of the ranks that sent rows, in the order of the received rows."""
        variant = self.run.variant
        pp_rank, dp_rank = divmod(rank, variant.dp)
        first = pp_rank * variant.dp + dp_rank // variant.ep * variant.ep
        at = ids_at(record.at)
        own = [(r, d) for r, d in self.by_at[record.step, at] if d.micro_batch == record.micro_batch]
        return [(d, d.tensor) for source in range(first, first + variant.ep) for r, d in own if r == source]

    def received_rows(self, step: int, at: At) -> str:
        """Describe the first rank that received another number of rows than the router sent it; "" if all are right."""
        for rank, record in self.by_at.get((step, at), ()):
            if record.rows == "tokens":
                continue
            decisions = self._sources(rank, record)
            here = rank_in_group(self.run.variant, rank)
            expected = sum(len(_local(ids_TK, here, self.run)) for _, ids_TK in decisions)
            if len(record.tensor) != expected:
                return f"rank {rank} received {len(record.tensor)} rows, but the router sent it {expected}"
        return ""


def ids_at(at: At) -> At:
    """The expert ids that the layer of `at` gives to `prepare`."""
    return At(at.module, at.layer, PREPARE + DISPATCH, 0, False, 0)


def rank_in_group(variant: Variant, rank: int) -> int:
    return rank % variant.dp % variant.ep


def _local(ids_TK: Tensor, rank: int, run: Recorded) -> Tensor:
    """The tokens that are sent to the expert-parallel rank, in order."""
    per_rank = run.num_experts // run.variant.ep
    return ((ids_TK >= rank * per_rank) & (ids_TK < (rank + 1) * per_rank)).any(1).nonzero()[:, 0]


def _scaled(record: Record) -> Tensor:
    """The tensor. Gradients are scaled to those of a sequence's loss; a micro-batch has the mean over its sequences."""
    return record.tensor * len(record.sequences) if record.at.is_gradient else record.tensor


def _by_sequence(record: Record) -> Iterable[tuple[int, Tensor]]:
    """The parts [S, ...] of a tensor [B, S, ...] or [T, ...]; nothing for a tensor of another shape."""
    tensor, count = _scaled(record), len(record.sequences)
    if tensor.ndim == 0 or len(tensor) % count:
        return
    if not (tensor.ndim > 1 and len(tensor) == count):
        tensor = tensor.unflatten(0, (count, -1))
    yield from zip(record.sequences, tensor, strict=True)


def _first_segment(run: _Tensors, reference: _Tensors, step: int, tolerance: float) -> str:
    for at in reference.order(step):
        expected = reference.values(step, at)
        if not at.is_output and run.inputs(step, at) != reference.inputs(step, at):
            # At the border of a stage, the parts of the residual stream are added up before they are sent.
            if at.index:
                continue
            if not at.is_gradient:
                expected = _added(reference, step, at)
        if problem := run.received_rows(step, at):
            return f"the first difference is in step {step + 1}, {at}: {problem}"
        found = run.values(step, at, expected)
        if errors := _errors(found, expected, tolerance):
            return _describe(at, step, errors, tolerance, found, expected, reference, run)
    return ""


def _added(tensors: _Tensors, step: int, at: At) -> Values:
    parts = [tensors.values(step, at._replace(index=i)) for i in range(tensors.inputs(step, at))]
    return {sequence: [add_up(*(part[sequence][0] for part in parts))] for sequence in parts[0]}


def _errors(found: Values, expected: Values, tolerance: float) -> dict[int, Tensor]:
    """The errors of the tokens of each sequence that has a difference above the tolerance."""
    errors = {}
    for sequence, tensors in found.items():
        for tensor in tensors:
            if sequence not in expected or tensor.shape != expected[sequence][0].shape:
                continue
            errors_S = token_errors(tensor, expected[sequence][0])
            if (errors_S > tolerance).any():
                errors[sequence] = torch.maximum(errors.get(sequence, errors_S), errors_S)
    return errors


# ---- description ----


def _describe(
    at: At, step: int, errors: dict[int, Tensor], tolerance: float, found: Values, expected: Values,
    reference: _Tensors, run: _Tensors,
) -> str:  # fmt: skip
    sequence = max(errors, key=lambda s: float(errors[s].max()))
    position = int(errors[sequence].argmax())
    largest = float(errors[sequence][position])
    pairs = [(f, expected[s][0], token_errors(f, expected[s][0]) > tolerance) for s in errors for f in found[s]]
    times = _times(*(torch.cat([pair[i][pair[2]].flatten() for pair in pairs]) for i in (0, 1)))
    wrong = sum(int((e > tolerance).sum()) for e in errors.values())
    tokens = sum(len(t[0]) for t in expected.values())
    ids = reference.values(step, ids_at(at))
    uses = f", which uses experts {', '.join(map(str, ids[sequence][0][position].tolist()))}" if sequence in ids else ""
    return (
        f"the first difference is in step {step + 1}, {at}{_stage(at, step, run)}: {wrong} of {tokens} tokens "
        f"differ{_experts(errors, ids, tolerance, run.run)}; the largest difference is {largest:.2g} (tolerance "
        f"{tolerance:.2g}){times}, at position {position} of sequence {sequence}{uses}"
    )


def _stage(at: At, step: int, run: _Tensors) -> str:
    records = [record for _, record in run.by_at.get((step, at), ())]
    stages = sorted({record.stage for record in records})
    return f" (stage {stages[0]})" if len(stages) == 1 and run.run.variant.pp > 1 else ""


def _times(found: Tensor, expected: Tensor) -> str:
    """Return ", 2 times the reference" if a factor such as 2 explains the difference, otherwise ""."""
    if not expected.is_floating_point() or found.shape != expected.shape:
        return ""
    x, y = found.double(), expected.double()
    factor = float((x @ y) / (y @ y).clamp(min=1e-300))
    if relative(x, factor * y) < 1e-3 and abs(factor - 1) > 1e-2:
        return f", {factor:.3g} times the reference"
    return ""


def _experts(errors: dict[int, Tensor], ids: Values, tolerance: float, run: Recorded) -> str:
    """Name the experts whose tokens differ, or that all differing tokens use; "" if there are none."""
    if not ids:
        return ""
    wrong = {
        s: errors[s] > tolerance if s in errors else torch.zeros(len(i[0]), dtype=torch.bool) for s, i in ids.items()
    }
    wrong_T, ids_TK = torch.cat([wrong[s] for s in ids]), torch.cat([i[0].flatten(1) for i in ids.values()])
    experts = ids_TK.unique().tolist()
    uses = {expert: (ids_TK == expert).any(1) for expert in experts if expert >= 0}
    bad = [expert for expert, uses_T in uses.items() if bool(wrong_T[uses_T].all())]
    if bad and len(bad) < len(uses) and bool((torch.stack([uses[e] for e in bad]).any(0) >= wrong_T).all()):
        return f"; they are the tokens of {_named(bad, run)}"
    common = [expert for expert, uses_T in uses.items() if bool(uses_T[wrong_T].all())]
    return f"; all of them use {_named(common, run)}" if common and not wrong_T.all() else ""


def _named(experts: list[int], run: Recorded) -> str:
    per_rank = run.num_experts // run.variant.ep
    ranks = sorted({expert // per_rank for expert in experts})
    where = f" (expert-parallel rank {', '.join(map(str, ranks))})" if run.variant.ep > 1 else ""
    return f"expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))}{where}"
