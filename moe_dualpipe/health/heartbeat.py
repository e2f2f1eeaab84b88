"""What a rank reports about itself: the position of its main thread, whether it waits, and its process id.

Reporting must not slow down the main thread. So the main thread only assigns attributes: the step and the phase of the
run in `Progress`, the segment in the engine, and a wait for a pipeline rank in the links. The watchdog's thread reads
them at each check, with the line of code from the main thread's Python stack, and makes a `Heartbeat` of them.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..messages import list_ranks
from ..overlap.engine import Engine
from ..overlap.labels import PREPARE, in_words, segment_name, without_wait
from ..overlap.waits import is_marked
from ..runtime.p2p import P2P
from ..schedule import Flow, Send

_TORCH = str(Path(torch.__file__).parent) + os.sep
_COLLECTIVES = dist.distributed_c10d.__file__
SAVING = "checkpoint"
"""The phase of a main thread that waits for a save."""


@dataclass(slots=True)
class Progress:
    """What this process does. The main thread writes it, except the operation of a save, and the watchdog reads it.

    step: counts from 1; 0 before the first step. phase: the collective part of the run, such as "gradients"; "" outside
    of them. phases: how many began or ended so far, the same on all ranks at the same place. action: of the pipeline.
    count: notes so far. groups: the ranks that take part in a transfer of segments, by its name.
    saving: the disk operation of the thread that writes a checkpoint; "" if none. saves: operations so far.
    """

    step: int = 0
    phase: str = ""
    phases: int = 0
    action: object = None
    count: int = 0
    saving: str = ""
    saves: int = 0
    engine: Engine | None = None
    links: P2P | None = None
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    _segments_before: int = 0

    def watch(self, engine: Engine, links: P2P, groups: Mapping[str, tuple[int, ...]]) -> None:
        """Read the segment that runs from `engine`, and waits for other pipeline ranks from `links`."""
        self.engine, self.links, self.groups = engine, links, groups

    def note(self, action: object) -> None:
        """Call when `action` begins; None: between actions."""
        self.action = action
        self.count += 1

    def note_save(self, operation: str) -> None:
        """Call before each disk operation of a save, and with "" before its thread waits for other ranks."""
        self.saving = operation
        self.saves += 1

    def begin(self, step: int) -> None:
        """Call when a step begins."""
        self.step = step
        self._enter("")

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Call while the main thread is in `phase`, which all ranks go through."""
        outer = self.phase
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(outer)

    def _enter(self, phase: str) -> None:
        self.phase, self._segments_before = phase, self.engine.started if self.engine else 0
        self.phases += 1
        self.count += 1

    @property
    def place(self) -> tuple[object, ...]:
        """Changes when the main thread starts something else, and when a save advances."""
        engine = (self.engine.started, self.engine.running) if self.engine else ()
        return self.count, *engine, self.links and self.links.steps.waiting, self.saves

    @property
    def order(self) -> tuple[int, int]:
        """See `Heartbeat`."""
        return self.phases, self.engine.started - self._segments_before if self.engine else 0

    @property
    def segment(self) -> str:
        """The segment that runs, in words, such as "mlp forward of layer 3"; "" if none."""
        if self.engine is None or (running := self.engine.running) is None:
            return ""
        return _of_layer(*running)

    def __str__(self) -> str:
        step = f"step {self.step}" if self.step else "the start of the run"
        action = "" if self.action is None else str(self.action)
        operation = self.saving if self.phase == SAVING else ""
        return ", ".join(filter(None, [step, self.phase, operation, action, self.segment]))


