"""Write small SQLite files like the exports of Nsight Systems. Times in nanoseconds."""

import sqlite3
from contextlib import closing

KERNEL, MEMCPY, MEMSET, GRAPH, RUNTIME = (
    f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "RUNTIME")
)
RANGES = "NVTX_EVENTS"
RANGE, DOMAIN = 59, 75
_TEXTS = {"demangledName", "shortName", "mangledName", "nameId", "textId"}


def process(pid):
    return 1 << 48 | pid << 24


def thread(pid, tid):
    return process(pid) | tid


def kernel(name, start, end, correlation=None, device=0, stream=7, pid=100, grid=(2, 3, 1)):
    return {"start": start, "end": end, "deviceId": device, "streamId": stream, "correlationId": correlation,
            "globalPid": process(pid), "demangledName": name, "gridX": grid[0], "gridY": grid[1], "gridZ": grid[2],
            }  # fmt: skip


def copy(start, end, kind=1, correlation=None, device=0, stream=7, pid=100, size=64, **more):
    return {"start": start, "end": end, "deviceId": device, "streamId": stream, "correlationId": correlation,
            "globalPid": process(pid), "bytes": size, "copyKind": kind, **more}  # fmt: skip


def call(name, start, end, correlation, pid=100, tid=1):
    return {"start": start, "end": end, "globalTid": thread(pid, tid), "correlationId": correlation, "nameId": name}


def nvtx(text, start, end, pid=100, tid=1, domain=0, kind=RANGE, registered=False):
    column = {"textId": text} if registered else {"text": text}
    return {"start": start, "end": end, "globalTid": thread(pid, tid), "domainId": domain, "eventType": kind} | column


def write_export(path, **tables):
    """Write tables, each a list of rows. Only columns that a row has exist. Texts of ids go to StringIds."""
    texts: dict[str, int] = {}
    with closing(sqlite3.connect(path)) as file:
        for table, rows in tables.items():
            columns = [*dict.fromkeys(column for row in rows for column in row)]
            file.execute(f"CREATE TABLE {table} ({', '.join(map(repr, columns))})")
            for row in rows:
                values = [texts.setdefault(row[c], len(texts) + 1) if c in _TEXTS and c in row else row.get(c)
                          for c in columns]  # fmt: skip
                file.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
        file.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        file.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, text) for text, number in texts.items()])
        file.commit()
    return path
