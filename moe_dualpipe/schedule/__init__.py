"""Pipeline schedules as values: build, validate, simulate, read and write. Standard library only.

>>> from moe_dualpipe.schedule import build, validate
>>> schedule = validate(build("dualpipev", num_ranks=1, num_micro_batches=2))
>>> print(*schedule.actions[0])
0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1
"""

from .actions import Action, Backward, Flow, Forward, Overlap, Part, Recv, Send, Step, members, parse
from .bound import least_time, least_times
from .build import (
    NAMES,
    build,
    check_micro_batches,
    check_numbers,
    default_micro_batches,
    default_schedule,
    placement_of,
)
from .comms import add_comms, counterpart, receive_early
from .filled import FILL, Memory, fill
from .grid import ScheduleError, grid
from .placement import Placement
from .schedule import Schedule, steps_from_csv
from .simulate import Costs, simulate
from .timeline import Held, Timeline
from .validate import validate, validate_transfers
from .walk import DeadlockError, Span

__all__ = [
    "FILL", "NAMES", "Action", "Backward", "Costs", "DeadlockError", "Flow", "Forward", "Held", "Memory", "Overlap",
    "Part", "Placement", "Recv", "Schedule", "ScheduleError", "Send", "Span", "Step", "Timeline", "add_comms", "build",
    "check_micro_batches", "check_numbers", "counterpart", "default_micro_batches", "default_schedule", "fill", "grid",
    "least_time", "least_times", "members", "parse", "placement_of", "receive_early", "simulate", "steps_from_csv",
    "validate", "validate_transfers",
]  # fmt: skip
