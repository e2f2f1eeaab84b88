"""Find the first tensor that differs from the reference.

Rounding errors grow slowly from segment to segment; a fault is a jump far above them. So every tensor of a run is
compared, in the order in which the reference computes it, and the first one above its tolerance is described.

A token's difference is relative to its own norm or to the root mean square of the norms in its sequence, whichever is
larger. So rounding in a token whose gradient is almost 0 does not count.

S positions, V vocabulary, K experts per token.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...expert_parallel.labels import COMBINE, DISPATCH
from ...overlap.labels import PREPARE
from .probe import Observed

Kind = Literal["weights", "buffers", "losses", "logits", "gradients", "segments"]
_RESULTS: tuple[Kind, ...] = ("losses", "logits", "gradients", "weights", "buffers")
_PER_TOKEN: tuple[Kind, ...] = ("losses", "logits", "segments")
Tolerance = Mapping[Kind, float]
"""The largest valid relative difference of a token or a parameter, by kind. 0: bit-equal."""


# ---- differences in numbers ----


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """The difference of each row, relative to its own norm or the norm of a typical row, whichever is larger."""
    x, y = found.double(), expected.double()
    norms = y.norm(dim=-1)
    typical = norms.square().mean().sqrt().clamp(min=1e-300)
    errors = (x - y).norm(dim=-1) / norms.clamp(min=float(typical))
    return torch.where(errors.isnan(), torch.inf, errors)


def relative(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """|found - expected| / max(|expected|, least). Infinite if shapes differ or values are not finite."""
    if found.shape != expected.shape:
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    ratio = float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=max(least, 1e-300)))
    return ratio if ratio == ratio else float("inf")


def _token_errors(found: Tensor, expected: Tensor) -> Tensor:
    """The relative difference of each row, [S], in double. found, expected: [S, ...]. Integers differ by 0 or 1."""
    x, y = (t.flatten(1) if t.ndim > 1 else t[:, None] for t in (found, expected))
    return row_errors(x, y) if expected.is_floating_point() else (x != y).any(1).double()


# ---- what a run computes ----


Recorded = dict[tuple[Kind, str], dict[int, Tensor]]
"""The tensors of a run by kind and name, in the order of computation. Names do not depend on the layout.

