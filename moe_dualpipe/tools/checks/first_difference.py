"""Find where a run differs from the reference: in its results, and in the first tensor that it computes differently.

Rounding grows slowly from segment to segment; a fault is a jump far above it. So the tensors of all segments are
compared in the order in which the reference computes them, and the first one above the tolerance is described.

A token's difference is relative to its own norm or to the root mean square of the norms in its sequence, whichever is
larger. So rounding in a token whose gradient is almost 0 does not count.

S positions, V vocabulary, K experts per token.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...overlap.labels import COMBINE, DISPATCH, PREPARE
from ...overlap.probe import Observed

Kind = Literal["weights", "buffers", "losses", "logits", "gradients"]
_KINDS: tuple[Kind, ...] = ("weights", "buffers", "losses", "logits", "gradients")
_BUFFERS = 1e-5  # buffers may be averaged over ranks


# ---- differences in numbers ----


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """For each row, the difference relative to the norm of the row or, if that is smaller, of a typical row."""
    if not found.numel():
        return found.new_zeros(found.shape[:-1], dtype=torch.float64)
    x, y = found.double(), expected.double()
    norms = y.norm(dim=-1)
    typical = norms.square().mean().sqrt().clamp(min=1e-300)
    errors = (x - y).norm(dim=-1) / norms.clamp(min=float(typical))
    return torch.where(errors.isnan(), torch.inf, errors)


def relative(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """|found - expected| / |expected|, or / `least` if that is larger. Infinite for other shapes and if not finite."""
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


# ---- results ----


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest relative differences that rounding explains. 0: bit-equal.

    losses: of the loss of one token. tokens: of its logits and activations, and of their gradients. parameters: of the
    gradient of one parameter, or of one expert's part of it.
    """

    losses: float
    tokens: float
    parameters: float

    def of(self, kind: Kind) -> float:
        limits = {"weights": 0.0, "buffers": _BUFFERS, "losses": self.losses, "logits": self.tokens}
        return limits.get(kind, self.parameters)


