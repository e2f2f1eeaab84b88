"""The actions of one stage on one rank, in order of micro-batch."""

from collections import deque

from .actions import Backward, Forward, Part


class StageActions:
    """Each method returns the next action of its kind.

    deferred: a queue of weight gradients (first in, first out). `input_grad` adds one, `weight_grad` removes one. The
    two stages of a rank may share a queue.
    """

    def __init__(self, stage: int, micro_batches: range, deferred: deque[Backward] | None = None):
        self.stage = stage
        self.deferred = deque() if deferred is None else deferred
        self._forwards, self._backwards = iter(micro_batches), iter(micro_batches)

    def forward(self) -> Forward:
        return Forward(self.stage, next(self._forwards))

    def backward(self) -> Backward:
        return Backward(self.stage, next(self._backwards))

    def input_grad(self) -> Backward:
        action = Backward(self.stage, next(self._backwards), Part.INPUT)
        self.deferred.append(Backward(self.stage, action.micro_batch, Part.WEIGHT))
        return action

    def weight_grad(self) -> Backward:
        return self.deferred.popleft()
