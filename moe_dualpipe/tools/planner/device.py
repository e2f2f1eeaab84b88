"""GPUs and CPUs as the planner sees them: peak rates, links, and the share of them that real kernels reach.

A device is a file in devices/, or a file of the user's own in the same format, such as `moe-dualpipe plan calibrate`
writes. Data sheets state the peaks. What a kernel reaches depends on its size: small products do not fill the device.
So each kind of kernel has a curve, FLOPs of one launch -> share of the peak, from published measurements; `sources` in
the file says which. Between two points, the share is interpolated linearly in log(FLOPs); outside, it is constant.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ...data import strict_json
from ...messages import printable, quoted, unknown_name

FOLDER = Path(__file__).parent / "devices"
KINDS = ("product", "grouped", "attention_forward", "attention_backward")

Precision = Literal["bf16", "fp8", "mxfp8", "fp32"]
Curve = tuple[tuple[float, float], ...]
"""Points (FLOPs of one launch, share of the peak), with increasing FLOPs."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What connects the devices of a domain, or the domains."""

    bandwidth: float
    """Bytes per second that one device sends, by the data sheet; as much is received at the same time."""
    share: float
    """Share of the bandwidth that collectives reach with large messages."""
    latency: float
    """Seconds that a collective takes with an empty message."""
    gpus: int | None = None
    """Devices that the link connects. None: any number."""


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU, or a core of a CPU, with its links. All rates are per device, in one direction."""

    name: str
    memory_gb: float
    """Memory in 10^9 bytes."""
    memory_bandwidth: float
    """Bytes per second, read and written together."""
    memory_share: float
    """Share of `memory_bandwidth` that element-wise kernels reach."""
    sms: int
    """Streaming multiprocessors or compute units."""
    peak: Mapping[str, float | None]
    """FLOP/s of dense products by precision. None: the device does not compute in this precision."""
    domain: LinkSpec
    """Devices connected by NVLink or xGMI, or processes of one machine."""
    network: LinkSpec
    """What connects the domains."""
    curves: Mapping[str, Mapping[str, Curve]]
    """Curves by kind of kernel and precision."""
    launch: float
    """Seconds from one short kernel to the next."""
    sources: Mapping[str, str]
    """Where the numbers come from, by key."""

    @property
    def wide(self) -> str:
        """The precision of what is never computed in 8 bits, such as attention: bf16, or fp32 on a CPU."""
        return "bf16" if self.peak.get("bf16") is not None else next(name for name, rate in self.peak.items() if rate)

    def efficiency(self, kind: str, precision: str, flops: float) -> float:
        """Share of the peak that a launch of `flops` FLOPs reaches.

        kind: one of KINDS. precision: a key of `peak`; attention without a curve for it runs in `wide`, and the share
        is of that peak. Raises ValueError if the device does not compute in this precision.

        Example: with the curve [[1e9, 0.2], [1e11, 0.6]], 1e10 FLOPs reach 0.4.
        """
        curves = self.curves[kind]
        if kind.startswith("attention") and precision not in curves:
            precision = self.wide
        if self.peak.get(precision) is None or precision not in curves:
            able = [name for name, rate in self.peak.items() if rate is not None and name in curves]
            raise ValueError(f"{self.name} does not compute in {printable(precision, 40)}: choose {' or '.join(able)}")
        return _interpolate(curves[precision], flops)


def device_names() -> list[str]:
    """The names of the devices in this package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_device(name: str | Path) -> Device:
    """Return the device of this name or alias, or the one in this file. Raises ValueError."""
    text = str(name)
    if "/" in text or text.endswith(".json"):
        return _read(Path(name))
    key = text.lower().replace("_", "-").replace(" ", "-")
    if (FOLDER / f"{key}.json").is_file():
        return _read(FOLDER / f"{key}.json")
    aliases = _aliases()
    if key not in aliases:
        hint = "; or give a file, such as ./my_gpu.json"
        raise ValueError(f"{unknown_name('device', text, device_names(), aliases)}{hint}")
    return _read(FOLDER / f"{aliases[key]}.json")


@cache
def _aliases() -> dict[str, str]:
    return {
        alias: name for name in device_names() for alias in strict_json.read_file(FOLDER / f"{name}.json")["aliases"]
    }


