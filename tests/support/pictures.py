"""Pictures of short descriptions of work."""

from moe_dualpipe.tools.profiler.account import account
from moe_dualpipe.tools.profiler.communication import NAMES
from moe_dualpipe.tools.profiler.host import as_device
from moe_dualpipe.tools.profiler.pictures.picture import Picture
from moe_dualpipe.tools.profiler.trace import DeviceEvent, HostEvent, Trace

HOST = "9", "1"


def picture(*works, shift=0.0, title="title"):
    """works: name, start, end and, if known, phase and stream. Equal phases in a row are one annotation."""
    trace, before = Trace(), ""
    for number, (name, start, end, *more) in enumerate(works):
        phase, stream = (*more, "", "7")[:2] if len(more) < 2 else more
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        trace.device_events.append(DeviceEvent(name, category, start, end, "0", stream, number, 1))
        trace.launches[number] = HostEvent("cudaLaunchKernel", 10 * number + 1, 10 * number + 2, HOST)
        if phase and phase == before:
            trace.annotations[-1] = trace.annotations[-1]._replace(end=10 * number + 9)
        elif phase:
            trace.annotations.append(HostEvent(phase, 10 * number, 10 * number + 9, HOST))
        before = phase
    trace = as_device(trace, NAMES)
    return Picture(title, sorted(trace.device_events, key=lambda event: event.start), shift, account(trace))
