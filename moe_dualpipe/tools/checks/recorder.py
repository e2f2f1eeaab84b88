"""Record every tensor of every segment of a run (overlap/probe.py), so that two runs can be compared tensor by tensor.

A record names the segment, micro-batch and sequences of its tensor. Tensors between dispatch and combine have a row for
each received token; first_difference.py finds these tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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


Rows = Literal["tokens", "copies", "parts"]
"""The rows of a tensor: tokens: each token once. copies: a copy of a token's row for each rank that holds one of its
experts. parts: one row for each such rank, to be summed."""


@dataclass(frozen=True, slots=True)
class Record:
    at: At
    step: int
    micro_batch: int
    sequences: tuple[int, ...]
    rows: Rows
    stage: int
    tensor: Tensor


@dataclass(slots=True)
class _Chunk:
    """What is known of one micro-batch's forward in one module.

    segments: for each segment, its occurrence. received: the storages of the rows that dispatch returned. computed: the
    segments that take them. rows: the kind of rows of each input and output, by segment, is_output and index. seen: all
    recorded tensors.
    """

    segments: dict[int, tuple[int | None, str, int]] = field(default_factory=dict)
    received: set[int] = field(default_factory=set)
    computed: set[int] = field(default_factory=set)
    rows: dict[tuple[int, bool, int], Rows] = field(default_factory=dict)
    seen: set[At] = field(default_factory=set)

    def occurrence(self, at: Observed) -> int:
        if at.segment not in self.segments:
            same = [1 for layer, name, _ in self.segments.values() if (layer, name) == (at.layer, at.name)]
            self.segments[at.segment] = at.layer, at.name, len(same)
        return self.segments[at.segment][2]

    def rows_of(self, at: Observed, tensor: Tensor, spread: bool) -> Rows:
        key = at.segment, at.is_output, at.index
        if at.is_gradient:  # a copy of a row in forward means parts of its gradient in backward, and the reverse
            before = self.rows.get(key, "tokens")
            return "tokens" if before == "tokens" else "parts" if before == "copies" else "copies"
        rows: Rows = "tokens"
        storage = tensor.untyped_storage().data_ptr()
        if spread and at.name == DISPATCH and at.is_output:
            rows = "copies"
            self.received.add(storage)
        elif spread and at.name == COMBINE:
            rows = "tokens" if at.is_output else "parts"
        elif not at.is_output and storage in self.received:
            rows = "copies"
            self.computed.add(at.segment)
        elif at.is_output and at.segment in self.computed:
            rows = "parts"
        self.rows[key] = rows
        return rows


class Recorder:
    """The records of one rank."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._chunks: dict[tuple[int, int, int], _Chunk] = {}

    @contextmanager
    def observe(self, assignment: RankAssignment, stage: int, module: nn.Module) -> Iterator[None]:
        names = [name for name, part in module.named_modules() if isinstance(part, Segmented)]
        forwards = assignment.forwards(stage)

        def see(observed: Observed, tensor: Tensor) -> None:
            chunk = self._chunks.setdefault((stage, observed.module, observed.chunk), _Chunk())
            step, number = divmod(observed.chunk, len(forwards))
            at = At(
                names[observed.module], observed.layer, observed.name, chunk.occurrence(observed), observed.is_output,
                observed.index, observed.is_gradient,
            )  # fmt: skip
            rows = chunk.rows_of(observed, tensor, spread=assignment.variant.ep > 1)
            if at in chunk.seen:
                at = at._replace(recomputed=True)
            chunk.seen.add(at)
            m = forwards[number]
            self.records.append(Record(at, step, m, assignment.micro_batches[m], rows, stage, tensor.detach().clone()))

        with probe(module, see):
            yield
