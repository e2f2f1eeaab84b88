"""Refuse a machine with other versions: its ranks would compute something else, or wait for other messages."""

from collections import Counter
from collections.abc import Sequence

import torch

from .. import __version__

Versions = dict[str, str]


class OtherVersionsError(RuntimeError):
    """Some machines have other versions than most."""


def own_versions() -> Versions:
    """The versions of this process that all ranks must have."""
    return {"moe-dualpipe": __version__, "torch": str(torch.__version__)}


def other_versions(reported: Sequence[tuple[str, Versions]]) -> str:
    """What to tell the user if machines differ; "" if all agree.

    reported: machine and versions of each rank. Of two kinds of equal number, that of the first rank counts as usual.
    """
    kinds = Counter(tuple(sorted(versions.items())) for _, versions in reported)
    (usual, _), *others = kinds.most_common()
    if not others:
        return ""
    example = next(machine for machine, versions in reported if versions == dict(usual))
    odd = {machine: versions for machine, versions in reported if versions != dict(usual)}
    machine, versions = next(iter(odd.items()))
    differ = " and ".join(f"{name} {version}" for name, version in versions.items() if dict(usual).get(name) != version)
    instead = " and ".join(version for name, version in usual if versions.get(name) != version)
    more = f" (also others: {', '.join([*odd][1:4])})" if len(odd) > 1 else ""
    return f"{machine} has {differ}{more}, but {instead} is on most, such as {example}: install the same version"
