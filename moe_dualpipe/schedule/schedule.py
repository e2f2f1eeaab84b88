"""A schedule: a placement and the actions of each rank. It can be compared, hashed, and stored as CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .actions import Action, Forward, Recv, Send, Step, members, parse
from .grid import ScheduleError, grid
from .placement import Placement

_DATA_PARALLEL = re.compile(r"\s*\d+(UNSHARD|RESHARD|REDUCE_GRAD)\s*")  # torch's FSDP actions


@dataclass(frozen=True)
class Schedule:
    """`actions[r]` are the compute actions of rank `r`, in order. `add_comms` derives the transfers from them."""

    name: str = field(compare=False)
    placement: Placement
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    def route_of(self, micro_batch: int) -> tuple[int, ...]:
        """The ranks that compute `micro_batch`, one per stage."""
        return self.placement.route_of(micro_batch, self.num_micro_batches)

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that computes `micro_batch` on `stage`."""
        return self.route_of(micro_batch)[stage]

    def forward_only(self) -> "Schedule":
        """Return the schedule without backwards, for inference."""
        forwards = tuple(
            tuple(member for action in actions for member in members(action) if isinstance(member, Forward))
            for actions in self.actions
        )
        return replace(self, name=f"{self.name}, forward only", actions=forwards)

    def to_csv(self) -> str:
        """Return CSV for torch.distributed.pipelining: one line per rank, one action per cell."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.actions)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> "Schedule":
        """Read the CSV of `to_csv`, or of torch (compute_only or compute_comms). See `from_steps` for errors."""
        return cls.from_steps(steps_from_csv(text), name)

    @classmethod
    def from_steps(cls, steps: Sequence[Sequence[Step]], name: str = "steps") -> "Schedule":
        """Build a schedule from the compute actions of each rank. Transfers are ignored.

        The placement is inferred from the ranks of the forwards. Raises ScheduleError if a forward is missing, or if
        the micro-batches are not divided evenly over the routes in order of id.
        """
        actions = tuple(tuple(step for step in row if not isinstance(step, Send | Recv)) for row in steps)
        try:
            placement, num_micro_batches = _infer_placement(actions)
        except ValueError as error:
            raise ScheduleError(f"{name}: {error}\n{grid(actions)}".rstrip("\n")) from None
        return cls(name, placement, num_micro_batches, actions)


def steps_from_csv(text: str) -> tuple[tuple[Step, ...], ...]:
    """Read the actions and transfers of each rank from CSV, one line per rank.

    Empty cells (bubbles), empty lines and torch's data-parallel actions (0REDUCE_GRAD) are skipped. Raises ValueError,
    with the line and the cell, for any other text.
    """
    rows = []
    lines = csv.reader(io.StringIO(text, newline=""))
    try:
        for cells in lines:
            row = []
            for column, cell in enumerate(cells):
                if cell.strip() and not _DATA_PARALLEL.fullmatch(cell):
                    try:
                        row.append(parse(cell))
                    except ValueError as error:
                        raise ValueError(f"line {lines.line_num}, cell {column + 1}: {error}") from None
            if any(cell.strip() for cell in cells):
                rows.append(tuple(row))
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num}: {error}") from None
    return tuple(rows)


def _infer_placement(rows: Sequence[tuple[Action, ...]]) -> tuple[Placement, int]:
    """Return the placement and the number of micro-batches."""
    forwards = {
        (member.micro_batch, member.stage): rank
        for rank, actions in enumerate(rows)
        for action in actions
        for member in members(action)
        if isinstance(member, Forward)
    }
    if not forwards:
        raise ValueError("the schedule has no forward action")
    num_micro_batches = 1 + max(micro_batch for micro_batch, _ in forwards)
    num_stages = 1 + max(stage for _, stage in forwards)
    routes = []
    for micro_batch in range(num_micro_batches):
        for stage in range(num_stages):
            if (micro_batch, stage) not in forwards:
                raise ValueError(f"micro-batch {micro_batch} has no forward on stage {stage} of {num_stages}")
        routes.append(tuple(forwards[micro_batch, stage] for stage in range(num_stages)))
    placement = Placement(tuple(dict.fromkeys(routes)))
    for micro_batch, route in enumerate(routes):
        if placement.route_of(micro_batch, num_micro_batches) != route:
            raise ValueError(
                f"micro-batch {micro_batch} takes the route {route}, but micro-batches must be divided evenly, "
                f"in order of id, over the {len(placement.routes)} routes"
            )
    return placement, num_micro_batches
