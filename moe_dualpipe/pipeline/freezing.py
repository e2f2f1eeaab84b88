"""`--freeze PATTERN`: parameters that keep their initial or loaded weights, selected by name.

A pattern is matched against global names, as in checkpoints: they are the same in every parallel layout. A
parameter that stacks experts has one global name for each of them, and is frozen as a whole.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ..expert_parallel.parameters import ExpertIds, expert_ids
from ..messages import quoted
from ..runtime.shared_errors import gather_objects

_NUMBERS = re.compile(r"(?<=\.)\d+(-\d+)?(?=\.|$)")


def is_frozen(name: str, patterns: Iterable[str]) -> bool:
    """Whether a global name matches one of the patterns: `*` any text, `?` a character, `[0-3]` one of several."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def freeze(stages: Iterable[nn.Module], patterns: Sequence[str], num_experts: int) -> None:
    """Freeze all parameters of the model whose global names match a pattern. Collective.

    stages: those of this rank. num_experts: of a layer, on all ranks together.

    Raises ValueError on all ranks for a pattern that matches nothing, and if the patterns match some of the experts of
    a parameter, but not all.
    """
    unmatched, names, faults = {*patterns}, set(), set()
    for stage in stages:
        ids = expert_ids(stage)
        for name, parameter in stage.named_parameters():
            known = _global_names(name, ids.get(name), num_experts)
            names.update(_NUMBERS.sub("*", known_name) for known_name in known)
            unmatched -= {pattern for pattern in unmatched if any(fnmatchcase(n, pattern) for n in known)}
            frozen = [is_frozen(known_name, patterns) for known_name in known]
            if all(frozen):
                parameter.requires_grad_(False)
            elif any(frozen):
                one, other = known[frozen.index(True)], known[frozen.index(False)]
                what = f"--freeze matches {one}, but not {other}, which is in the same parameter"
                faults.add(f"{what}: use {quoted(ids[name].name)} for all")
    _raise_fault(patterns, unmatched, names, min(faults, default=""))


def _global_names(name: str, held: ExpertIds | None, num_experts: int) -> list[str]:
    """The global names in a parameter, including experts of other ranks: so patterns do not depend on --ep."""
    if held is None:
        return [name]
    experts = range(num_experts) if held.layout == "stacked" else [held.ids.start]
    return [held.name.replace("*", str(expert)) for expert in experts]


def _raise_fault(patterns: Sequence[str], unmatched: Collection[str], names: Collection[str], fault: str) -> None:
    """Raise ValueError on all ranks if one has a fault, or if a pattern matches nothing on any rank. Collective.

    names: of all parameters of this rank, with `*` for numbers.
    """
    ranks = gather_objects((unmatched, names, fault))
    if faults := [fault for _, _, fault in ranks if fault]:
        raise ValueError(min(faults))  # the same in every layout
    for pattern in patterns:
        if all(pattern in unmatched for unmatched, _, _ in ranks):
            all_names = sorted(set().union(*(names for _, names, _ in ranks)))
            near = difflib.get_close_matches(_NUMBERS.sub("*", pattern[:200]), all_names, n=3, cutoff=0.0)
            raise ValueError(f"--freeze {quoted(pattern, 60)} matches no parameter; near names: {', '.join(near)}")
