"""Name device work after the part of the program that launched it.

Annotations (record_function, NVTX) name the parts of a program. Some are broad: they cover nearly a whole step, such as
"train_step", or a framework writes them around everything. So device work belongs to the innermost annotation that is
not broad, otherwise to a module, otherwise to a broad annotation. A transfer also has the name that its backend
recorded, such as "all_to_allv in ep".
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from ...overlap.labels import letter_of
from .communication import Names
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


def named(trace: Trace, names: Names) -> list[DeviceEvent]:
    """The device events with their kinds, and the parts of the program that launched them."""
    broad = _broad_annotations(trace)
    owners = _owners(trace, broad)
    found = []
    for event in trace.device_events:
        owner = None if event.correlation is None else owners.get(event.correlation)
        is_named = owner is not None and owner.name not in broad
        found.append(event._replace(kind=names.kind_of(event), owner=owner, is_named=is_named))
    return found


def _owners(trace: Trace, broad: Collection[str]) -> dict[int, HostEvent]:
    """The annotation or module around each launch. broad: names of annotations."""
    on_thread, modules = trace.innermost_on_thread, _named_modules(trace.modules)
    narrow = [event for event in trace.annotations if event.name not in broad]
    around = [event for event in trace.annotations if event.name in broad]
    own = on_thread(around) | on_thread(modules) | on_thread(narrow)
    # autograd's thread has no annotations, and the thread that called it waits inside one
    others = [(launch.start, key) for key, launch in trace.launches_of_work() if key not in own]
    return innermost(around, others) | innermost(narrow, others) | own


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
