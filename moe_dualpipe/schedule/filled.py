"""Move weight gradients into the time in which a rank waits, for measured costs and a limit on memory.

A full backward B = I + W delays the rank before it by W, although only I is needed there. And a rank that waits has
nothing to do while W of earlier micro-batches could run. So every backward outside of a pair is split, the order of
forwards, input gradients and pairs stays as it is, and each W runs

    where its rank waits       if it fits into the wait
    before a forward           that would exceed the memory of the rank
    at the end                 otherwise

The waits are known exactly: like `walk`, a rank goes on until it needs a result that does not exist yet, and how long
it waits does not depend on the W that it defers. The only choice is whether the next action may start by a part of a W
later. So a few variants are built, and the fastest of them and the input is returned.

A search over all orders (annealing, constraint programming) gains little more from eight ranks on, and loses it again
if durations vary by some percent.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .actions import Action, Backward, Forward, Overlap, Part, members
from .placement import Placement
from .schedule import Schedule
from .simulate import Costs, simulate
from .walk import DeadlockError, Result, needs, produces

FILL = "+fill"
"""Follows the name of a schedule whose weight gradients were moved."""
LATENESS = 0.0, 0.5, 1.0
"""By which part of a W an action may start later because that W runs before it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """`limit[r]`: what rank r may hold. It holds activations[s] for each micro-batch that stage s has run forward but
    not backward, and deferred[s] for each weight gradient that is left. In any unit, such as bytes."""

    limit: Sequence[float]
    activations: Sequence[int]
    deferred: Sequence[int]

    @classmethod
    def of(
        cls, schedule: Schedule, activations: Sequence[int] | None = None, deferred: Sequence[int] | None = None
    ) -> "Memory":
        """What `schedule` needs itself. activations, deferred: per stage; None: 1."""
        ones = (1,) * schedule.num_stages
        sizes = tuple(activations or ones), tuple(deferred or ones)
        return cls(simulate(schedule, Costs()).peak_bytes(*sizes), *sizes)

    def check(self, placement: Placement) -> None:
        """Raise ValueError unless there is a limit for each rank, and a size for each stage."""
        found = len(self.limit), len(self.activations), len(self.deferred)
        if found != (needed := (placement.num_ranks, placement.num_stages, placement.num_stages)):
            raise ValueError(f"memory needs {needed[0]} limits and {needed[1]} sizes of stages: got {found}")

    def holds(self, schedule: Schedule) -> bool:
        """Whether no rank exceeds its limit."""
        needed = Memory.of(schedule, self.activations, self.deferred).limit
        return all(peak <= limit for peak, limit in zip(needed, self.limit, strict=True))


def fill(schedule: Schedule, costs: Costs, memory: Memory | None = None) -> Schedule:
    """Return `schedule` with its weight gradients where they take the least time. Never slower than the input.

    costs: of its stages. memory: None: what the input needs itself. The result has the same forwards and backwards on
    the same ranks, each B possibly as I and W, and is deterministic.

    Raises ValueError for costs or a memory of other numbers of stages or ranks, and if neither the input nor the result
    fits in `memory`.
    """
    costs.check_stages(schedule.num_stages)
    memory = memory or Memory.of(schedule)
    memory.check(schedule.placement)
    candidates = [schedule] if memory.holds(schedule) else []
    for source in dict.fromkeys((schedule, _with_first_pairs(schedule))):
        for lateness in LATENESS:
            try:
                filled = _filled(source, costs, memory, lateness)
            except DeadlockError:  # a first pair that waits for itself
                break
            if memory.holds(filled):
                candidates.append(filled)
    if not candidates:
        needed = Memory.of(schedule, memory.activations, memory.deferred).limit
        raise ValueError(
            f"{schedule.name} does not fit: it needs {[*needed]} on its ranks, and may use {[*memory.limit]}"
        )
    best = min(candidates, key=lambda candidate: simulate(candidate, costs).makespan)
    return best if best is schedule else replace(best, name=schedule.name.removesuffix(FILL) + FILL)


