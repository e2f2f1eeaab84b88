"""Build the lanes of a device from short descriptions of its work."""

from typing import Any, NamedTuple

import numpy as np

from moe_dualpipe.tools.profiler.lanes import Lanes
from moe_dualpipe.tools.profiler.trace import Collective


class Work(NamedTuple):
    """One device event. Works in a row with one `phase` and no others between them are one occurrence."""

    name: str
    start: float
    end: float
    lane: int = 0
    phase: str = ""
    category: str = "GEMM"
    stream: str = "7"
    row: int = 0
    collective: Collective | None = None
    bytes: int = 0


def lanes_of(*works: Work, memory: tuple[tuple[float, float, float], ...] = ()) -> Lanes:
    works = tuple(sorted(works, key=lambda work: work.start))

    def indexed(values: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        index = list(dict.fromkeys(value for value in values if value is not None))
        return np.array([-1 if v is None else index.index(v) for v in values], dtype=np.int64), tuple(index)

    latest: dict[tuple[int, int], tuple[int, str] | None] = {}
    occurrences: list[tuple[int, str] | None] = []
    for work in works:
        last = latest.get((work.lane, work.row))
        again = last is not None and last[1] == work.phase
        occurrences.append(None if not work.phase else last if again else (len(occurrences), work.phase))
        latest[work.lane, work.row] = occurrences[-1]
    name, names = indexed([work.name for work in works])
    stream, streams = indexed([work.stream for work in works])
    category, categories = indexed([work.category for work in works])
    phase, phases = indexed(occurrences)
    collective, collectives = indexed([work.collective for work in works])
    columns = [np.array([getattr(work, key) for work in works]) for key in ("start", "end", "lane", "row", "bytes")]
    start, end = (column.astype(np.float64) for column in columns[:2])
    lane, row, size = (column.astype(np.int64) for column in columns[2:])
    return Lanes(
        start, end, lane, row, name, stream, category, phase, collective, size, names, streams, categories,
        tuple(text for _, text in phases), collectives, np.array(memory, dtype=np.float64).reshape(-1, 3),
    )  # fmt: skip
