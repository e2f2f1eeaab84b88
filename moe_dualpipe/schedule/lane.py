"""One stage on one rank, handing out its actions in order of micro-batch: what a generator of schedules counts with."""

from collections import deque

from .actions import Backward, Forward, Part


class Lane:
    """Each method gives the next action of its kind, of the first micro-batch that has not had it.

    owed: where each `input` leaves the weight half for a later `weight`, first in, first out; lanes may share one.
    """

    def __init__(self, stage: int, micro_batches: range, owed: deque[Backward] | None = None):
        self.stage = stage
        self.owed = deque() if owed is None else owed
        self._forwards, self._backwards = iter(micro_batches), iter(micro_batches)

    def forward(self) -> Forward:
        return Forward(self.stage, next(self._forwards))

    def backward(self) -> Backward:
        return Backward(self.stage, next(self._backwards))

    def input(self) -> Backward:
        action = Backward(self.stage, next(self._backwards), Part.INPUT)
        self.owed.append(Backward(self.stage, action.micro_batch, Part.WEIGHT))
        return action

    def weight(self) -> Backward:
        return self.owed.popleft()
