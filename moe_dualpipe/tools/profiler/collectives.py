"""Tables of collectives: how often each kind ran in each group, how many bytes it moved, and how fast.

Algorithm bandwidth is bytes / time. Bus bandwidth multiplies it by a factor that depends on the kind and on the number
n of ranks, so that it can be compared with the bandwidth of the hardware. Definitions and factors are those of
nccl-tests: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    all_reduce            2(n-1)/n   bytes of the input
    reduce_scatter         (n-1)/n   bytes of the input
    all_gather             (n-1)/n   bytes of the output
    all_to_all             (n-1)/n   bytes of the input, also where ranks send different amounts
    gather                 (n-1)/n   bytes of the output
    scatter                (n-1)/n   bytes of the input
    broadcast, reduce, send, recv  1 bytes of the input

On a rank that waits for others, a collective takes longer than its transfer. So the time is that of the last rank to
join where traces of several ranks were compared. If ranks of the group have no trace, the bandwidths are lower limits.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .communication import function_name
from .intervals import Intervals, intersection, intervals_of, total_time, union, union_length
from .trace import Collective, DeviceEvent

_KINDS: Mapping[str, tuple[str, int | None]] = {
    "all_reduce": ("in", 2), "reduce_scatter": ("in", 1), "all_gather": ("out", 1), "all_to_all": ("in", 1),
    "send_recv": ("in", None),  # NCCL's kernel for all of send, recv, all_to_all, gather and scatter
    "broadcast": ("in", 0), "reduce": ("in", 0), "gather": ("out", 1), "scatter": ("in", 1),
    "send": ("in", 0), "recv": ("in", 0),
}  # fmt: skip
"""The kinds, each with the side whose bytes count and the m of the factor m(n-1)/n; 0: the factor is 1. None: unknown.
A name is of the first kind that occurs in it."""

_OF_FUNCTIONS = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"
"""Kinds that the name of any function can tell. Others, such as "send", can be parts of something else."""
_NCCL_KERNEL = re.compile(r"nccl\w*?Kernel_([a-z]+)", re.IGNORECASE)
_BACKEND = re.compile(r"(?:nccl|gloo|ucc|mpi|xccl|rccl):(\w+)")

DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1,
    "short": 2, "half": 2, "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
    "int": 4, "float": 4, "int32": 4, "uint32": 4, "float32": 4, "complexhalf": 4,
    "long": 8, "double": 8, "int64": 8, "uint64": 8, "float64": 8, "complexfloat": 8,
    "complexdouble": 16, "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of an element. Keys are names of c10::ScalarType (in lower case) and of torch's dtypes."""


class Met(NamedTuple):
    """A collective whose events on several ranks are known."""

    transfer_us: float
    """Its duration on the last of them to join."""
    complete: bool
    """Whether these are all ranks of the group."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """All collectives of one device with the same kind, group and dtype. None: unknown."""

    kind: str
    """A name such as "all_to_all"; without a known kind, the name of the kernel's function."""
    group: str
    ranks: tuple[int, ...]
    size: int | None
    dtype: str
    count: int
    bytes: int | None
    """Bytes of all collectives, on the side that counts (see above)."""
    total_us: float
    """Sum of the durations on this rank."""
    compared: int
    """Number of collectives of which the events of other ranks are known."""
    transfer_us: float | None
    """Sum of the durations of the compared collectives, each on the last rank to join it. None if none was compared."""
    exposed_us: float
    """Length of the union of the exposed parts."""
    algorithm_gb_s: float | None
    """10^9 bytes per second: those of the compared collectives in `transfer_us`, or of all in `total_us`."""
    bus_gb_s: float | None
    is_lower_limit: bool
    """Whether the bandwidths are lower limits, because the times may contain waits for ranks without a trace."""


def kind_of_collective(event: DeviceEvent) -> str:
    """The kind of a transfer: from what the backend recorded, otherwise from the name. "" if unknown."""
    if event.collective is not None and event.collective.name:
        return _known_kind(event.collective.name)
    return _kind_of_name(event.name)


def name_of_collective(event: DeviceEvent) -> str:
    """The kind of a transfer; without a known kind, its recorded name or the name of the kernel's function."""
    recorded = event.collective.name if event.collective else ""
    return kind_of_collective(event) or recorded or function_name(event.name).removeprefix("::")


