"""Record every tensor of every segment of a run (overlap/probe.py), so that two runs can be compared tensor by tensor.

A record names the segment and the sequences of its tensor. The rows between dispatch and combine of several
expert-parallel ranks belong to other ranks' tokens and are not recorded: the output of combine shows their faults.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from ...overlap import Segmented
from ...overlap.labels import COMBINE, DISPATCH
from ...overlap.probe import Observed, probe
from .run import RankAssignment


class At(NamedTuple):
    """Identifies a tensor of a segment, in the same way in every layout.

    module: the name of the segment's module in the stage; "" is the stage. occurrence: which of the segments of this
    name in the layer. index: which of its inputs or outputs.
    """

    module: str
    layer: int | None
    segment: str
    occurrence: int
    is_output: bool
    index: int
    is_gradient: bool = False
    recomputed: bool = False

    def __str__(self) -> str:
        kind = ("output" if self.is_output else "input") + " gradient" * self.is_gradient
        layer = "" if self.layer is None else f"layer {self.layer}, "
        which = f" number {self.occurrence + 1}" if self.occurrence else ""
        return f"{layer}segment {self.segment}{which}, {'recomputed ' * self.recomputed}{kind} {self.index}"


@dataclass(frozen=True, slots=True)
class Record:
    at: At
    step: int
    sequences: tuple[int, ...]
    tensor: Tensor


@dataclass(slots=True)
class _Chunk:
    """What is known of one micro-batch's forward in one module.

    segments: for each segment, its occurrence. received: the storages of the rows that dispatch returned. computed: the
    segments that take them. seen: all recorded tensors.
    """

    segments: dict[int, tuple[int | None, str, int]] = field(default_factory=dict)
    received: set[int] = field(default_factory=set)
    computed: set[int] = field(default_factory=set)
    seen: set[At] = field(default_factory=set)

    def occurrence(self, at: Observed) -> int:
        if at.segment not in self.segments:
            same = [1 for layer, name, _ in self.segments.values() if (layer, name) == (at.layer, at.name)]
            self.segments[at.segment] = at.layer, at.name, len(same)
        return self.segments[at.segment][2]

    def is_received(self, at: Observed, tensor: Tensor) -> bool:
        """Whether the rows are those that dispatch returned, or what is computed from them until combine."""
        storage = tensor.untyped_storage().data_ptr()
        if at.name == DISPATCH and at.is_output:
            self.received.add(storage)
            return True
        if at.name == COMBINE:
            return not at.is_output
        if not at.is_output and storage in self.received:
            self.computed.add(at.segment)
        return at.segment in self.computed


class Recorder:
    """The records of one rank."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._chunks: dict[tuple[int, int, int], _Chunk] = {}

    @contextmanager
    def observe(self, place: RankAssignment, stage: int, module: nn.Module) -> Iterator[None]:
        names = [name for name, part in module.named_modules() if isinstance(part, Segmented)]
        forwards = place.forwards(stage)

        def see(observed: Observed, tensor: Tensor) -> None:
            chunk = self._chunks.setdefault((stage, observed.module, observed.chunk), _Chunk())
            step, number = divmod(observed.chunk, len(forwards))
            at = At(
                names[observed.module], observed.layer, observed.name, chunk.occurrence(observed), observed.is_output,
                observed.index, observed.is_gradient,
            )  # fmt: skip
            if place.variant.ep > 1 and chunk.is_received(observed, tensor):
                return
            if at in chunk.seen:
                at = at._replace(recomputed=True)
            chunk.seen.add(at)
            sequences = place.micro_batches[forwards[number]]
            self.records.append(Record(at, step, sequences, tensor.detach().clone()))

        with probe(module, see):
            yield
