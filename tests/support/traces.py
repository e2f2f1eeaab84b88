"""Build events of Chrome traces, and write them to files."""

import json


def kernel(name, start, duration, stream=7, correlation=None, device=0, grid=(1, 1, 1), cat="kernel"):
    arguments = {"device": device, "stream": stream, "grid": list(grid)}
    arguments |= {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "pid": device, "tid": stream,
            "args": arguments}  # fmt: skip


def launch(correlation, at, thread=1, name="cudaLaunchKernel", duration=1):
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": at, "dur": duration, "pid": 9, "tid": thread,
            "args": {"correlation": correlation}}  # fmt: skip


def annotation(name, start, duration, thread=1):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": duration, "pid": 9, "tid": thread}


def operator(name, start, duration, thread=1):
    return annotation(name, start, duration, thread) | {"cat": "cpu_op"}


def write(path, events, **more):
    path.write_text(json.dumps({"schemaVersion": 1, **more, "traceEvents": events, "traceName": "x"}))
    return path