def _with_first_pairs(schedule: Schedule) -> Schedule:
    """Overlap a forward and a full backward that stand alone before the first pair of a rank, as at DualPipe's fold."""
    rows = []
    for actions in schedule.actions:
        first = next((i for i, action in enumerate(actions) if isinstance(action, Overlap)), 0)
        match actions[max(0, first - 2) : first]:
            case (Forward() as forward, Backward(part=Part.FULL) as backward):
                actions = (*actions[: first - 2], Overlap(forward, backward), *actions[first:])
        rows.append(actions)
    return replace(schedule, actions=tuple(rows))


def _filled(schedule: Schedule, costs: Costs, memory: Memory, lateness: float) -> Schedule:
    known: dict[Result, tuple[float, int]] = {}  # when each result was computed, and on which rank
    waiting: defaultdict[Result, list[_FilledRank]] = defaultdict(list)
    ranks = [_FilledRank(r, schedule, costs, memory, lateness) for r in range(schedule.num_ranks)]
    ready = deque(ranks)
    while ready:
        rank = ready.popleft()
        while rank.left:
            missing = next((need for need in rank.needs() if need not in known), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            arrivals = (known[need] for need in rank.needs())
            start = max((t if where == rank.index else t + costs.comm for t, where in arrivals), default=0)
            for result in rank.run(start):
                known[result] = rank.time, rank.index
                ready.extend(waiting.pop(result, ()))
    if stuck := {rank.index: len(rank.done) for rank in ranks if rank.left}:
        raise DeadlockError(stuck)
    return replace(schedule, actions=tuple((*rank.done, *rank.deferred) for rank in ranks))


class _FilledRank:
    """A rank while its list of actions grows. `done`: the list. `deferred`: weight gradients that are not in it."""

    def __init__(self, index: int, schedule: Schedule, costs: Costs, memory: Memory, lateness: float):
        self.index, self.costs, self.memory, self.lateness = index, costs, memory, lateness
        self.num_stages, self.time, self.held = schedule.num_stages, 0.0, 0.0
        self.done: list[Action] = []
        self.deferred: deque[Backward] = deque()
        self.left = deque(a for a in schedule.actions[index] if getattr(a, "part", None) is not Part.WEIGHT)

    def needs(self) -> list[Result]:
        return [need for member in members(self.left[0]) for need in needs(member, self.num_stages)]

    def run(self, ready: float) -> list[Result]:
        """Run the next action, which can start at `ready`, and weight gradients before it. Returns its results."""
        action = self.left.popleft()
        while self.deferred:
            weight = self.costs.of(self.deferred[0])
            if self.time + weight > ready + self.lateness * weight or self.time >= ready:
                break
            self._run_weight()
        needed = sum(self.memory.activations[m.stage] for m in members(action) if isinstance(m, Forward))
        while self.deferred and self.held + needed > self.memory.limit[self.index]:
            self._run_weight()
        self.time = max(self.time, ready)
        if isinstance(action, Backward) and action.part is Part.FULL and self._has_room(action.stage):
            action = replace(action, part=Part.INPUT)
        self._append(action)
        return [produces(member) for member in members(action)]

    def _has_room(self, stage: int) -> bool:
        more = self.memory.deferred[stage] - self.memory.activations[stage]
        return self.held + more <= self.memory.limit[self.index]

    def _run_weight(self) -> None:
        self._append(self.deferred.popleft())

    def _append(self, action: Action) -> None:
        self.done.append(action)
        self.time += self.costs.of(action)
        for member in members(action):
            activations, deferred = self.memory.activations[member.stage], self.memory.deferred[member.stage]
            if isinstance(member, Forward):
                self.held += activations
            elif member.part is Part.WEIGHT:
                self.held -= deferred
            else:
                self.held -= activations
                if member.part is Part.INPUT:
                    self.held += deferred
                    self.deferred.append(replace(member, part=Part.WEIGHT))
