"""The NVTX ranges in an export of Nsight Systems.

Ranges of users are annotations. Those of NCCL name transfers; those of other libraries of NVIDIA say nothing about the
program. `torch.autograd.profiler.emit_nvtx` writes a range for each operator too, such as "aten::mm, op_id = 5": these
are left out, as in traces of torch.profiler, and only what a user, a framework or a custom autograd function named
stays.
"""

import re
import sys
from collections import defaultdict

from ..trace import HostEvent, Trace
from .kineto import NO_TIME, TRANSFER, add_annotation
from .nsys_tables import Tables, process_id, thread_of

TABLE = "NVTX_EVENTS"
_DOMAIN_CREATED = 75  # ENUM_NSYS_EVENT_TYPE
_EMITTED = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = .*", re.DOTALL)
_OPERATOR = re.compile(r"[a-z_][\w.]*::")
_NCCL = re.compile(r"p?nccl(?=[A-Z])")
_NCCL_TRANSFERS = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast", "Bcast": "broadcast", "Reduce": "reduce", "Send": "send", "Recv": "recv",
    "AlltoAll": "all_to_all", "AllToAll": "all_to_all", "Gather": "gather", "Scatter": "scatter",
}  # fmt: skip
_LIBRARY = re.compile(r"(?:NCCL|CCCL|NVSHMEM|cu[A-Z]\w*)$")
"""Names of NVTX domains of libraries."""


def add_ranges(trace: Trace, tables: Tables, names: dict[int, str]) -> None:
    """Add the ranges to `trace`. A range that never ended is left out."""
    domains, emitted = _library_domains(tables, names), defaultdict[tuple[str, str], list[HostEvent]](list)
    for start, end, identifier, text, text_id, domain in tables.rows(
        TABLE, "start", "end", "globalTid", "text", "textId", "domainId"
    ):
        trace.num_events += 1
        if end is None:
            continue
        if not (isinstance(start, int) and isinstance(end, int) and start <= end):
            trace.skipped[NO_TIME] += 1
            continue
        full = str(text if text is not None else names.get(text_id, ""))
        if not full:
            continue
        name = sys.intern(_EMITTED.sub("", full))
        event = HostEvent(name, start / 1e3, end / 1e3, thread_of(identifier))
        if library := _NCCL.match(name):
            if (transfer := _NCCL_TRANSFERS.get(name[library.end() :])) is not None:
                trace.transfers.append(event._replace(name=f"nccl:{transfer}"))
        elif (process_id(identifier), domain) in domains:
            continue
        elif len(name) < len(full):
            emitted[event.thread].append(event)
        else:
            add_annotation(trace, event)
    for events in emitted.values():
        _add_emitted(trace, events)


def _add_emitted(trace: Trace, events: list[HostEvent]) -> None:
    """Add the ranges of one thread that emit_nvtx wrote, without operators and what is inside these."""
    until = float("-inf")
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        if TRANSFER.match(event.name):
            trace.transfers.append(event)
        elif event.start >= until:
            if _OPERATOR.match(event.name):
                until = event.end
            else:
                add_annotation(trace, event)


def _library_domains(tables: Tables, names: dict[int, str]) -> set[tuple[int, int]]:
    """The processes and ids of the domains of libraries. A domain's creation is an event without an end."""
    created = tables.rows(TABLE, "end", "globalTid", "text", "textId", "domainId", "eventType")
    return {
        (process_id(identifier), domain)
        for end, identifier, text, text_id, domain, kind in created
        if end is None and kind == _DOMAIN_CREATED and _LIBRARY.match(str(text or names.get(text_id, "")))
    }
