"""Write what was measured as a device file of the planner.

A data sheet states a peak. A CPU has none here, so its peak is the fastest kernel that was measured, and other kernels
have a share of it. A GPU that the package knows keeps the peak of its data sheet, and what was not measured: other
precisions, and the network.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..device import KINDS, parse_device

LINK = {"bandwidth": 1e9, "share": 0.8, "latency": 1e-4}
"""The link of a machine that the package does not know: a guess."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of a device without measuring. devices: of this kind in the machine. known: the value of its device
    file in this package, if any."""

    name: str
    precision: str
    memory_gb: float
    sms: int
    software: str
    devices: int = 1
    known: Mapping[str, Any] | None = None


def device_value(machine: Machine, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of a device file. measured: see `kernels.measure`."""
    rates = {kind: [(flops, flops / seconds) for flops, seconds in measured["curves"][kind]] for kind in KINDS}
    fastest = max(rate for curve in rates.values() for _, rate in curve)
    known = machine.known or {}
    curves = {kind: dict(parse_device(known).curves[kind]) if known else {} for kind in KINDS}
    peak = known.get("peak", {}).get(machine.precision) or fastest
    bandwidth = known.get("memory_bandwidth") or max(measured["copy"], measured["passes"])
    how = f"measured with {machine.software}"
    link = {key: known["domain"][key] for key in LINK} if known else LINK
    link_source = "data sheet" if known else "not measured: a guess; replace it by what your link reaches"
    value = {
        "name": machine.name, "aliases": [], "memory_gb": machine.memory_gb, "memory_bandwidth": bandwidth,
        "sms": machine.sms, "peak": {**known.get("peak", {}), machine.precision: peak},
        "domain": {"gpus": machine.devices, **link}, "network": known.get("network") or link,
        "efficiency": {
            **{kind: curves[kind] | {machine.precision: _shares(rates[kind], peak)} for kind in KINDS},
            "memory": min(1.0, measured["passes"] / bandwidth),
        },
        "launch": measured["launch"],
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


def _shares(rates: Sequence[tuple[float, float]], peak: float) -> list[list[float]]:
    return [[flops, min(1.0, rate / peak)] for flops, rate in rates]
