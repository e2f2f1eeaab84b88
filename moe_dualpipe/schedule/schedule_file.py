"""Read a schedule from a CSV file in the format of torch.distributed.pipelining, and check it."""

from pathlib import Path

from ..messages import printable
from .actions import Recv, Send
from .schedule import Schedule, steps_from_csv
from .validate import validate, validate_transfers

MAX_BYTES = 1 << 26


def is_file_name(name: str) -> bool:
    """Whether `name` is that of a file, and not that of a schedule."""
    return name.lower().endswith(".csv")


def read_schedule(path: Path) -> tuple[Schedule, int]:
    """Return the schedule in the file and the number of its transfers, both validated.

    Raises ValueError, with the line and the cell, if the file is not a schedule; ScheduleError if it may hang;
    OSError for one that cannot be read.
    """
    if path.is_fifo() or path.is_char_device() or (path.is_file() and path.stat().st_size > MAX_BYTES):
        raise ValueError(f"{printable(path)} is not a file of at most {MAX_BYTES:,} bytes")
    try:
        steps = steps_from_csv(path.read_text(encoding="utf-8-sig"))  # without the byte order mark of spreadsheets
    except ValueError as error:
        raise ValueError(
            f"{printable(path)}: {'not a text file' if isinstance(error, UnicodeDecodeError) else error}"
        ) from None
    if not any(steps):
        raise ValueError(f"{printable(path)} has no actions: write one line for each rank, such as 0F0,0F1,0B0,0B1")
    schedule = validate(Schedule.from_steps(steps, name=printable(path.name)))
    transfers = sum(isinstance(step, Send | Recv) for row in steps for step in row)
    if transfers:
        validate_transfers(schedule, steps)
    return schedule, transfers