@dataclass(frozen=True, slots=True)
class CodePosition:
    """The line that the main thread executes, outside of torch.

    waiting: whether it waits for other ranks. Unknown, and false, on CUDA, where the host waits only for the device.
    instruction: changes when the thread moves.
    """

    text: str
    waiting: bool
    instruction: tuple[int, int]

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
        in_collective = any(frame.f_code.co_filename == _COLLECTIVES for frame in called)
        waiting = in_collective or any(is_marked(frame.f_code) for frame in frames)
        text = f"{Path(own.f_code.co_filename).name}:{own.f_lineno} in {own.f_code.co_name}"
        return cls(text, waiting, (id(frames[0].f_code), frames[0].f_lasti))


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a rank reports about itself at each check.

    position: the step, the action and the line of code. waiting: see `CodePosition`. seconds: time in this place.
    transfer: describes the current transfer or collective; "" if none is known. peer: the rank at the other end of a
    point-to-point transfer. group: the ranks that take part in a collective; empty: all.
    order: the number of phases so far, comparable between all ranks, and the number of segments since the last phase
    began, comparable between the ranks of a `group`.
    count: checks so far. ended: the rank is leaving. saving: the main thread waits for a save, which made progress
    within the timeout or waits for this rank's own disk.
    pid_namespace: identifies the processes that can see this one; "" if unknown.
    """

    position: str
    waiting: bool = False
    seconds: float = 0.0
    transfer: str = ""
    peer: int | None = None
    group: tuple[int, ...] = ()
    order: tuple[int, int] = (0, 0)
    count: int = 0
    ended: bool = False
    saving: bool = False
    pid_namespace: str = ""
    pid: int = 0

    @classmethod
    def of(cls, progress: Progress, code: CodePosition, seconds: float, **others: Any) -> "Heartbeat":
        """The report of this process. others: the fields that neither `progress` nor `code` tells."""
        transfer, peer, group = "", None, ()
        waiting = code.waiting and not (progress.phase == SAVING and progress.saving)
        running = progress.engine.running if progress.engine else None
        if progress.links and (wait := progress.links.steps.waiting):
            step, peer = wait
            what = "activations" if step.flow is Flow.ACTIVATION else "gradients"
            whose = f"sending {what} of" if isinstance(step, Send) else f"{what} for"
            transfer = f"{whose} stage {step.stage}, micro-batch {step.micro_batch}"
        elif running and (group := progress.groups.get(segment_name(running[0]), ())):
            transfer = _of_layer(without_wait(running[0]).removeprefix(PREPARE), running[1])
        elif progress.phase and progress.action is None:
            transfer = f"{progress.phase} of step {progress.step}" if progress.step else progress.phase
        elif waiting:
            transfer = f"a collective operation, {code.text}"
        position = f"{progress} ({code.text})"
        own = cls(position, waiting, seconds, transfer, peer, group, progress.order)
        return replace(own, pid_namespace=pid_namespace(), pid=os.getpid(), **others)

    def process_is_gone(self) -> bool:
        """Whether the process has ended. False if this process cannot see it."""
        return bool(self.pid_namespace) and self.pid_namespace == pid_namespace() and not _runs(self.pid)


def _of_layer(label: str, layer: int | None) -> str:
    """A segment or transfer in words, such as "mlp forward of layer 3"."""
    return in_words(label) + ("" if layer is None else f" of layer {layer}")


@cache
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


# ---- Who waits for whom ----
#
# In a point-to-point transfer, a rank waits for the rank at the other end. In a collective, it waits for every rank of
# the group that has not reached the collective. All ranks go through the same parts of the run in the same order, so a
# rank with a lower `order` has not reached it.

Wait = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks that a rank waits for; if there are none, the ranks that went on without this transfer."""


def find_wait(rank: int, beats: Mapping[int, Heartbeat], others: set[int]) -> Wait | None:
    """The wait of one rank; None if it is busy. beats: of the running ranks. others: ranks that do not run any more."""
    own = beats[rank]
    if not own.transfer:
        return None
    if own.peer is not None:
        return (own.peer,), ()
    members = [other for other in (own.group or sorted({*beats, *others})) if other != rank]
    depth = 2 if own.group else 1
    orders = {other: beats[other].order[:depth] for other in members if other not in others}
    here = own.order[:depth]
    if missing := [other for other in members if other in others or orders[other] < here]:
        return tuple(missing), ()
    if not own.waiting:
        return None
    busy = tuple(other for other in members if orders[other] == here and not beats[other].waiting)
    return busy, tuple(other for other in members if not busy and orders[other] > here)


def describe_waits(beats: Mapping[int, Heartbeat | None]) -> list[str]:
    """One line for all ranks that wait for the same thing, then one for each other rank that these lines name.

    beats: the last heartbeat of each rank; None if it does not answer.
    """
    running = {rank: beat for rank, beat in beats.items() if beat is not None and not beat.ended}
    found = {rank: find_wait(rank, running, beats.keys() - running) for rank in sorted(running)}
    waits = {rank: wait for rank, wait in found.items() if wait is not None}
    alike: dict[tuple[str, Wait], list[int]] = {}
    for rank, wait in waits.items():
        alike.setdefault((running[rank].transfer, wait), []).append(rank)
    lines = []
    for (transfer, (awaited, passed)), ranks in alike.items():
        who = f"{list_ranks(ranks)} wait{'s' * (len(ranks) == 1)}"
        during = f"{transfer} (for {max(running[rank].seconds for rank in ranks):.0f} s)"
        if awaited:
            lines.append(f"{who} for {list_ranks(awaited)}: {during}")
        else:
            others = f"{list_ranks(passed)} went on without it" if passed else "all its ranks have arrived"
            lines.append(f"{who} in {during}; {others}")
    named = {other for awaited, passed in waits.values() for other in awaited + passed}
    return lines + [f"rank {rank}: {_activity(beats[rank])}" for rank in sorted(named - waits.keys())]


def _activity(beat: Heartbeat | None) -> str:
    if beat is None:
        return "no sign of life"
    return f"has ended in {beat.position}" if beat.ended else f"in {beat.position} for {beat.seconds:.0f} s"
