"""Compute the start and end of every action when each rank runs its list as early as possible.

Only this module knows what an action depends on. `comms` derives the transfers from it, `validate` checks that the
order can run, and `simulate` predicts times.

A rank runs its actions until one needs a result that does not exist yet. It continues when another rank produces that
result. So the cost is linear in the number of actions, and no event queue is needed.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from .actions import Action, Backward, Forward, Part, members
from .schedule import Schedule

Result = tuple[int, int, str]
"""A result: stage, micro-batch, and "F" (output), "B" (gradient of the input) or "W" (gradients of the weights)."""


@dataclass(frozen=True, slots=True)
class Span:
    """`action` runs from `start` to `end`, in any unit of time."""

    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


class DeadlockError(Exception):
    """No rank can continue. `waiting[r]` is the index of the action that rank `r` cannot run."""

    def __init__(self, waiting: dict[int, int]):
        super().__init__(waiting)
        self.waiting = waiting


def needs(member: Forward | Backward, num_stages: int) -> tuple[Result, ...]:
    """Return the results, of any rank, that `member` depends on."""
    stage, micro_batch = member.stage, member.micro_batch
    if isinstance(member, Forward):
        return ((stage - 1, micro_batch, "F"),) if stage > 0 else ()
    if member.part is Part.WEIGHT:
        return ((stage, micro_batch, "B"),)
    own = stage, micro_batch, "F"
    return (own, (stage + 1, micro_batch, "B")) if stage < num_stages - 1 else (own,)


def produces(member: Forward | Backward) -> Result:
    """Return the result of `member`."""
    letter = "F" if isinstance(member, Forward) else "W" if member.part is Part.WEIGHT else "B"  # an I produces a B
    return member.stage, member.micro_batch, letter


def result_name(result: Result) -> str:
    """Return `3B7` for the input gradient of stage 3, micro-batch 7, even if an I computes it."""
    return f"{result[0]}{result[2]}{result[1]}"


def walk(schedule: Schedule, duration: Callable[[Action], float], comm: float = 0) -> tuple[tuple[Span, ...], ...]:
    """Return the span of every action, per rank.

    duration: returns the duration of an action. A rank runs one action at a time.
    comm: the time to transfer a result to another rank. Transfers do not slow each other down.

    An overlapped pair starts when the inputs of both members exist, and its results exist when it ends. Times start at
    0 and are exact for integers and fractions. Raises DeadlockError if the order cannot run.
    """
    num_stages = schedule.num_stages
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    known: dict[Result, tuple[float, int]] = {}  # when each result was computed, and on which rank
    waiting: defaultdict[Result, list[int]] = defaultdict(list)  # ranks that wait for a result
    ready = deque(range(schedule.num_ranks))

    def start(rank: int, action: Action) -> float | None:
        """Return the earliest start of `action` on `rank`, or None if it needs a result that does not exist yet."""
        time = spans[rank][-1].end if spans[rank] else 0
        for member in members(action):
            for need in needs(member, num_stages):
                if need not in known:
                    waiting[need].append(rank)
                    return None
                computed, where = known[need]
                time = max(time, computed if where == rank else computed + comm)
        return time

    while ready:
        rank = ready.popleft()
        while len(spans[rank]) < len(schedule.actions[rank]):
            action = schedule.actions[rank][len(spans[rank])]
            if (begin := start(rank, action)) is None:
                break
            end = begin + duration(action)
            spans[rank].append(Span(action, begin, end))
            for member in members(action):
                known[produces(member)] = end, rank
                ready.extend(waiting.pop(produces(member), ()))

    stuck = {r: len(done) for r, done in enumerate(spans) if len(done) < len(schedule.actions[r])}
    if stuck:
        raise DeadlockError(stuck)
    return tuple(map(tuple, spans))
