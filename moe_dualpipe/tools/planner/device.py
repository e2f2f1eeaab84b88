"""GPUs and CPUs as the planner sees them: peak rates, links, and the share of them that real kernels reach.

A device is a file in devices/, or a file of the user's own in the same format, such as `moe-dualpipe plan calibrate`
writes. Data sheets state the peaks. What a kernel reaches depends on its size: small products do not fill the device.
So each kind of kernel has a curve, FLOPs of one launch -> share of the peak, from published measurements; `sources` in
the file says which. Between two points, the share is interpolated linearly in log(FLOPs); outside, it is constant.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ...data import strict_json
from ...messages import printable, quoted, unknown_name

FOLDER = Path(__file__).parent / "devices"
KINDS = ("product", "grouped", "attention_forward", "attention_backward")

_OBJECT, _NUMBER, _COUNT = "an object", "a positive number", "a positive integer"
_SHARE = "a number above 0 and at most 1"
_CURVE = "a list of [FLOPs, share], with increasing FLOPs and shares above 0 and at most 1"

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
    flash2: float
    """Speed of FlashAttention-2 relative to the attention curves."""
    cpu: str
    """The CPU beside a GPU, a key of the launch seconds in constants.json. Empty: the device is a CPU."""
    sources: Mapping[str, str]
    """Where the numbers come from, by key."""

    @property
    def wide(self) -> str:
        """The precision of what is never computed in 8 bits, such as attention: bf16, or fp32 on a CPU."""
        return "bf16" if self.peak.get("bf16") is not None else next(name for name, rate in self.peak.items() if rate)

    def efficiency(self, kind: str, precision: str, flops: float) -> float:
        """Share of the peak that a launch of `flops` FLOPs reaches.

        kind: one of KINDS. precision: a key of `peak`; attention without a curve for it runs in `wide`, and the share
        is of that peak.

        Example: with the curve [[1e9, 0.2], [1e11, 0.6]], 1e10 FLOPs reach 0.4.
        """
        curves = self.curves[kind]
        if kind.startswith("attention") and precision not in curves:
            precision = self.wide
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
    get = partial(_get, value)
    if not any(rate is not None for rate in get("peak", _OBJECT).values()):
        raise ValueError("peak has no precision with a number")
    efficiency, like = get("efficiency", _OBJECT), None
    if "like" in efficiency:
        if efficiency["like"] not in device_names():
            raise ValueError(f"efficiency.like must be a device of this package: got {quoted(efficiency['like'], 60)}")
        like = load_device(efficiency["like"])
    curves = {
        kind: {name: _curve(value, f"efficiency.{kind}.{name}") for name in get(f"efficiency.{kind}", _OBJECT)}
        for kind in KINDS
        if kind in efficiency or not like
    }
    return Device(
        name=get("name", "a text"), memory_gb=get("memory_gb"), memory_bandwidth=get("memory_bandwidth"),
        memory_share=like.memory_share if like and "memory" not in efficiency else get("efficiency.memory", _SHARE),
        sms=get("sms", _COUNT), peak={name: rate and get(f"peak.{name}") for name, rate in value["peak"].items()},
        domain=_link(value, "domain", get("domain.gpus", _COUNT)), network=_link(value, "network"),
        curves=dict(like.curves if like else {}) | curves, launch=get("launch"),
        flash2=get("efficiency.flash2", _SHARE) if "flash2" in efficiency else like.flash2 if like else 1.0,
        cpu=get("cpu", "a text") if "cpu" in value else "x86",
        sources=get("sources", _OBJECT) if "sources" in value else {},
    )  # fmt: skip


def _link(value: Any, key: str, gpus: int | None = None) -> LinkSpec:
    share = _get(value, f"{key}.share", _SHARE)
    return LinkSpec(_get(value, f"{key}.bandwidth"), share, _get(value, f"{key}.latency"), gpus)


def _curve(value: Any, key: str) -> Curve:
    points = _get(value, key, _CURVE)
    return tuple((float(flops), float(share)) for flops, share in points)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _is_curve(value: Any) -> bool:
    points = value if isinstance(value, list) else []
    if not points or not all(isinstance(p, list) and len(p) == 2 and all(map(_is_number, p)) for p in points):
        return False
    return all(a[0] < b[0] for a, b in pairwise(points)) and all(share <= 1 for _, share in points)


_IS: dict[str, Callable[[Any], bool]] = {
    _OBJECT: lambda value: isinstance(value, dict), "a text": lambda value: isinstance(value, str),
    _NUMBER: _is_number, _SHARE: lambda value: _is_number(value) and value <= 1,
    _COUNT: lambda value: _is_number(value) and value == int(value),
    _CURVE: _is_curve,
}  # fmt: skip


def _get(value: Any, path: str, what: str = _NUMBER) -> Any:
    """The entry at a path of keys, such as "domain.share". what: a key of `_IS`."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not _IS[what](value):
        raise ValueError(f"{path} must be {what}: got {quoted(value, 60)}")
    return value


def _interpolate(curve: Curve, flops: float) -> float:
    after = bisect_right(curve, flops, key=lambda point: point[0])
    if after in (0, len(curve)):
        return curve[min(after, len(curve) - 1)][1]
    (low, share), (high, next_share) = curve[after - 1 : after + 1]
    return share + (next_share - share) * math.log(flops / low) / math.log(high / low)
