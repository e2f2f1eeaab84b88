"""Run a schedule on paper: when does each action start, if every rank works through its list as early as it can?

This is the one place that knows what an action has to wait for. Deriving the transfers (`comms`), finding out whether
an order can run at all (`validate`) and predicting its times (`simulate`) are this walk with different durations.

Each rank goes on until it needs a result that is not known yet, and is called again by whoever produces it; so the work
is proportional to the number of actions, and no clock is needed to order events.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from .actions import Action, Backward, Forward, Part, halves
from .schedule import Schedule

Result = tuple[int, int, str]
"""What a stage has computed of a micro-batch: stage, micro-batch, and "F" (its output), "B" (its input's gradient) or
"W" (its weights' gradients)."""


@dataclass(frozen=True, slots=True)
class Span:
    """`action` ran, or runs, from `start` to `end`, in any unit of time."""

    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


class DeadlockError(Exception):
    """No rank can go on; `waiting[r]` is the index of the action on which rank `r` is stuck."""

    def __init__(self, waiting: dict[int, int]):
        super().__init__(waiting)
        self.waiting = waiting


def needs(half: Forward | Backward, num_stages: int) -> tuple[Result, ...]:
    """What must have been computed, on whichever rank, before `half` can run."""
    stage, micro_batch = half.stage, half.micro_batch
    if isinstance(half, Forward):
        return ((stage - 1, micro_batch, "F"),) if stage > 0 else ()
    if half.part is Part.WEIGHT:
        return ((stage, micro_batch, "B"),)
    own = stage, micro_batch, "F"
    return (own, (stage + 1, micro_batch, "B")) if stage < num_stages - 1 else (own,)


def gives(half: Forward | Backward) -> Result:
    """What is known once `half` has run."""
    letter = "F" if isinstance(half, Forward) else "W" if half.part is Part.WEIGHT else "B"
    return half.stage, half.micro_batch, letter


def name(result: Result) -> str:
    """As the action that computes it is written, whichever part of the backward that is: `3B7`."""
    stage, micro_batch, letter = result
    return f"{stage}{letter}{micro_batch}"


def walk(schedule: Schedule, duration: Callable[[Action], float], comm: float = 0) -> tuple[tuple[Span, ...], ...]:
    """The span of every action, per rank.

    duration: how long an action takes on its rank, which runs one at a time.
    comm: how long a result travels to another rank; any number of results travel at once.

    Both halves of an overlapped pair need all of their inputs when it starts, and are known when it ends. Times start
    at 0 and are of the type that `duration` and `comm` return: exact for integers and fractions. Raises DeadlockError
    when the order cannot run.
    """
    num_stages = schedule.num_stages
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    known: dict[Result, tuple[float, int]] = {}  # when it was computed, and on which rank
    waiting: defaultdict[Result, list[int]] = defaultdict(list)  # ranks that cannot go on without it
    able = deque(range(schedule.num_ranks))

    def start(rank: int, action: Action) -> float | None:
        """The earliest time at which `rank` can run `action`; None if what it needs is not known yet."""
        time = spans[rank][-1].end if spans[rank] else 0
        for half in halves(action):
            for need in needs(half, num_stages):
                if need not in known:
                    waiting[need].append(rank)
                    return None
                computed, where = known[need]
                time = max(time, computed if where == rank else computed + comm)
        return time

    while able:
        rank = able.popleft()
        while len(spans[rank]) < len(schedule.actions[rank]):
            action = schedule.actions[rank][len(spans[rank])]
            if (begin := start(rank, action)) is None:
                break
            end = begin + duration(action)
            spans[rank].append(Span(action, begin, end))
            for half in halves(action):
                known[gives(half)] = end, rank
                able.extend(waiting.pop(gives(half), ()))

    stuck = {r: len(done) for r, done in enumerate(spans) if len(done) < len(schedule.actions[r])}
    if stuck:
        raise DeadlockError(stuck)
    return tuple(map(tuple, spans))
