"""How much transfers and computation slow each other down, and for how long they run beside each other.

On a GPU, both use SMs and memory. The speed of a kernel falls with the share of its time that it runs beside a
transfer. A line through the events of the same kernel gives the speed alone and beside; the mean over all kernels,
weighted by certainty, is the slowdown. The same for transfers beside computation.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....messages import plural
from ..categories import COPY_ENGINE, category_of
from ..intervals import length_before, union
from .device import COMPUTE, Device, FoundCause
from .joint import gathered, scattered
from .replay import Floats, Ints, NodeTimes
from .transfers import LEAST, LONG, same_kind

SHORTEST = 10.0
"""Microseconds. The duration of shorter events is not exact enough to compare it."""
SPREAD, SPREAD_JOINED = 0.3, 0.1
"""Minimum difference between the shares of a kernel's events that run beside the other kind; and of transfers whose
waits for other ranks are known and left out."""
SLOWER = 1.1
"""Smaller ratios are ordinary variation."""
CERTAIN = 5.0
"""The slowdown must be at least this many times its standard error."""


class Slowdown(NamedTuple):
    """How much slower events of one kind are beside the other kind. Their speed there is 1 - k of their speed alone."""

    is_comm: bool
    """Whether transfers are slowed down, or computation."""
    k: float
    events: int
    kernels: int
    """Number of events, and of different kernels, that k was measured on."""
    beside_us: Floats
    """For how long each event ran beside the other kind; 0 for events of the other kind."""

    @property
    def cause(self) -> str:
        return "starved-transfer" if self.is_comm else "starved-computation"

    @property
    def excess_us(self) -> Floats:
        """How much longer each event took than alone."""
        return self.k * self.beside_us


def slowdowns_of(devices: Sequence[Device], shared: Ints) -> list[list[Slowdown]]:
    """How much transfers and computation slow each other down on each device. shared: collectives (joint.py)."""
    own_us = [device.own_us for device in devices]
    beside = beside_us(devices, [device.graph.recorded for device in devices], own_us, shared)
    found = [[slowdown_of(device, kind, beside[kind][i]) for kind in beside] for i, device in enumerate(devices)]
    return [[one for one in both if one is not None] for both in found]


def beside_us(
    devices: Sequence[Device], times: Sequence[NodeTimes], moving: Sequence[Floats], shared: Ints
) -> dict[bool, list[Floats]]:
    """For how long each event of one kind runs beside the other kind; 0 for others. For transfers, and for computation.

    moving: how long each event runs without its wait for other ranks, which comes first. A collective counts on the
    rank where it runs longest beside computation.
    """
    found: dict[bool, list[Floats]] = {True: [], False: []}
    for device, when, us in zip(devices, times, moving, strict=True):
        start, end = when.start[: len(device.events)], when.end[: len(device.events)]
        for is_comm, of_ranks in found.items():
            others = device.is_comm != is_comm
            before = length_before(union(np.stack([start, end], axis=1)[others]))
            of_ranks.append(np.where(others, 0.0, before(end) - before(end - us)))
    longest = gathered(shared, found[True], 0.0).max(axis=1)
    return found | {True: scattered(shared, longest, found[True])}


def slowdown_of(device: Device, is_comm: bool, beside_us: Floats) -> Slowdown | None:
    """How much slower events of one kind are beside the other kind; None if the difference is small or uncertain.

    beside_us: for how long each event ran beside the other kind.
    """
    if device.is_cpu:  # transfers of CPUs use no SMs
        return None
    kernels: dict[tuple[object, ...], list[int]] = defaultdict(list)
    chosen = (device.is_comm if is_comm else device.kind == COMPUTE) & (device.own_us >= SHORTEST)
    for event in np.flatnonzero(chosen).tolist():
        found = device.events[event]
        kernel = same_kind(device, event) if is_comm else (found.name, found.blocks, device.labels[event])
        kernels[kernel].append(event)
    least = SPREAD_JOINED if is_comm and (device.last >= 0).any() else SPREAD
    share, speed = beside_us / device.own_us.clip(1e-9), 1 / device.own_us.clip(1e-9)
    fits = [fit for events in kernels.values() if (fit := _fit(share[events], speed[events], least)) is not None]
    if not fits:
        return None
    k, error, counts = (np.array(column) for column in zip(*fits, strict=True))
    weight = error**-2.0
    pooled = float((k * weight).sum() / weight.sum())
    spread = float(np.sqrt((weight * (k - pooled) ** 2).sum() / weight.sum() / len(k)))
    error_of_all = max(float(weight.sum() ** -0.5), spread)
    if not max(CERTAIN * error_of_all, 1 - 1 / SLOWER) <= pooled < 0.95:
        return None
    return Slowdown(is_comm, pooled, int(counts.sum()), len(fits), beside_us)


def _fit(share: Floats, speed: Floats, least: float) -> tuple[float, float, int] | None:
    """Fit a line to the speeds of one kernel: its k, the error of k, and the number of events. None: too few events.

    Events that are much slower than most are slow for another reason, such as a slow link. They are left out.
    """
    usual = LONG * speed > np.median(speed)
    share, speed = share[usual], speed[usual]
    if len(share) < LEAST or np.ptp(share) < least:
        return None
    centered = share - share.mean()
    slope = float((centered * speed).sum() / (centered**2).sum())
    alone = float(speed.mean() - slope * share.mean())
    if alone <= 0:
        return None
    rest = speed - alone - slope * share
    error = float(np.sqrt((rest**2).sum() / (len(share) - 2) / (centered**2).sum())) / alone
    return -slope / alone, max(error, 0.01), len(share)


def cause_of(device: Device, slowdown: Slowdown) -> FoundCause:
    """Transfers that are slower beside computation, or computation that is slower beside transfers."""
    events, excess = np.flatnonzero(slowdown.excess_us), slowdown.excess_us
    copied = [category_of(event) == COPY_ENGINE for event in device.events]
    # By time: a backend that copies also has kernels, which pack messages.
    by_copies = 2 * device.own_us[device.is_comm & copied].sum() > device.own_us[device.is_comm].sum()
    [found] = device.longer(
        slowdown.cause + "/copy engines" * bool(by_copies), events, excess[events], ratio=1 / (1 - slowdown.k),
        measured=slowdown.events, kinds=plural(slowdown.kernels, "kind"),
    )  # fmt: skip
    return found
