"""The values of a Chrome trace outside of its events: the rank, its process groups, the clock and the GPU.

They stand before the events, behind them, or both. Of a damaged text, each value is read that is undamaged.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from ..trace import Trace
from .damaged import mend

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_KEYS = ("distributedInfo", "deviceProperties", "baseTimeNanoseconds", "host_name", QUEUES)
_DECODE = json.JSONDecoder(strict=False).raw_decode


def describe(texts: Sequence[str], trace: Trace) -> None:
    """Fill in `trace` from the objects in `texts`. Of several values for a key, the first counts."""
    found: dict[str, Any] = {}
    for text in texts:
        found = _values(text) | found
    job, gpus = found.get("distributedInfo"), found.get("deviceProperties")
    if isinstance(job, dict):
        trace.rank, trace.world_size = whole(job.get("rank")), whole(job.get("world_size")) or None
        groups = job.get("pg_config")
        trace.groups = dict(filter(None, map(_group, groups if isinstance(groups, list) else ())))
    if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict):
        trace.num_sms = whole(gpus[0].get("numSms")) or 0
        trace.gpu = str(gpus[0].get("name") or "")
    trace.host = str(found.get("host_name", ""))
    trace.queues = whole(found.get(QUEUES)) or None
    if type(base := found.get("baseTimeNanoseconds")) is int and abs(base) < 2**63:
        trace.base_us = base / 1e3


def whole(value: object) -> int | None:
    """A count or an index, also as a string; None if it is not valid."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**31 else None


def _values(text: str) -> dict[str, Any]:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    if whole_text := mend(text).event:
        return whole_text
    found = {}
    for key in _KEYS:
        if place := re.search(rf'"{key}"\s*:\s*', text):
            try:
                found[key] = _DECODE(text, place.end())[0]
            except (ValueError, RecursionError):
                continue
    return found


def _group(fields: object) -> tuple[str, tuple[int, ...]] | None:
    if not isinstance(fields, dict) or not isinstance(ranks := fields.get("ranks"), list):
        return None
    known = tuple(rank for rank in map(whole, ranks) if rank is not None)
    return (str(fields.get("pg_name", "")), known) if known and len(known) == len(ranks) else None