def _read(path: Path) -> Device:
    value = strict_json.read_named(path)
    try:
        return parse_device(value)
    except ValueError as error:
        raise ValueError(f"{printable(path)} is not a device file: {error}") from None


def parse_device(value: Any) -> Device:
    """Return the device in the value of a JSON file. Raises ValueError, which names the key."""
    peaks = _dict(value, "peak")
    if not any(rate is not None for rate in peaks.values()):
        raise ValueError("peak has no precision with a number")
    peak = {name: None if peaks[name] is None else _number(peaks, "peak", name) for name in peaks}
    efficiency = _dict(value, "efficiency")
    curves, share = {}, None
    if "like" in efficiency:
        if (like := efficiency["like"]) not in device_names():
            raise ValueError(f"efficiency.like must be a device of this package: got {quoted(like, 60)}")
        other = load_device(like)
        curves, share = dict(other.curves), other.memory_share
    curves |= _curves(efficiency, [kind for kind in KINDS if kind in efficiency or kind not in curves])
    if "memory" in efficiency or share is None:
        share = _share(efficiency, "efficiency", "memory")
    if not isinstance(name := value.get("name"), str):
        raise ValueError(f"name must be a text: got {quoted(name, 60)}")
    return Device(
        name=name, memory_gb=_number(value, "", "memory_gb"), memory_bandwidth=_number(value, "", "memory_bandwidth"),
        memory_share=share, sms=_count(value, "", "sms"), peak=peak, domain=_link(value, "domain"),
        network=_link(value, "network"), curves=curves, launch=_number(value, "", "launch"),
        sources=_dict(value, "sources") if "sources" in value else {},
    )  # fmt: skip


def _curves(efficiency: dict[str, Any], kinds: Any) -> dict[str, dict[str, Curve]]:
    return {
        kind: {precision: _curve(points, f"efficiency.{kind}.{precision}") for precision, points in curves.items()}
        for kind in kinds
        for curves in [_dict(efficiency, kind, "efficiency.")]
    }


def _curve(points: Any, key: str) -> Curve:
    try:
        curve = tuple((float(flops), float(share)) for flops, share in points)
    except (TypeError, ValueError):
        raise ValueError(f"{key} must be a list of [FLOPs, share]: got {quoted(points, 60)}") from None
    flops = [point[0] for point in curve]
    if not curve or flops[0] <= 0 or any(a >= b for a, b in pairwise(flops)):
        raise ValueError(f"{key} needs one point or more, of positive and increasing FLOPs: got {quoted(points, 60)}")
    if not all(0 < share <= 1 for _, share in curve):
        raise ValueError(f"{key} has a share that is not above 0 and at most 1: got {quoted(points, 60)}")
    return curve


def _link(value: Any, key: str) -> LinkSpec:
    link = _dict(value, key)
    gpus = _count(link, key, "gpus") if key == "domain" else None
    return LinkSpec(_number(link, key, "bandwidth"), _share(link, key, "share"), _number(link, key, "latency"), gpus)


def _dict(value: Any, key: str, above: str = "") -> dict[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{above}{key} must be an object: got {quoted(found, 60)}")
    return found


def _number(value: dict[str, Any], above: str, key: str) -> float:
    number = value.get(key)
    if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
        raise ValueError(f"{above}{'.' if above else ''}{key} must be a positive number: got {quoted(number, 60)}")
    return float(number)


def _share(value: dict[str, Any], above: str, key: str) -> float:
    if (share := _number(value, above, key)) > 1:
        raise ValueError(f"{above}.{key} must be at most 1: got {quoted(share, 60)}")
    return share


def _count(value: dict[str, Any], above: str, key: str) -> int:
    number = _number(value, above, key)
    if number != int(number):
        raise ValueError(f"{above}{'.' if above else ''}{key} must be an integer: got {quoted(number, 60)}")
    return int(number)


def _interpolate(curve: Curve, flops: float) -> float:
    after = bisect_right(curve, flops, key=lambda point: point[0])
    if after in (0, len(curve)):
        return curve[min(after, len(curve) - 1)][1]
    (low, share), (high, next_share) = curve[after - 1 : after + 1]
    return share + (next_share - share) * math.log(flops / low) / math.log(high / low)
