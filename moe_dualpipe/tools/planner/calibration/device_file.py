"""Write what was measured as a device file of the planner.

A data sheet states a peak. A CPU has none here, so its peak is the fastest kernel that was measured, and other kernels
have a share of it. A GPU that the package knows keeps the peak of its data sheet, and what was not measured: other
precisions, and the network.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..device import KINDS, parse_device


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of a device without measuring. known: the value of its device file in this package, if any."""

    name: str
    precision: str
    memory_gb: float
    sms: int
    software: str
    known: Mapping[str, Any] | None = None


def device_value(machine: Machine, measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the value of a device file. measured: by each process, see `workers.measure`; the median counts."""
    rates = {kind: _rates([one["curves"][kind] for one in measured]) for kind in KINDS}
    fastest = max(rate for curve in rates.values() for _, rate in curve)
    known = machine.known or {}
    curves = {kind: dict(parse_device(known).curves[kind]) if known else {} for kind in KINDS}
    peak = known.get("peak", {}).get(machine.precision) or fastest
    copy, passes = (median(one[key] for one in measured) for key in ("copy", "passes"))
    bandwidth = known.get("memory_bandwidth") or max(copy, passes)
    how = f"measured by {len(measured)} processes at the same time with {machine.software}"
    link, link_source = _link(measured, known, how)
    value = {
        "name": machine.name, "aliases": [], "memory_gb": machine.memory_gb, "memory_bandwidth": bandwidth,
        "sms": machine.sms, "peak": {**known.get("peak", {}), machine.precision: peak},
        "domain": {"gpus": len(measured), **link}, "network": known.get("network") or link,
        "efficiency": {
            **{kind: curves[kind] | {machine.precision: _shares(rates[kind], peak)} for kind in KINDS},
            "memory": min(1.0, passes / bandwidth),
        },
        "launch": median(one["launch"] for one in measured),
        "sources": {
            "peak": "data sheet" if known else f"the fastest kernel {how}", "memory": how,
            "domain": link_source, "network": "data sheet" if known else "the domain: one machine",
            "efficiency": how, "launch": how,
        },
    }  # fmt: skip
    # With six significant digits: measurements have no more.
    value = json.loads(json.dumps(value), parse_float=lambda number: float(f"{float(number):.6g}"))
    parse_device(value)
    return value


def to_text(value: Any) -> str:
    """JSON with each point of a curve on one line."""
    text = json.dumps(value, indent=1)
    return re.sub(r"\[\s+([^\[\],{}]+),\s+([^\[\],{}]+?)\s+\]", r"[\1, \2]", text) + "\n"


def _rates(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float]]:
    """(FLOPs of a launch, FLOP/s), with the median time of all processes."""
    by_size = zip(*curves, strict=True)
    return [(points[0][0], points[0][0] / median(seconds for _, seconds in points)) for points in by_size]


def _shares(rates: Sequence[tuple[float, float]], peak: float) -> list[list[float]]:
    return [[flops, min(1.0, rate / peak)] for flops, rate in rates]


def _link(measured: Sequence[Mapping[str, Any]], known: Mapping[str, Any], how: str) -> tuple[dict[str, float], str]:
    if found := measured[0]["link"]:
        return dict(found), f"between two of them, {how}"
    if known:
        return {key: known["domain"][key] for key in ("bandwidth", "share", "latency")}, "data sheet"
    return {"bandwidth": 1e9, "share": 0.8, "latency": 1e-4}, "not measured: one process; a guess"
