"""What a rank says of itself while it works: where its main thread is, whether it waits, which process it is.

The main thread must not pay for being watched, so it only assigns: the step, and the action of the schedule. All else
is read off its Python stack from another thread, once a second.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_COLLECTIVES = str(Path(_TORCH, "distributed")) + os.sep


@dataclass(slots=True)
class Progress:
    """Where the main thread is; `step` counts from 1, 0 before the first. Written by it, read by the watch."""

    step: int = 0
    action: object = None
    count: int = 0

    def note(self, action: object) -> None:
        """`action` begins; None: something between actions."""
        self.action = action
        self.count += 1

    def __str__(self) -> str:
        step = f"step {self.step}" if self.step else "the start of the run"
        return step if self.action is None else f"{step}, {self.action}"


@dataclass(frozen=True, slots=True)
class Place:
    """The main thread's place in the code, torch's own left out."""

    text: str
    waiting: bool
    """For other ranks. On CUDA the host waits for the device, which may wait for other ranks: not seen here."""
    exact: tuple[int, int]
    """Differs when the thread has moved."""

    @classmethod
    def now(cls) -> "Place":
        frames = list(_frames(sys._current_frames().get(threading.main_thread().ident or 0)))
        if not frames:
            return cls("its end", False, (0, 0))
        own = next((f for f in frames if not f.f_code.co_filename.startswith(_TORCH)), frames[-1])
        called = frames[: frames.index(own)]
        waiting = own.f_code.co_name == "wait" or any(f.f_code.co_filename.startswith(_COLLECTIVES) for f in called)
        text = f"{Path(own.f_code.co_filename).name}:{own.f_lineno} in {own.f_code.co_name}"
        return cls(text, waiting, (id(frames[0].f_code), frames[0].f_lasti))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@dataclass(frozen=True, slots=True)
class Beat:
    """One sign of life. `home` says which processes can see this one's /proc entry; "" where there is none."""

    count: int
    where: str
    waiting: bool
    ended: bool
    home: str
    pid: int

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: bytes) -> "Beat":
        return cls(**json.loads(text))

    def process_is_gone(self) -> bool:
        """Known for certain, because the process would be visible from here."""
        return bool(self.home) and self.home == home() and not _runs(self.pid)


def home() -> str:
    """The same for two processes exactly if they see each other under the same process ids (Linux; elsewhere "")."""
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
