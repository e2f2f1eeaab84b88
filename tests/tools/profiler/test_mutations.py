"""Every wrong value at every place of a trace: an error of one line, or a report and valid JSON."""

import json
from itertools import islice

from moe_dualpipe.data import strict_json
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.reports.overlap import traces_text
from moe_dualpipe.tools.profiler.trace import TraceError
from tests.support.mutations import VALUES, check_message, mutations
from tests.support.traces import annotation, kernel, launch, operator

EVENTS = [
    annotation("mlp(F)", 0, 20), launch(1, 5), kernel("gemm", 10, 30, correlation=1), operator("aten::mm", 6, 3),
    kernel("ncclDevKernel", 20, 40, stream=8, correlation=2), launch(2, 8),
]  # fmt: skip
TRACE = {
    "distributedInfo": {"rank": 1}, "deviceProperties": [{"numSms": 132}], "baseTimeNanoseconds": 5_000,
    "host_name": "a", "traceEvents": EVENTS,
}  # fmt: skip


def test_every_wrong_value_in_a_trace_is_refused_or_analyzed(tmp_path):
    path, analyzed = tmp_path / "trace.json", 0
    for _, text in islice(mutations(TRACE, VALUES), 0, None, 13):
        path.write_text(text)
        try:
            found = analyze_files([path])
        except TraceError as error:
            check_message(error)
            assert str(error).startswith(f"{path}: ")
            continue
        analyzed += 1
        report = traces_text(found, phases=True)
        assert all(line.isprintable() and len(line) < 1000 for line in report.splitlines())
        strict_json.parse(strict_json.write(objects := found.as_objects()))
        json.dumps(objects, allow_nan=False)  # without replacing anything
    assert analyzed > 40
