"""Differences between the results of two runs, relative to the size of what is compared.

A token's difference is relative to its own norm or to the root mean square of the norms in its sequence, whichever is
larger. So rounding in a token whose gradient is almost 0 does not count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from .run import Results
from .subject import relative, row_errors
from .variants import Tolerance

Kind = Literal["weights", "losses", "logits", "buffers", "gradients"]
KINDS: tuple[Kind, ...] = ("weights", "losses", "logits", "buffers", "gradients")
BUFFERS = 1e-5  # buffers may be averaged over ranks


@dataclass(frozen=True, slots=True)
class Compared:
    """One rank's results against the reference's.

    largest: for each kind, the largest relative difference and where it is. held: for each kind, the names that this
    rank has. expected: for each kind, the names that all ranks together must have.
    """

    largest: dict[Kind, tuple[float, str]]
    held: dict[Kind, frozenset[Any]]
    expected: dict[Kind, frozenset[Any]]


def compare(results: Results, reference: Results) -> Compared:
    largest: dict[Kind, tuple[float, str]] = {}
    held: dict[Kind, frozenset[Any]] = {}
    all_of: dict[Kind, frozenset[Any]] = {}
    for kind in KINDS:
        found, expected = getattr(results, kind), getattr(reference, kind)
        held[kind], all_of[kind] = frozenset(found), frozenset(expected)
        measure = _tokens if kind in ("losses", "logits") else _whole
        pairs = [(key, value, expected[key]) for key, value in found.items() if key in expected]
        largest[kind] = max(measure(pairs), key=lambda pair: pair[0], default=(0.0, ""))
    return Compared(largest, held, all_of)


def _whole(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> Iterable[tuple[float, str]]:
    for name, found, expected in pairs:
        yield relative(found, expected), name


def _tokens(pairs: Iterable[tuple[tuple[int, int], Tensor, Tensor]]) -> Iterable[tuple[float, str]]:
    """The token with the largest difference in each sequence."""
    for (step, sequence), found, expected in pairs:
        errors_S = token_errors(found, expected)
        position = int(errors_S.argmax())
        yield float(errors_S[position]), f"position {position} of sequence {sequence} in step {step + 1}"


def token_errors(found: Tensor, expected: Tensor) -> Tensor:
    """The relative difference of each row, [S], in double. found, expected: [S, ...]. Integers differ by 0 or 1."""
    x, y = (t.flatten(1) if t.ndim > 1 else t[:, None] for t in (found, expected))
    return row_errors(x, y) if expected.is_floating_point() else (x != y).any(1).double()


def find_faults(parts: Sequence[Compared], tolerance: Tolerance) -> tuple[str, dict[Kind, str]]:
    """Return a summary of all measured differences, and for each kind the fault, if it exceeds the tolerance."""
    limits: dict[Kind, float] = {
        "weights": 0, "losses": tolerance.losses, "logits": tolerance.tokens, "buffers": BUFFERS,
        "gradients": tolerance.parameters,
    }  # fmt: skip
    largest: dict[Kind, tuple[float, str, int]] = {
        kind: max((*part.largest[kind], rank) for rank, part in enumerate(parts)) for kind in KINDS
    }
    faults: dict[Kind, str] = {}
    for kind, (error, where, rank) in largest.items():
        if error > limits[kind]:
            faults[kind] = (
                f"{kind} differ by {error:.2g}, above the tolerance of {limits[kind]:.2g}: {where} on rank {rank}"
            )
        if missing := sorted(parts[0].expected[kind] - frozenset().union(*(part.held[kind] for part in parts))):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            faults[kind] = (
                f"{kind}: no rank has {missing[0]}{more}: the name depends on the layout, or it was not computed"
            )
    shown: tuple[Kind, ...] = ("losses", "logits", "gradients")
    return ", ".join(f"{kind} {_shown(largest[kind][0], limits[kind])}" for kind in shown), faults


def _shown(error: float, limit: float) -> str:
    return f"{error:.2g} of {limit:.2g}" if error else "equal"


def may_be_rounding(parts: Sequence[Compared]) -> bool:
    """Whether rounding can explain the differences. It changes no weight.

    If the logits agree, it changes no gradient by 1% or more.
    """
    largest = {kind: max(part.largest[kind][0] for part in parts) for kind in KINDS}
    return largest["weights"] == 0 and (largest["logits"] > 1e-4 or largest["gradients"] < 1e-2)
