"""Which links are slow, and whose fault it is: pure functions from measured links to a list of problems.

A link is compared with others of its kind, within a machine or between machines. One bad cable makes many links slow,
so slow links that share a machine, a pair of machines or a rank are named once; a link that is much slower than the
others among them is also named by itself.
"""

import statistics
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .facts import Machine
from .links import Exchange, LinkSpeed
from .verdicts import GB, Problem

SLOW = 0.5
"""A link is slow below this share of the usual speed of its kind."""
ASYMMETRIC = 1.5
"""The two directions of a link may differ by this factor."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Links within machines, or between them, and their usual speed.

    directed: each direction has its own hardware. Processes on the CPUs of a machine share its memory.
    """

    name: str
    links: tuple[LinkSpeed, ...]
    usual: float
    directed: bool = True


def kinds_of(links: Sequence[LinkSpeed], machines: Sequence[Machine]) -> list[Kind]:
    """The kinds that exist: "within a machine", "between machines"."""
    home = home_of(machines)
    inner = tuple(link for link in links if home[link.source] == home[link.to])
    outer = tuple(link for link in links if home[link.source] != home[link.to])
    gpus = any(one.gpu is not None for machine in machines for one in machine.ranks)
    kinds = [
        ("within a machine", inner, lambda rank: rank, gpus),
        ("between machines", outer, home.__getitem__, True),
    ]
    return [Kind(name, some, _usual(some, place), directed) for name, some, place, directed in kinds if some]


def home_of(machines: Sequence[Machine]) -> dict[int, str]:
    """The name of each rank's machine."""
    return {one.rank: machine.name for machine in machines for one in machine.ranks}


def _usual(links: Sequence[LinkSpeed], place: Callable[[int], Hashable]) -> float:
    """The median over places of the median of their links.

    Of three machines, one slow machine makes four of the six links slow; but two of the three machines have a link
    that is not. So the higher median counts within a place.
    """
    speeds: dict[Hashable, list[float]] = {}
    for link in links:
        for rank in (link.source, link.to):
            speeds.setdefault(place(rank), []).append(link.speed)
    return statistics.median_high(statistics.median_high(some) for some in speeds.values())


def _slow(kind: Kind) -> list[LinkSpeed]:
    return [link for link in kind.links if link.speed < SLOW * kind.usual]


def _asymmetric(kind: Kind) -> list[tuple[LinkSpeed, LinkSpeed]]:
    """The slower and the faster direction of each asymmetric pair."""
    found = {(link.source, link.to): link for link in kind.links} if kind.directed else {}
    pairs = [(link, found.get((link.to, link.source))) for link in kind.links]
    return [(slow, fast) for slow, fast in pairs if fast is not None and slow.speed * ASYMMETRIC < fast.speed]


def find_link_problems(
    links: Sequence[LinkSpeed],
    exchanges: Sequence[Exchange],
    machines: Sequence[Machine],
    sockets: Collection[int] = (),
) -> list[Problem]:  # fmt: skip
    """Slow and asymmetric links, slow expert groups, and sockets where there is InfiniBand.

    sockets: ranks whose NCCL sends over TCP.
    """
    problems = [*_socket_problems(sockets, machines)]
    for kind in kinds_of(links, machines):
        slow = _slow(kind)
        problems += _name_slow(kind, slow, machines)
        named = {frozenset((link.source, link.to)) for link in slow}
        for less, more in _asymmetric(kind):
            if frozenset((less.source, less.to)) not in named:
                speeds = f"{_gbps(less.speed)}, but {_gbps(more.speed)} in the other direction"
                problems.append(Problem(_link(less, machines), speeds, _WAYS_OUT[kind.name]))
    return [*problems, *_slow_exchanges(exchanges, machines)]


_WAYS_OUT = {
    "within a machine": "look for another program on it, and check its GPUs with nvidia-smi topo -m",
    "between machines": "check the cable, the switch port and the network card",
}


def _link(link: LinkSpeed, machines: Sequence[Machine]) -> str:
    home = home_of(machines)
    if home[link.source] == home[link.to]:
        return f"rank {link.source} -> rank {link.to} on {home[link.source]}"
    return f"rank {link.source} on {home[link.source]} -> rank {link.to} on {home[link.to]}"


def _gbps(speed: float) -> str:
    return f"{speed / GB:.3g} GB/s"


def _culprits(link: LinkSpeed, home: Mapping[int, str]) -> list[tuple[str, Hashable]]:
    """What may be slow as a whole if this link is, largest first, each with the other end of the link."""
    source, to = home[link.source], home[link.to]
    return [
        (f"{source} -> all other machines", to),
        (f"all other machines -> {to}", source),
        (f"{source} -> {to}" if source != to else f"within {to}", (link.source, link.to)),
        (f"rank {link.source} of {source} -> all ranks", link.to),
        (f"all ranks -> rank {link.to} of {to}", link.source),
    ]


def _name_slow(kind: Kind, slow: Sequence[LinkSpeed], machines: Sequence[Machine]) -> Iterator[Problem]:
    left = {*slow}

    def problem(where: str, group: Sequence[LinkSpeed]) -> Problem:
        speed = statistics.median(link.speed for link in group)
        many = f" (median of {len(group)} links)" if len(group) > 1 else ""
        found = f"{_gbps(speed)}{many}, and {_gbps(kind.usual)} is usual {kind.name}"
        return Problem(where, found, _WAYS_OUT[kind.name])

    home = home_of(machines)
    for level in range(5):
        groups: dict[str, dict[LinkSpeed, Hashable]] = {}
        for link in kind.links:
            name, other = _culprits(link, home)[level]
            groups.setdefault(name, {})[link] = other
        for name, group in groups.items():  # with several other ends, so that it is not one of them
            if len({*group.values()}) > 1 and left.issuperset(group):
                yield problem(name, [*group])
                alike = SLOW * statistics.median_high(link.speed for link in group)
                left -= {link for link in group if link.speed >= alike}
    for link in kind.links:
        if link in left:
            yield problem(_link(link, machines), [link])


def _socket_problems(sockets: Collection[int], machines: Sequence[Machine]) -> Iterator[Problem]:
    for machine in machines:
        has_card = any("ACTIVE" in state for state in machine.first.infiniband.values())
        if has_card and not {*machine.numbers}.isdisjoint(sockets):
            way_out = "unset NCCL_IB_DISABLE, set NCCL_IB_HCA, and let the container see /dev/infiniband"
            yield Problem(machine.name, "NCCL uses TCP sockets, but this machine has InfiniBand", way_out)


def _slow_exchanges(exchanges: Sequence[Exchange], machines: Sequence[Machine]) -> Iterator[Problem]:
    """Groups within one machine are compared with each other, and so are groups of several."""
    home = home_of(machines)
    for inner in (True, False):
        some = [e for e in exchanges if (len({home[rank] for rank in e.ranks}) == 1) == inner]
        if len(some) < 2:
            continue
        usual = statistics.median_high(e.speed for e in some)
        for e in some:
            if e.speed < SLOW * usual:
                where = f"expert group of ranks {e.ranks[0]}-{e.ranks[-1]}"
                found = f"all-to-all at {_gbps(e.speed)}, and {_gbps(usual)} is usual"
                names = ", ".join(dict.fromkeys(home[rank] for rank in e.ranks))
                yield Problem(where, found, f"check the links of {names}, or leave them out of the run")
