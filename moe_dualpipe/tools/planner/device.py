"""GPUs as the planner sees them: peak rates, links, and the share of them that real kernels reach.

A device is a file in runtime/devices/, or the user's own file in the same format. Data sheets state the peaks. What a
kernel reaches depends on its size: small products do not fill the device. So each kind of kernel has a curve, FLOPs of
one launch -> share of the peak, from published measurements; `sources` in the file says which. Between two points, the
share is interpolated linearly in log(FLOPs); outside, it is constant.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...data import strict_json
from ...messages import printable, quoted, unknown_name
from ...runtime.known_gpus import FOLDER, device_names

KINDS = ("product", "grouped", "attention_forward", "attention_backward")

Precision = Literal["bf16", "fp8", "mxfp8"]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Curve = Annotated[tuple[tuple[Positive, Share], ...], Meta(min_length=1)]
"""Points (FLOPs of one launch, share of the peak), with increasing FLOPs."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What connects the devices of a domain, or the domains."""

    bandwidth: Positive
    """Bytes per second that one device sends, by the data sheet; it receives the same at the same time."""
    share: Share
    """Share of the bandwidth that collectives reach with large messages."""
    latency: Positive
    """Seconds that a collective takes with an empty message."""
    gpus: Annotated[int, Meta(gt=0)] | None = None
    """Devices that the link connects. None: any number."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What real kernels reach: curves by precision for each of KINDS, and shares."""

    product: Mapping[str, Curve]
    grouped: Mapping[str, Curve]
    attention_forward: Mapping[str, Curve]
    attention_backward: Mapping[str, Curve]
    memory: Share
    """Share of the memory bandwidth that element-wise kernels reach."""
    flash2: Share = 1.0
    """Speed of FlashAttention-2 relative to the attention curves."""

    def __post_init__(self) -> None:
        for kind in KINDS:
            for name, curve in getattr(self, kind).items():
                if any(a >= b for (a, _), (b, _) in pairwise(curve)):
                    raise ValueError(f"{kind}.{name} must have increasing FLOPs")


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU, with its links. All rates are per device, in one direction."""

    name: str
    memory_gb: Positive
    """Memory in 10^9 bytes."""
    memory_bandwidth: Positive
    """Bytes per second, read and written together."""
    sms: Annotated[int, Meta(gt=0)]
    """Streaming multiprocessors or compute units."""
    peak: Annotated[Mapping[str, Positive | None], Meta(min_length=1)]
    """FLOP/s of dense products by precision. None: the device does not compute in this precision."""
    domain: LinkSpec
    """Devices connected by NVLink or xGMI."""
    network: LinkSpec
    """What connects the domains."""
    efficiency: Efficiency
    launch: Positive
    """Seconds from one short kernel to the next."""
    fp8_kernels: bool = True
    """Whether compute.fp8 of train.py can run on it. It needs Hopper or a later GPU of NVIDIA."""
    cpu: str = "x86"
    """The CPU beside a GPU, a key of the launch seconds in constants.json."""
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where the numbers come from, by key."""

    @property
    def passes(self) -> float:
        """Bytes per second of element-wise kernels."""
        return self.memory_bandwidth * self.efficiency.memory

    def share(self, kind: str, precision: str, flops: float) -> float:
        """Share of the peak that a launch of `flops` FLOPs reaches.

        kind: one of KINDS. precision: a key of `peak`.

        Example: with the curve [[1e9, 0.2], [1e11, 0.6]], 1e10 FLOPs reach 0.4.
        """
        curve: Curve = getattr(self.efficiency, kind)[precision]
        after = bisect_right(curve, flops, key=lambda point: point[0])
        if after in (0, len(curve)):
            return curve[min(after, len(curve) - 1)][1]
        (low, share), (high, next_share) = curve[after - 1 : after + 1]
        return share + (next_share - share) * math.log(flops / low) / math.log(high / low)


def load_device(name: str | Path) -> Device:
    """Return the device of this name or alias, or the one in this file. Raises ValueError."""
    text = str(name)
    if "/" in text or text.endswith(".json"):
        path = Path(name)
    else:
        key = text.lower().replace("_", "-").replace(" ", "-")
        known = {name: name for name in device_names()} | _aliases()
        if key not in known:
            hint = "; or give a file, such as ./my_gpu.json"
            raise ValueError(f"{unknown_name('device', text, device_names(), _aliases())}{hint}")
        path = FOLDER / f"{known[key]}.json"
    value = strict_json.read_named(path)
    try:
        return parse_device(value)
    except ValueError as error:
        raise ValueError(f"{printable(path)} is not a device file: {error}") from None


@cache
def _aliases() -> dict[str, str]:
    return {
        alias: name for name in device_names() for alias in strict_json.read_file(FOLDER / f"{name}.json")["aliases"]
    }


def parse_device(value: Any) -> Device:
    """Return the device in the value of a JSON file. Raises ValueError, which names the key."""
    try:
        if isinstance(value, dict):
            value = value | {"efficiency": _efficiency(value.get("efficiency"))}
        device = msgspec.convert(value, Device)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if not device.peak.get("bf16"):
        raise ValueError("peak.bf16 is missing: attention runs in this precision")
    for kind in KINDS:
        used = ["bf16"] if kind.startswith("attention") else [name for name, rate in device.peak.items() if rate]
        if lacks := {*used} - {*getattr(device.efficiency, kind)}:
            raise ValueError(f"efficiency.{kind} has no curve for {min(lacks)}")
    if device.domain.gpus is None:
        raise ValueError("domain.gpus is missing: the number of devices that it connects")
    return device


def _efficiency(value: Any) -> Any:
    """The efficiency in a file, where the device named by `like` supplies missing entries."""
    if not isinstance(value, dict) or "like" not in value:
        return value
    if value["like"] not in device_names():
        raise ValueError(f"efficiency.like must be a device of this package: got {quoted(value['like'], 60)}")
    return _efficiency(strict_json.read_file(FOLDER / f"{value['like']}.json")["efficiency"]) | value


# ---- Transfers ----
#
# Ranks are numbered so that tensor-parallel ranks are neighbors, then context-parallel, then data-parallel ones; the
# stages of a pipeline are farthest apart. A transfer within a domain (NVLink, xGMI) and one between domains (RDMA) run
# at the same time, so the slower one counts.


def seconds(link: LinkSpec, num_bytes: float) -> float:
    """A collective of a GPU that sends `num_bytes`, the latency included; 0 if there is nothing to send."""
    return num_bytes / (link.bandwidth * link.share) + link.latency if num_bytes else 0.0


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
