"""DualPipe and DualPipeV, from one generator (DeepSeek-V3 technical report, arXiv 2412.19437, and the order of
github.com/deepseek-ai/DualPipe).

The two differ in placement alone. Fold DualPipe in the middle: rank r and rank R-1-r then play the same part, with the
flows exchanged. So take DualPipeV with R ranks and DualPipe with 2R ranks: at depth d (0 at the outer end) a rank holds

    near = stage d                  entered early, its forward starts the pipeline
    far  = stage S - 1 - d          entered late, its backward starts first

and runs the identical list of actions over `near` and `far`. In DualPipeV both see the same micro-batches, and the
innermost rank hands over to itself; in DualPipe `near` belongs to one flow and `far` to the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .actions import Action, Backward, Forward, Overlap, Part


@dataclass
class _Lane:
    """One stage on one rank, handing out its forwards and backwards in order of micro-batch."""

    stage: int
    micro_batches: range
    _forwards: Iterator[int] = field(init=False)
    _backwards: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self._forwards, self._backwards = iter(self.micro_batches), iter(self.micro_batches)

    def forward(self) -> Forward:
        return Forward(self.stage, next(self._forwards))

    def backward(self, part: Part = Part.FULL) -> Backward:
        return Backward(self.stage, next(self._backwards), part)


def dualpipe(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank under DualPipe: `num_ranks` ranks and stages, both even."""
    half, depth, last = num_micro_batches // 2, num_ranks // 2, num_ranks - 1
    down, up = range(half), range(half, num_micro_batches)
    return tuple(
        tuple(
            _actions(_Lane(r, down), _Lane(last - r, up), r, depth)
            if r < depth
            else _actions(_Lane(last - r, up), _Lane(r, down), last - r, depth)
        )
        for r in range(num_ranks)
    )


def dualpipev(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank under DualPipeV: two stages a rank, folded into a V."""
    all_of_them = range(num_micro_batches)
    return tuple(
        tuple(_actions(_Lane(r, all_of_them), _Lane(2 * num_ranks - 1 - r, all_of_them), r, num_ranks))
        for r in range(num_ranks)
    )


def _actions(near: _Lane, far: _Lane, d: int, depth: int) -> Iterator[Action]:
    """What the rank at depth `d` of `depth` does; eight phases, named after what they repeat."""
    inner = depth - 1 - d  # ranks between this one and the fold
    deferred: list[Backward] = []

    def input_gradients(lane: _Lane) -> Backward:
        """Backward without its weight gradients, which are owed until `weight_gradients`."""
        action = lane.backward(Part.INPUT)
        deferred.append(Backward(action.stage, action.micro_batch, Part.WEIGHT))
        return action

    def weight_gradients() -> Backward:
        return deferred.pop(0)

    for _ in range(2 * inner):  # 1: F
        yield near.forward()
    for _ in range(d + 1):  # 2: F F
        yield near.forward()
        yield far.forward()
    for _ in range(inner):  # 3: I W F - splitting sends the gradient on sooner
        yield input_gradients(far)
        yield weight_gradients()
        yield far.forward()
    for i in range(len(near.micro_batches) - 2 * depth + d + 1):  # 4: the steady state, (F B) (F B)
        first, second = near.forward(), far.backward()
        # At the fold the very first pair stays apart: its forward is what the other side of the fold waits for.
        yield from (first, second) if i == 0 and inner == 0 else (Overlap(first, second),)
        yield Overlap(far.forward(), near.backward())
    for _ in range(inner):  # 5: B (F B)
        yield far.backward()
        yield Overlap(far.forward(), near.backward())
    for i in range(2 * (d + 1)):  # 6: B B, and from the middle on I I, whose W fill the bubble that follows
        lane = near if i % 2 else far
        yield lane.backward() if i < d + 1 else input_gradients(lane)
    for _ in range(inner):  # 7: W I
        yield weight_gradients()
        yield input_gradients(near)
    for _ in range(d + 1):  # 8: W
        yield weight_gradients()
