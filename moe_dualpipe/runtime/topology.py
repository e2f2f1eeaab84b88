"""Number the ranks so that expert groups stay together: on one machine, or on machines that are joined by NVLink.

Ranks that share experts send tokens to each other twice per layer, so they need the fastest links. They are `ep`
consecutive ranks. A launcher may number ranks in another way: torchrun numbers machines in the order in which they
connect, and some launchers deal out ranks in turn. And if a group does not divide the GPUs of a machine, most groups
would be split.

So the ranks tell the rendezvous store where they are, rank 0 chooses the order, and all join with their new numbers.
Rank 0 stays rank 0.
"""

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from .. import __version__
from ..messages import natural_order, plural
from .groups import decide_for_all, rendezvous
from .launch import Launch


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank is. machine: a host name. domain: equal for machines whose GPUs are joined by NVLink."""

    machine: str
    domain: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A launch with its new rank.

    store: where the ranks have met. description: a line about the expert groups. span: the largest number of
    machines that one expert group covers. other_versions: how machines differ (`other_versions`).
    """

    launch: Launch
    store: dist.Store | None = None
    description: str = ""
    span: int = 1
    other_versions: str = ""


def place(
    launch: Launch, ep: int, nodes_per_domain: int | None, timeout: float, store: dist.Store | None = None
) -> Placed:
    """Choose the rank of this process. Collective over the processes of `launch`; on one machine, nothing changes.

    store: where the ranks have met already.
    ep: ranks of an expert group. nodes_per_domain: number of machines, in the order of their names, that are joined by
    NVLink. None: one. timeout: seconds to wait for other ranks.
    """
    if launch.local_world_size == launch.world_size:
        return Placed(launch, store)
    store = store or rendezvous(launch, timeout)

    def decide(reported: list[tuple[str, Versions]]) -> list[Any]:
        problem = other_versions(reported)
        places = find_domains([machine for machine, _ in reported], nodes_per_domain or 1)
        order = [*range(len(places))] if problem else placement_order(places, ep)
        groups = [[places[rank] for rank in order[i : i + ep]] for i in range(0, len(order), ep)]
        text, span = describe(groups, order), max(len({p.machine for p in group}) for group in groups)
        return [[order.index(old), text, span, problem] for old in range(len(order))]

    own = socket.gethostname(), own_versions()
    new, text, span, problem = decide_for_all(store, launch, "place", own, decide)
    return Placed(replace(launch, rank=new), store, text, span, problem)


def find_domains(machines: Sequence[str], nodes_per_domain: int) -> list[RankPlace]:
    """The place of each rank, from its machine."""
    ordered = sorted({*machines}, key=natural_order)
    return [RankPlace(machine, str(ordered.index(machine) // nodes_per_domain)) for machine in machines]


def placement_order(places: Sequence[RankPlace], ep: int) -> list[int]:
    """The ranks in an order in which `ep` consecutive ones share experts: order[new rank] = old rank.

    As many groups as possible are on one machine, then, of the ranks that remain, in one domain. Ranks of a group are
    sorted by machine. ep divides the number of ranks.
    """
    groups: list[list[int]] = []
    remaining = list(range(len(places)))
    levels: tuple[Callable[[RankPlace], Any], ...] = (
        lambda p: (p.domain, p.machine),
        lambda p: p.domain,
        lambda _: None,
    )
    for level in levels:
        together: dict[Any, list[int]] = {}
        for rank in remaining:
            together.setdefault(level(places[rank]), []).append(rank)
        remaining = []
        for ranks in together.values():
            whole = len(ranks) - len(ranks) % ep
            groups += [ranks[i : i + ep] for i in range(0, whole, ep)]
            remaining += ranks[whole:]
    return [rank for group in sorted(groups, key=min) for rank in group]


def machine_limit(span: int, expert_groups: int, top_groups: int) -> int:
    """The largest number of machines that one token is sent to, if its expert group covers `span` machines.

    DeepSeek-V3's node-limited routing (arXiv 2412.19437, section 2.1.2): there are as many groups of experts as
    machines, and a token's experts are in `top_groups` of them.
    """
    if expert_groups % span == 0:
        return min(span, top_groups)
    if span % expert_groups == 0:
        return span // expert_groups * top_groups
    return span  # a group may have experts on any two machines


def describe(groups: Sequence[Sequence[RankPlace]], order: Sequence[int]) -> str:
    """A line about the expert groups. order: from `placement_order`."""
    machines = len({p.machine for group in groups for p in group})
    text = f"{plural(len(order), 'rank')} on {plural(machines, 'machine')}"
    if (ep := len(groups[0])) > 1:
        kinds = Counter(map(_kind, groups)).most_common()
        where = ", ".join(f"{'each' if len(kinds) == 1 else number} {kind}" for kind, number in kinds)
        text += f"; {plural(len(groups), 'expert group')} of {ep} ranks: {where}"
    moved = sum(new != old for new, old in enumerate(order))
    return text + (f"; {plural(moved, 'rank')} renumbered for that" if moved else "")


def _kind(group: Sequence[RankPlace]) -> str:
    machines, domains = len({p.machine for p in group}), len({p.domain for p in group})
    if machines == 1:
        return "within one machine"
    return f"across {machines} machines" + (" of one domain" if domains == 1 else "")


# ---- Versions: other ones would compute something else, or wait for other messages ----

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