weights: parameters and buffers before the first step. buffers: buffers after a step. gradients: those of the sum over
sequences of the mean loss of a sequence. These three kinds have the key 0. losses, logits and segments (outputs of
segments and their gradients): [S, ...] for each sequence.
"""


class StepTrace:
    """Records the tensors of a run, or compares them with `expected`, those of another run."""

    def __init__(self, expected: Recorded | None = None, tolerance: Tolerance | None = None):
        self.expected, self.tolerance = expected, tolerance or {}
        self.recorded: Recorded = {}
        self.order = {key: place for place, key in enumerate(expected or ())}
        self.largest = dict.fromkeys(_RESULTS, 0.0)
        self.compared = set[tuple[Kind, str, int]]()
        self.first: tuple[int, str] = (len(self.order), "")
        """The index of the first difference, in the order of the reference, and its description."""

    def see_tokens(self, kind: Kind, name: str, sequences: Sequence[int], tensor: Tensor, ids_of: str = "") -> None:
        """Add a tensor [B, S, ...] or [B * S, ...]; tensors of other shapes are ignored.

        ids_of: the name of the tensor with the expert ids of these tokens.
        """
        number = len(sequences)
        if tensor.ndim == 0 or len(tensor) % number:
            return
        if not (tensor.ndim > 1 and len(tensor) == number):
            tensor = tensor.unflatten(0, (number, -1))
        self.see(kind, name, dict(zip(sequences, tensor, strict=True)), ids_of)

    def see(self, kind: Kind, name: str, found: Mapping[int, Tensor], ids_of: str = "") -> None:
        """Add tensors by sequence."""
        found = {s: tensor.detach() for s, tensor in found.items()}
        if self.expected is None:
            self.recorded.setdefault((kind, name), {}).update({s: tensor.clone() for s, tensor in found.items()})
            return
        place, expected = self.order.get((kind, name), self.first[0]), self.expected.get((kind, name), {})
        pairs = {s: (t, expected[s]) for s, t in found.items() if s in expected and t.shape == expected[s].shape}
        errors = {
            s: _token_errors(*pair) if kind in _PER_TOKEN else torch.tensor([relative(*pair)])
            for s, pair in pairs.items()
        }
        largest, limit = max((float(e.max()) for e in errors.values() if len(e)), default=0.0), self.tolerance[kind]
        self.compared |= {(kind, name, s) for s in pairs}
        self.largest[kind] = max(self.largest.get(kind, 0.0), largest)
        if largest > limit and place < self.first[0]:
            text = f": {kind} differ by {largest:.2g}, above the tolerance of {limit:.2g}: {name}"
            if kind in _PER_TOKEN:
                text = f" is in {name}: {_describe(pairs, errors, limit, self.expected.get(('segments', ids_of), {}))}"
            self.first = place, text


def _describe(
    pairs: Mapping[int, tuple[Tensor, Tensor]], errors: Mapping[int, Tensor], limit: float, ids: Mapping[int, Tensor]
) -> str:
    wrong = {s: errors_S > limit for s, errors_S in errors.items()}
    found, expected = (torch.cat([pairs[s][i][wrong[s]].flatten() for s in pairs]) for i in (0, 1))
    sequence = max(errors, key=lambda s: float(errors[s].max()))
    position = int(errors[sequence].argmax())
    number = sum(int(w.sum()) for w in wrong.values())
    experts = ids[sequence][position].flatten().tolist() if ids else []
    return (
        f"{number} of {sum(map(len, errors.values()))} tokens differ; the largest difference is "
        f"{float(errors[sequence].max()):.2g} (tolerance {limit:.2g}){_times(found, expected)}, "
        f"at position {position} of sequence {sequence}"
        + f", which uses experts {', '.join(map(str, experts))}"
        * bool(experts)
    )


def _times(found: Tensor, expected: Tensor) -> str:
    """Return ", 2 times the reference" if a factor such as 2 explains the difference, otherwise ""."""
    x, y = found.double(), expected.double()
    factor = float((x @ y) / (y @ y).clamp(min=1e-300))
    explains = expected.is_floating_point() and relative(x, factor * y) < 1e-3 and abs(factor - 1) > 1e-2
    return f", {factor:.3g} times the reference" if explains else ""


class StageObserver:
    """Passes the outputs of a stage's segments and all gradients to a trace (probe.py).

    With several expert-parallel ranks, rows between dispatch and combine belong to tokens of other ranks. They are left
    out: a fault in them shows in the output of combine.
    """

    def __init__(self, trace: StepTrace, forwards: Sequence[Sequence[int]], ep: int):
        """forwards: the sequences of the micro-batches of a step, in the order of their forwards on this rank."""
        self.trace, self.forwards, self.ep = trace, forwards, ep
        self.segments: defaultdict[tuple[int | None, str], list[int]] = defaultdict(list)
        """By layer and name, in order."""
        self.received, self.computed = set[tuple[int, int]](), set[tuple[int, int]]()
        """By micro-batch: storages of received rows, and segments that compute with received rows."""

    def __call__(self, at: Observed, tensor: Tensor) -> None:
        if at.module:  # the stage itself has all segments
            return
        step, number = divmod(at.chunk, len(self.forwards))
        same, sequences = self.segments[at.layer, at.name], self.forwards[number]
        if at.segment not in same:
            same.append(at.segment)
        if self.ep > 1 and self._is_received(at, tensor):
            return
        if not (at.is_output or at.is_gradient or at.name.startswith(PREPARE)):
            return  # the output of another segment
        layer = f"step {step + 1}, " + ("" if at.layer is None else f"layer {at.layer}, ") + "segment "
        which = f" number {same.index(at.segment) + 1}" * (at.segment != same[0])
        kind = ("output" if at.is_output else "input") + " gradient" * at.is_gradient
        # A micro-batch has the mean loss of its sequences.
        tensor = tensor * len(sequences) if at.is_gradient else tensor
        ids = f"{layer}{PREPARE}{DISPATCH}, input 0"
        self.trace.see_tokens("segments", f"{layer}{at.name}{which}, {kind} {at.index}", sequences, tensor, ids)

    def _is_received(self, at: Observed, tensor: Tensor) -> bool:
        """Whether the rows were returned by dispatch, or computed from such rows before combine."""
        storage = at.chunk, tensor.untyped_storage().data_ptr()
        if at.name == DISPATCH and at.is_output:
            self.received.add(storage)
            return True
        if at.name == COMBINE:
            return not at.is_output
        if not at.is_output and storage in self.received:
            self.computed.add((at.chunk, at.segment))
        return (at.chunk, at.segment) in self.computed


# ---- the verdict ----


def verdict(traces: Sequence[Any], expected: Recorded, tolerance: Tolerance) -> tuple[str, str]:
    """The largest differences, and the first difference above the tolerance; "" if there is none.

    traces: `largest`, `compared` and `first` of each rank. Together, the ranks must have all results of the reference.
    """
    largest = {kind: max(errors[kind] for errors, _, _ in traces) for kind in _RESULTS}
    measured = ", ".join(
        f"{kind} {largest[kind]:.2g} of {tolerance[kind]:.2g}" if largest[kind] else f"{kind} equal"
        for kind in _RESULTS[:3]
    )
    results = {(*key, s) for key, values in expected.items() if key[0] != "segments" for s in values}
    if missing := sorted(results.difference(*(compared for _, compared, _ in traces))):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        kind, name, _ = missing[0]
        return measured, f"{kind}: no rank has {name}{more}: the name depends on the layout, or it was not computed"
    if all(largest[kind] <= tolerance[kind] for kind in _RESULTS):
        return measured, ""
    (_, first), rank = min((first, rank) for rank, (_, _, first) in enumerate(traces))
    if first.startswith(": "):
        first += f" on rank {rank}"
    if first.startswith(": gradients"):
        agree = "all tensors between segments agree, so the fault is in a weight gradient or in its sum over ranks"
        return measured, f"{agree}{first}"
    return measured, f"the first difference{first}"
