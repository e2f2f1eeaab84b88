"""Which weights a partial load found, and which it did not, in a few lines.

A model has thousands of tensors whose names differ only in the number of the layer or expert. One name stands for all.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..messages import plural, printable

_MAX_GROUPS = 20


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
    """List one name of each group, and the size of the group. Names in a group differ only in numbers.

    Example: norm.weight, layers.0.up.2, layers.0.up.3, layers.2.up.2
    -> "layers.0.up.2 (and 2 like it), norm.weight"
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    texts = [
        printable(group[0]) + (f" (and {len(group) - 1:,} like it)" if len(group) > 1 else "")
        for group in groups.values()
    ]
    more = [f"and {plural(len(texts) - _MAX_GROUPS, 'more group')}"] if len(texts) > _MAX_GROUPS else []
    return ", ".join(texts[:_MAX_GROUPS] + more)
