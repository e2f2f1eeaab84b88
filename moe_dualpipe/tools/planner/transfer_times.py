"""Seconds of transfers between GPUs: in a fast domain (NVLink, xGMI) and over the network between domains (RDMA).

Ranks are numbered so that tensor-parallel ranks are neighbors, then context-parallel, then data-parallel ones; the
stages of a pipeline are farthest apart. An expert group has consecutive ranks of a stage.

A transfer within a domain and one between domains run at the same time, so the slower of both counts.
"""

import math
from dataclasses import dataclass
from typing import Literal

from .device import Device, LinkSpec

EpBackend = Literal["all_to_all", "deepep", "hybrid"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a rank sends for each of its tokens, on average: to other ranks of its domain, and to other domains.

    near also counts rows that come from other domains and are forwarded within this one.
    """

    near: float
    far: float


def seconds(link: LinkSpec, num_bytes: float) -> float:
    """A collective of a GPU that sends `num_bytes`, the latency included; 0 if there is nothing to send."""
    return num_bytes / (link.bandwidth * link.share) + link.latency if num_bytes else 0.0


def rows_sent(
    experts: int, top_k: int, ep: int, domain: int, backend: EpBackend, groups: int = 1, top_groups: int = 1
) -> Rows:
    """How many rows each token makes with `ep` ranks, `domain` of them in a fast domain.

    all_to_all: one row for each choice. deepep, hybrid: one row for each domain, forwarded to each rank there that
    holds any of the token's experts. Choices are even and independent, except for groups: the experts of a token are in
    `top_groups` of `groups` groups of consecutive experts, which limits the domains that it is sent to.

    Example: 8 of 64 experts, 16 ranks, 8 in a domain: all_to_all sends 4 rows to the other domain, deepep 0.996.
    """
    local = min(ep, domain)
    domains = ep / local
    if backend == "all_to_all":
        return Rows(top_k * (local - 1) / ep, top_k * (1 - 1 / domains))
    in_domain, in_rank = (_hit(experts, top_k, parts, groups, top_groups) for parts in (domains, ep))
    return Rows(in_rank * (ep - 1), in_domain * (domains - 1))


def _hit(experts: int, top_k: int, parts: float, groups: int = 1, top_groups: int = 1) -> float:
    """The probability that a token chooses any of the experts of one of `parts` equal parts.

    Groups count if each is whole parts, or each part is whole groups.
    """
    if parts <= 1:
        return 1.0
    if groups % parts and parts % groups:
        groups = top_groups = 1
    within = max(1, round(groups / parts))  # groups that have experts of this part
    each = experts // groups
    own = round(experts / parts) // within  # its experts in each of them
    missed = sum(
        math.comb(within, chosen) * math.comb(groups - within, top_groups - chosen)
        * math.comb(top_groups * each - chosen * own, top_k)
        for chosen in range(min(within, top_groups) + 1)
    )  # fmt: skip
    return 1 - missed / (math.comb(groups, top_groups) * math.comb(top_groups * each, top_k))


def all_to_all(device: Device, rows: Rows, tokens: float, row_bytes: float) -> float:
    """Seconds of a dispatch or a combine of `tokens` tokens."""
    near, far = (count * tokens * row_bytes for count in (rows.near, rows.far))
    return max(seconds(device.domain, near), seconds(device.network, far))


def gather(device: Device, num_bytes: float, ranks: int, distance: int) -> float:
    """Seconds of an all-gather or a reduce-scatter of `num_bytes` in all, over `ranks` ranks.

    distance: between two neighbors of the group in the numbering of ranks. A group that leaves a domain has as many
    rings as ranks in it, each through the network card of another GPU. It is at most as fast as the domain.

    Example: 16 neighbors, 8 in a domain: each card carries 1/8 of the bytes. With distance 8, each card carries all.
    """
    if ranks == 1 or not num_bytes:
        return 0.0
    domain, sent = device.domain.gpus or 1, num_bytes * (ranks - 1) / ranks
    inside = seconds(device.domain, sent) if distance < domain else 0.0
    if ranks * distance <= domain:
        return inside
    return max(inside, seconds(device.network, sent / max(1, domain // distance)))
