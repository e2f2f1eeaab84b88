"""Name device work after the part of the program that launched it.

Annotations (record_function, NVTX) name the parts of a program. Some are broad: they cover nearly a whole step, such as
"train_step", or a framework writes them around everything. So device work belongs to the innermost annotation that is
not broad, otherwise to a module, otherwise to a broad annotation. A transfer also has the name that its backend
recorded, such as "all_to_allv in ep".
"""

import re
from collections import defaultdict
from collections.abc import Iterable

from ...overlap.labels import letter_of
from .communication import NAMES, Names, group_name
from .trace import DeviceEvent, HostEvent, Trace, innermost
from .windows import is_step

BROAD_SHARE = 0.8
"""An annotation is broad if all with its name cover at least this share of the steps, or of the recording. If nothing
else has a name, it is not broad."""
_WRAPPERS = re.compile(
    r"DistributedDataParallel\.forward$|Torch-Compiled Region|## Call CompiledFxGraph|CUDAGraphNode\."
)
"""Annotations that PyTorch writes around a user's code."""
_INSTANCE = re.compile(r"_\d+$")


class Phases:
    """The parts of the program that launched the device events of `trace`, which may come from `host_as_device`."""

    def __init__(self, trace: Trace, names: Names = NAMES):
        self._names = names
        self._broad = _broad_annotations(trace)
        self._modules = _named_modules(trace.modules)
        self._owners = self._find_owners(trace)

    def owner_of(self, event: DeviceEvent) -> HostEvent | None:
        """The annotation or module that launched `event`; None if unknown."""
        return None if event.correlation is None else self._owners.get(event.correlation)

    def phase_of(self, event: DeviceEvent) -> str:
        """The name of the annotation or module that launched `event`; without one, the name of the transfer, or ""."""
        owner = self.owner_of(event)
        return owner.name if owner else self._transfer_name(event)[0]

    def name_of(self, event: DeviceEvent) -> str:
        """The most telling name of `event`: of its transfer, of its phase unless that is broad, or of the kernel."""
        owner = self.owner_of(event)
        place = owner.name if owner and owner.name not in self._broad else ""
        if letter_of(place):
            return place
        transfer, group = self._transfer_name(event)
        if transfer:
            place = group or place
            return f"{transfer} in {place}" if place else transfer
        return place or event.name

    def is_named(self, event: DeviceEvent) -> bool:
        """Whether a part of the program that is not broad launched `event`."""
        owner = self.owner_of(event)
        return owner is not None and owner.name not in self._broad

    def _transfer_name(self, event: DeviceEvent) -> tuple[str, str]:
        """The recorded name of a transfer and its group; "" for other work, and if none was recorded."""
        if self._names.kind_of(event) != "comm":
            return "", ""
        if (collective := event.collective) is not None:
            return collective.name, group_name(collective)
        return (event.name, "") if event.category == "transfer" else ("", "")

    def _find_owners(self, trace: Trace) -> dict[int, HostEvent]:
        narrow = [event for event in trace.annotations if event.name not in self._broad]
        broad = [event for event in trace.annotations if event.name in self._broad]
        on_thread = trace.innermost_on_thread
        own = on_thread(broad) | on_thread(self._modules) | on_thread(narrow)
        # autograd's thread has no annotations, and the thread that called it waits inside one
        others = [(launch.start, key) for key, launch in trace.launches_of_work() if key not in own]
        return innermost(broad, others) | innermost(narrow, others) | own


def _broad_annotations(trace: Trace) -> set[str]:
    """The names of broad annotations."""
    covered: dict[str, float] = defaultdict(float)
    for event in trace.annotations:
        covered[event.name] += event.end - event.start
    first = min((launch.start for launch in trace.launches.values()), default=0.0)
    last = max((launch.end for launch in trace.launches.values()), default=0.0)
    alone = len(covered) == 1 and not trace.modules
    whole = sum(step.end - step.start for step in trace.steps) or last - first
    return {
        name
        for name, length in covered.items()
        if letter_of(name) is None
        and ((length >= BROAD_SHARE * whole and not alone) or _WRAPPERS.match(name) or is_step(name))
    }


def _named_modules(modules: Iterable[HostEvent]) -> list[HostEvent]:
    """The calls of modules, named after their class and the class of the module around them: "Attention.Linear".

    The numbers of instances are dropped, so that all layers have the same names.
    """
    named: list[HostEvent] = []
    around: dict[tuple[str, str], list[HostEvent]] = defaultdict(list)
    for event in sorted(modules, key=lambda event: (event.start, -event.end)):
        stack = around[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        kind = _INSTANCE.sub("", event.name)
        outer = f"{_INSTANCE.sub('', stack[-1].name)}." if stack else ""
        named.append(event._replace(name=f"{outer}{kind}"))
        stack.append(event)
    return named
