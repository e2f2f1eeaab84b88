"""One record for several training steps, for `--log-every`."""

import math
from collections.abc import Sequence

Record = dict[str, float]

SUMS = (
    "seconds", "tokens", "reduce_seconds", "reduce_exposed_seconds", "gather_seconds", "gather_exposed_seconds",
    "moved_experts", "data_waits",
)  # fmt: skip
RATES = ("tokens_per_s", "mfu")
LATEST = ("step", "lr", "skipped", "peak_memory_mb")


def merged(records: Sequence[Record]) -> Record:
    """Return the record of an interval from those of its steps.

    Seconds and tokens are sums. Rates are those of the whole interval. The step, the learning rate, the number of
    skipped steps and the peak memory are those of the last step. All other values, such as the loss, are means of the
    finite values, or NaN if none is finite.

    Example: losses [3, NaN, 1] and seconds [1, 1, 2] give a loss of 2 and 4 seconds.
    """
    if len(records) == 1:
        return records[0]
    keys = dict.fromkeys(key for record in records for key in record)
    return {key: _merge(key, records) for key in keys}


def _merge(key: str, records: Sequence[Record]) -> float:
    values = [record[key] for record in records if key in record]
    if key in LATEST:
        return values[-1]
    if key in SUMS:
        return round(sum(values), 4)
    if key in RATES:
        weighted = [(record[key] * record["seconds"], record["seconds"]) for record in records if key in record]
        amounts, seconds = (sum(column) for column in zip(*weighted, strict=True))
        return round(amounts / max(seconds, 1e-9), 4)
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
