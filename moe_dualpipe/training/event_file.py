"""Write scalars for TensorBoard to an event file.

torch's SummaryWriter writes from a thread of the tensorboard package. If the disk is full, that thread ends with a
traceback, the numbers in its queue are lost, and the next call raises. So this module writes the file itself, in the
same way as metrics.jsonl.
"""

import io
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
from tensorboard.summary.writer.record_writer import RecordWriter

from .appended_file import AppendedFile


class EventFile:
    """A new event file in `folder`. TensorBoard ignores the events of older files from `first_step` on."""

    def __init__(self, folder: Path, first_step: int):
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = AppendedFile(folder / name)
        start = SessionLog(status=SessionLog.START)
        self._append(file_version="brain.Event:2")
        self._append(step=first_step, session_log=start)

    def write(self, step: int, **record: object) -> None:
        """Append the numbers of `record` as scalars."""
        scalars = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        if values:
            self._append(step=step, summary=Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _append(self, **event: object) -> None:
        framed = io.BytesIO()
        RecordWriter(framed).write(Event(wall_time=time.time(), **event).SerializeToString())  # type: ignore[arg-type]
        self._file.append(framed.getvalue())
