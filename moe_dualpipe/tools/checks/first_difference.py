"""Find the first tensor that differs between two recorded runs, and describe it.

Tensors are compared step by step: those of the forward in the order of the model, then those of the backward in the
reverse order. Rounding differences grow slowly from segment to segment; a fault is a jump far above them.

T tokens, S positions, K experts per token.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...models.recompute import add_up
from ...overlap.labels import DISPATCH, PREPARE
from .compare import Kind, token_errors
from .recorder import At, Record
from .run import STEPS
from .subject import relative
from .variants import Tolerance

Values = Mapping[int, Sequence[Tensor]]
"""By sequence: tensors [S, ...] that should all equal the reference's."""


def first_difference(run: "Recorded", reference: "Recorded", tolerance: Tolerance, faults: Mapping[Kind, str]) -> str:
    """Describe the first difference; "" if all is equal within the tolerance. faults: from `find_faults`."""
    if "weights" in faults:
        return f"the first difference: {faults['weights']}"
    for step in range(STEPS):
        if found := _first_segment(run, reference, step, tolerance.tokens):
            return found
        if "buffers" in faults:  # after step 1
            return f"the first difference: {faults['buffers']}"
    if "gradients" in faults:
        return (
            "all tensors between segments agree, so the fault is in a weight gradient or in its sum over ranks: "
            + faults["gradients"]
        )
    return ""


# ---- segments ----


class Recorded:
    """The records of all ranks of a run, as tensors [S, ...] of sequences."""

    def __init__(self, records: Iterable[Record], experts_per_rank: int):
        self.experts_per_rank = experts_per_rank
        self.by_at: dict[tuple[int, At], list[Record]] = defaultdict(list)
        for record in records:
            self.by_at[record.step, record.at].append(record)

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

    def values(self, step: int, at: At) -> Values:
        found: dict[int, list[Tensor]] = defaultdict(list)
        for record in self.by_at.get((step, at), ()):
            for sequence, tensor in _by_sequence(record):
                found[sequence].append(tensor)
        return found


def _by_sequence(record: Record) -> Iterable[tuple[int, Tensor]]:
    """The parts [S, ...] of a tensor [B, S, ...] or [T, ...]; nothing for a tensor of another shape.

    Gradients are scaled to those of a sequence's loss: a micro-batch has the mean over its sequences.
    """
    count = len(record.sequences)
    tensor = record.tensor * count if record.at.is_gradient else record.tensor
    if tensor.ndim == 0 or len(tensor) % count:
        return
    if not (tensor.ndim > 1 and len(tensor) == count):
        tensor = tensor.unflatten(0, (count, -1))
    yield from zip(record.sequences, tensor, strict=True)


def _first_segment(run: Recorded, reference: Recorded, step: int, tolerance: float) -> str:
    for at in reference.order(step):
        expected, found = reference.values(step, at), run.values(step, at)
        if found and not at.is_output and run.inputs(step, at) != reference.inputs(step, at):
            # At the border of a stage, the parts of the residual stream are added up before they are sent.
            if at.index:
                continue
            if not at.is_gradient:
                expected = _added(reference, step, at)
        if errors := _errors(found, expected, tolerance):
            return _describe(at, step, errors, tolerance, found, expected, reference, run)
    return ""


def _added(tensors: Recorded, step: int, at: At) -> Values:
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
    reference: Recorded, run: Recorded,
) -> str:  # fmt: skip
    sequence = max(errors, key=lambda s: float(errors[s].max()))
    position = int(errors[sequence].argmax())
    largest = float(errors[sequence][position])
    pairs = [(f, expected[s][0], token_errors(f, expected[s][0]) > tolerance) for s in errors for f in found[s]]
    times = _times(*(torch.cat([pair[i][pair[2]].flatten() for pair in pairs]) for i in (0, 1)))
    wrong = sum(int((e > tolerance).sum()) for e in errors.values())
    tokens = sum(len(t[0]) for t in expected.values())
    ids = reference.values(step, At(at.module, at.layer, PREPARE + DISPATCH, 0, False, 0))
    uses = f", which uses experts {', '.join(map(str, ids[sequence][0][position].tolist()))}" if sequence in ids else ""
    return (
        f"the first difference is in step {step + 1}, {at}: {wrong} of {tokens} tokens "
        f"differ{_experts(errors, ids, tolerance, run)}; the largest difference is {largest:.2g} (tolerance "
        f"{tolerance:.2g}){times}, at position {position} of sequence {sequence}{uses}"
    )


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
    ranks = sorted({expert // run.experts_per_rank for expert in experts})
    return f"expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))} (ep rank {', '.join(map(str, ranks))})"