@dataclass(slots=True)
class Results:
    """The results of one rank. Keys do not depend on the layout.

    weights: each parameter and buffer before the first step. logits, losses: of each token, [S, V] and [S], by step
    and sequence. buffers: after the first step. gradients: those of the sum over sequences of the mean loss of the
    sequence.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


Compared = dict[Kind, tuple[float, str, frozenset[Any]]]
"""One rank's results against the reference's: the largest relative difference, where it is, and the names of all."""


def compare(results: Results, reference: Results) -> Compared:
    compared: Compared = {}
    for kind in _KINDS:
        found, expected = getattr(results, kind), getattr(reference, kind)
        measure = _of_tokens if kind in ("losses", "logits") else _of_tensor
        errors = (measure(key, value, expected[key]) for key, value in found.items() if key in expected)
        error, where = max(errors, key=lambda pair: pair[0], default=(0.0, ""))
        compared[kind] = error, where, frozenset(found)
    return compared


def _of_tensor(name: str, found: Tensor, expected: Tensor) -> tuple[float, str]:
    return relative(found, expected), name


def _of_tokens(key: tuple[int, int], found: Tensor, expected: Tensor) -> tuple[float, str]:
    errors_S = _token_errors(found, expected)
    position = int(errors_S.argmax())
    return float(errors_S[position]), f"position {position} of sequence {key[1]} in step {key[0] + 1}"


def find_faults(
    parts: Sequence[Compared], reference: Results, tolerance: Tolerance
) -> tuple[str, dict[Kind, str]]:  # fmt: skip
    """Return a summary of all measured differences, and for each kind the fault, if it exceeds the tolerance.

    parts: of all ranks, which together must have all names of the reference.
    """
    shown: list[str] = []
    faults: dict[Kind, str] = {}
    for kind in _KINDS:
        limit = tolerance.of(kind)
        error, where, rank = max((*part[kind][:2], rank) for rank, part in enumerate(parts))
        if kind in ("losses", "logits", "gradients"):
            shown.append(f"{kind} {error:.2g} of {limit:.2g}" if error else f"{kind} equal")
        if error > limit:
            faults[kind] = f"{kind} differ by {error:.2g}, above the tolerance of {limit:.2g}: {where} on rank {rank}"
        if missing := sorted({*getattr(reference, kind)}.difference(*(part[kind][2] for part in parts))):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            faults[kind] = (
                f"{kind}: no rank has {missing[0]}{more}: the name depends on the layout, or it was not computed"
            )
    return ", ".join(shown), faults


# ---- tensors ----

Tensors = dict[str, dict[int, Tensor]]
"""What a run computes, by name and sequence, [S, ...] each. Names are in the order of the computation."""


class Trace:
    """Records the tensors of a run, or finds the first one that differs from those that another run has recorded.

    expected: what the other run recorded; None: record. limit: the largest difference that rounding explains.
    """

    def __init__(self, expected: Tensors | None = None, limit: float = 0.0):
        self.expected, self.limit = expected, limit
        self.tensors: Tensors = {}
        self.order = {name: place for place, name in enumerate(expected or ())}
        self.first: tuple[int, str] = (len(self.order), "")
        """The place of the first difference in the order of the reference, and what it is."""

    def see(self, name: str, sequences: Sequence[int], tensor: Tensor, ids_of: str = "") -> None:
        """Take a tensor [B, S, ...] or [B * S, ...]. Others are ignored.

        ids_of: the name of the tensor with the expert ids of the same tokens.
        """
        number = len(sequences)
        if tensor.ndim == 0 or len(tensor) % number:
            return
        if not (tensor.ndim > 1 and len(tensor) == number):
            tensor = tensor.unflatten(0, (number, -1))
        by_sequence = dict(zip(sequences, tensor.detach(), strict=True))
        if self.expected is None:
            self.tensors.setdefault(name, {}).update({s: found_S.clone() for s, found_S in by_sequence.items()})
        elif (place := self.order.get(name, self.first[0])) < self.first[0]:
            expected = self.expected[name]
            pairs = {s: (t, expected[s]) for s, t in by_sequence.items() if t.shape == expected[s].shape}
            errors = {s: _token_errors(*pair) for s, pair in pairs.items()}
            if any(bool((errors_S > self.limit).any()) for errors_S in errors.values()):
                self.first = place, f"{name}: {self._describe(pairs, errors, self.expected.get(ids_of, {}))}"

    def _describe(
        self, pairs: Mapping[int, tuple[Tensor, Tensor]], errors: Mapping[int, Tensor], ids: Mapping[int, Tensor]
    ) -> str:
        wrong = {s: errors_S > self.limit for s, errors_S in errors.items()}
        found, expected = (torch.cat([pairs[s][i][wrong[s]].flatten() for s in pairs]) for i in (0, 1))
        sequence = max(errors, key=lambda s: float(errors[s].max()))
        position = int(errors[sequence].argmax())
        number = sum(int(w.sum()) for w in wrong.values())
        text = f"{number} of {sum(map(len, errors.values()))} tokens differ"
        text += f"; the largest difference is {float(errors[sequence].max()):.2g} (tolerance {self.limit:.2g})"
        text += f"{_times(found, expected)}, at position {position} of sequence {sequence}"
        if ids:
            text += f", which uses experts {', '.join(map(str, ids[sequence][position].flatten().tolist()))}"
        return text


def _times(found: Tensor, expected: Tensor) -> str:
    """Return ", 2 times the reference" if a factor such as 2 explains the difference, otherwise ""."""
    x, y = found.double(), expected.double()
    factor = float((x @ y) / (y @ y).clamp(min=1e-300))
    explains = expected.is_floating_point() and relative(x, factor * y) < 1e-3 and abs(factor - 1) > 1e-2
    return f", {factor:.3g} times the reference" if explains else ""


class _Chunk:
    """What is known of one micro-batch's forward.

    segments: by layer and name, in order. received: the storages of the rows that dispatch returned. computed: the
    segments that take them.
    """

    def __init__(self) -> None:
        self.segments: defaultdict[tuple[int | None, str], list[int]] = defaultdict(list)
        self.received: set[int] = set()
        self.computed: set[int] = set()

    def occurrence(self, at: Observed) -> int:
        same = self.segments[at.layer, at.name]
        if at.segment not in same:
            same.append(at.segment)
        return same.index(at.segment)

    def is_received(self, at: Observed, tensor: Tensor) -> bool:
        """Whether the rows are those that dispatch returned, or what is computed from them until combine."""
        storage = tensor.untyped_storage().data_ptr()
        if at.name == DISPATCH and at.is_output:
            self.received.add(storage)
            return True
        if at.name == COMBINE:
            return not at.is_output
        if not at.is_output and storage in self.received:
            self.computed.add(at.segment)
        return at.segment in self.computed


class StageObserver:
    """Gives a trace what the segments of a stage compute: their outputs, and all gradients (overlap/probe.py).

    The rows between dispatch and combine of several expert-parallel ranks belong to other ranks' tokens and are left
    out: the output of combine shows their faults.
    """

    def __init__(self, trace: Trace, forwards: Sequence[tuple[int, ...]], ep: int):
        """forwards: the sequences of the micro-batches of a step, in the order of their forwards on this rank."""
        self.trace, self.forwards, self.ep = trace, forwards, ep
        self.chunks: defaultdict[int, _Chunk] = defaultdict(_Chunk)

    def __call__(self, at: Observed, tensor: Tensor) -> None:
        if at.module:  # the stage itself has all segments
            return
        step, number = divmod(at.chunk, len(self.forwards))
        chunk, sequences = self.chunks[at.chunk], self.forwards[number]
        occurrence = chunk.occurrence(at)
        if self.ep > 1 and chunk.is_received(at, tensor):
            return
        if not (at.is_output or at.is_gradient or at.name.startswith(PREPARE)):
            return  # the output of another segment
        layer = f"step {step + 1}, " + ("" if at.layer is None else f"layer {at.layer}, ") + "segment "
        which = f" number {occurrence + 1}" * (occurrence > 0)
        kind = ("output" if at.is_output else "input") + " gradient" * at.is_gradient
        # A micro-batch has the mean loss of its sequences.
        tensor = tensor * len(sequences) if at.is_gradient else tensor
        ids = f"{layer}{PREPARE}{DISPATCH}, input 0"
        self.trace.see(f"{layer}{at.name}{which}, {kind} {at.index}", sequences, tensor, ids)


# ---- the verdict ----


def find_difference(
    results: Results, reference: Results, tolerance: Tolerance, again: Callable[[], Trace]
) -> tuple[str, str]:
    """What was measured, and the first difference above the tolerance; "" if there is none. Collective.

    again: called if there is one: runs once more, with a trace.
    """
    measured, faults = find_faults(_of_all_ranks(compare(results, reference)), reference, tolerance)
    if not faults:
        return measured, ""
    _, first = min(_of_all_ranks(again().first))
    kind = next(iter(faults))
    if kind == "weights" or not first or (kind == "buffers" and not first.startswith("step 1, ")):
        if kind != "gradients":
            return measured, f"the first difference: {faults[kind]}"
        agree = "all tensors between segments agree, so the fault is in a weight gradient or in its sum over ranks"
        return measured, f"{agree}: {faults[kind]}"
    return measured, f"the first difference is in {first}"


def _of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
