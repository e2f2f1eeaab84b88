"""What a rank reports about itself: the position of its main thread, whether it waits, and its process id.

Reporting must not slow down the main thread, so it only assigns the current step and action. Another thread reads the
rest from the main thread's Python stack once a second.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

_TORCH = str(Path(torch.__file__).parent) + os.sep
_COLLECTIVES = dist.distributed_c10d.__file__
SAVING = "saving"
"""The action of a main thread that waits for a save."""


@dataclass(slots=True)
class SaveProgress:
    """The disk operation of the thread that writes a checkpoint; "" means none. Only that thread changes it."""

    operation: str = ""
    count: int = 0

    def note(self, operation: str) -> None:
        """Call before each operation, and with "" before the thread waits for other ranks."""
        self.operation = operation
        self.count += 1


@dataclass(slots=True)
class Progress:
    """What the main thread does; only the main thread writes it. `step` counts from 1; 0: before the first step."""

    step: int = 0
    action: object = None
    count: int = 0
    save: SaveProgress = field(default_factory=SaveProgress)

    def note(self, action: object) -> None:
        """Call when `action` begins; None: between actions."""
        self.action = action
        self.count += 1

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Call while the main thread waits for a save."""
        before = self.action
        self.note(SAVING)
        try:
            yield
        finally:
            self.note(before)

    def __str__(self) -> str:
        step = f"step {self.step}" if self.step else "the start of the run"
        return step if self.action is None else f"{step}, {self.action}"


@dataclass(frozen=True, slots=True)
class CodePosition:
    """The line that the main thread executes, outside of torch."""

    text: str
    waiting: bool
    """Whether it waits for other ranks. On CUDA this is unknown: the host waits for the device, not for ranks."""
    instruction: tuple[int, int]
    """Changes when the thread moves."""

    @classmethod
    def of_main_thread(cls) -> "CodePosition":
        frame, frames = sys._current_frames().get(threading.main_thread().ident or 0), []
        while frame is not None:  # from the innermost to the outermost
            frames.append(frame)
            frame = frame.f_back
        if not frames:
            return cls("its end", False, (0, 0))
        own = next((f for f in frames if not f.f_code.co_filename.startswith(_TORCH)), frames[-1])
        called = frames[: frames.index(own)]
        waiting = own.f_code.co_name == "wait" or any(f.f_code.co_filename == _COLLECTIVES for f in called)
        text = f"{Path(own.f_code.co_filename).name}:{own.f_lineno} in {own.f_code.co_name}"
        return cls(text, waiting, (id(frames[0].f_code), frames[0].f_lasti))


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One sign of life. `pid_namespace` identifies the processes that can see this one; "" if unknown.

    saving: the main thread waits for a save, which made progress within the timeout or waits for this rank's own disk.
    """

    count: int
    position: str
    waiting: bool
    saving: bool
    ended: bool
    pid_namespace: str
    pid: int

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: bytes) -> "Heartbeat":
        return cls(**json.loads(text))

    def process_is_gone(self) -> bool:
        """Whether the process has ended. False if this process cannot see it."""
        return bool(self.pid_namespace) and self.pid_namespace == pid_namespace() and not _runs(self.pid)


def pid_namespace() -> str:
    """A text that two processes share if they see each other's process ids. Linux only; elsewhere ""."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")
