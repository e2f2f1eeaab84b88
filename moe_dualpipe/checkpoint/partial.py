"""Which weights a partial load found, and which it did not, in a few lines.

A model has thousands of tensors whose names differ only in the number of the layer or expert. Such names are listed
together, with the ranges of these numbers.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..messages import plural, printable

_MAX_GROUPS = 20
_NUMBER = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")  # a layer, an expert, or experts that share a tensor: 4-7


@dataclass(frozen=True, slots=True)
class PartialLoad:
    """Names of tensors. loaded: in the model and the file. missing: only in the model. ignored: only in the file."""

    loaded: Sequence[str]
    missing: Sequence[str]
    ignored: Sequence[str]

    def __str__(self) -> str:
        lines = [f"loaded {plural(len(self.loaded), 'tensor')}"]
        if self.missing:
            lines.append(f"not in the file, start from their initial weights: {group_names(self.missing)}")
        if self.ignored:
            lines.append(f"in the file, but not in the model: {group_names(self.ignored)}")
        return "\n".join(lines)


def group_names(names: Iterable[str]) -> str:
    """List names by group. Names in a group differ only in numbers, which are shown as ranges.

    Example: norm.weight, layers.0.up.2, layers.0.up.3, layers.2.up.2, layers.2.up.3
    -> "layers.0,2.up.2-3 (4 tensors), norm.weight (1 tensor)"
    """
    groups: dict[tuple[str | None, ...], list[list[tuple[int, int]]]] = {}
    for name in sorted(names):
        parts = name.split(".")
        numbers = [_NUMBER.fullmatch(part) for part in parts]
        pattern = tuple(None if number else part for number, part in zip(numbers, parts, strict=True))
        intervals = [(int(number[1]), int(number[2] or number[1])) for number in numbers if number]
        groups.setdefault(pattern, []).append(intervals)
    texts = [f"{_pattern_text(pattern, rows)} ({plural(len(rows), 'tensor')})" for pattern, rows in groups.items()]
    more = [f"and {plural(len(texts) - _MAX_GROUPS, 'more group')}"] if len(texts) > _MAX_GROUPS else []
    return ", ".join(texts[:_MAX_GROUPS] + more)


def _pattern_text(pattern: Sequence[str | None], rows: Sequence[Sequence[tuple[int, int]]]) -> str:
    """The name of a group. Each row has the intervals of one of its tensors, one for each None of the pattern."""
    columns = iter(zip(*rows, strict=True))
    return printable(".".join(_ranges(next(columns)) if part is None else part for part in pattern), 200)


def _ranges(intervals: Iterable[tuple[int, int]]) -> str:
    """Merge intervals: (0, 0), (1, 1), (4, 7) -> "0-1,4-7"."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(set(intervals)):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return ",".join(f"{start}-{stop}" if stop != start else f"{start}" for start, stop in merged)
