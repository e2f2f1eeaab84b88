"""Leave out single events whose times are impossible: one clock error turns a window of seconds into weeks."""

from typing import TypeVar

from ..trace import DeviceEvent, HostEvent, Trace

OUTLIER = "far from all others in time"
_FEWEST = 10
_MARGIN_US = 3.6e9  # an hour
_TIMES = 100
_Event = TypeVar("_Event", DeviceEvent, HostEvent)


def leave_out_outliers(trace: Trace) -> None:
    """Leave out at most 1% of the device events, and of the operators, at each end, and count them as skipped.

    An outlier is more than an hour, and more than 100 times the duration of all others, away from them.
    """
    trace.device_events = _without(trace.device_events, trace)
    trace.operators = _without(trace.operators, trace)


def _without(events: list[_Event], trace: Trace) -> list[_Event]:
    if len(events) < _FEWEST:
        return events
    if max(event.end for event in events) - min(event.start for event in events) <= _MARGIN_US:
        return events
    starts = sorted(event.start for event in events)
    few = max(1, len(events) // 100)
    first, last = starts[few], starts[-1 - few]
    margin = max(_MARGIN_US, _TIMES * (last - first))
    near = [event for event in events if event.start >= first - margin and event.end <= last + margin]
    if len(events) - len(near) > 2 * few:
        return events
    if len(near) < len(events):
        trace.skipped[OUTLIER] += len(events) - len(near)
    return near