@lru_cache(maxsize=1 << 12)
def _kind_of_name(name: str) -> str:
    if found := _NCCL_KERNEL.search(name) or _BACKEND.match(name):
        return _known_kind(found[1])
    function = function_name(name).replace("cross_device_reduce", "all_reduce")  # of vLLM, SGLang and AITER
    kind = _known_kind(function)
    return kind if kind in _OF_FUNCTIONS else ""


@lru_cache(maxsize=1 << 12)
def _known_kind(name: str) -> str:
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for kind in _KINDS if kind.replace("_", "") in letters), "")


def bytes_of(event: DeviceEvent) -> int | None:
    """The bytes of a transfer on the side that counts for its kind; None if unknown."""
    found = event.collective
    if found is None:
        return event.bytes or None
    kind, size = kind_of_collective(event), element_bytes(found.dtype)
    if not kind or size is None:
        return event.bytes or None
    elements = found.in_elems if _KINDS[kind][0] == "in" else found.out_elems
    if kind == "recv" and not elements:
        elements = found.out_elems
    return None if elements is None else elements * size


def element_bytes(dtype: str) -> int | None:
    """The bytes of one element: 2 for "BFloat16" and "torch.bfloat16". None if the type is unknown."""
    return DTYPE_BYTES.get(dtype.lower().removeprefix("torch."))


def bus_factor(kind: str, size: int | None) -> float | None:
    """Bus bandwidth divided by algorithm bandwidth. None if it is unknown, or if there is no other rank."""
    passes = _KINDS[kind][1] if kind in _KINDS else None
    if passes is None or size == 1:
        return None
    if passes == 0:
        return 1.0
    return passes * (size - 1) / size if size else None


def group_name(collective: Collective) -> str:
    """The description of the group; without one, its name in PyTorch, which can be a number."""
    return collective.group if collective.description in ("", "undefined") else collective.description


def group_size(collective: Collective | None) -> int | None:
    if collective is None:
        return None
    return collective.size or len(collective.ranks) or None


def collective_rows(
    comm: Sequence[DeviceEvent],
    exposed: Intervals,
    met: Mapping[int, Met] | None = None,
) -> tuple[CollectiveRow, ...]:
    """Return the rows of one device, sorted by total time, longest first.

    comm: its transfers. exposed: all its exposed communication. met: the transfers that were compared with those
    of other ranks, by index.
    """
    rows: dict[tuple[str, str, tuple[int, ...], int | None, str], list[int]] = defaultdict(list)
    for index, event in enumerate(comm):
        found = event.collective or Collective("")
        rows[
            name_of_collective(event), group_name(found), found.ranks, group_size(event.collective), found.dtype
        ].append(index)
    result = [_row(*key, comm, indices, exposed, met or {}) for key, indices in rows.items()]
    return tuple(sorted(result, key=lambda row: -row.total_us))


def _row(
    kind: str, group: str, ranks: tuple[int, ...], size: int | None, dtype: str, comm: Sequence[DeviceEvent],
    indices: Sequence[int], exposed: Intervals, met: Mapping[int, Met],
) -> CollectiveRow:  # fmt: skip
    events = [comm[index] for index in indices]
    known = {index: met[index] for index in indices if index in met}
    transfer = sum(one.transfer_us for one in known.values())
    time, number = (transfer, _bytes(comm[index] for index in known)) if known else (total_time(events), _bytes(events))
    bandwidth = number / time / 1e3 if number and time > 0 else None
    factor = bus_factor(kind, size)
    return CollectiveRow(
        kind=kind, group=group, ranks=ranks, size=size, dtype=dtype, count=len(events), bytes=_bytes(events),
        total_us=total_time(events), compared=len(known), transfer_us=transfer if known else None,
        exposed_us=_exposed(events, exposed), algorithm_gb_s=bandwidth,
        bus_gb_s=None if bandwidth is None or factor is None else bandwidth * factor,
        is_lower_limit=not known or not all(one.complete for one in known.values()),
    )  # fmt: skip


def _bytes(events: Iterable[DeviceEvent]) -> int | None:
    """The bytes of all events; None if those of one are unknown."""
    total_bytes = 0
    for event in events:
        if (number := bytes_of(event)) is None:
            return None
        total_bytes += number
    return total_bytes


def _exposed(events: Iterable[DeviceEvent], exposed: Intervals) -> float:
    return union_length(intersection(union(intervals_of(events)), exposed))
