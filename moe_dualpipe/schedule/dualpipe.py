"""DualPipe and DualPipeV, from one generator (DeepSeek-V3 technical report, arXiv 2412.19437, and the order of
github.com/deepseek-ai/DualPipe).

The two differ in placement alone. Fold DualPipe in the middle: rank r and rank R-1-r then play the same part, with the
flows exchanged. So take DualPipeV with R ranks and DualPipe with 2R ranks: at depth d (0 at the outer end) a rank holds

    near = stage d                  entered early, its forward starts the pipeline
    far  = stage S - 1 - d          entered late, its backward starts first

and runs the identical list of actions over `near` and `far`. In DualPipeV both see the same micro-batches, and the
innermost rank hands over to itself; in DualPipe `near` belongs to one flow and `far` to the other.
"""

from collections import deque
from collections.abc import Iterator

from .actions import Action, Backward, Overlap
from .stage_actions import StageActions


def dualpipe(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank under DualPipe: `num_ranks` ranks and stages, both even."""
    half, depth, last = num_micro_batches // 2, num_ranks // 2, num_ranks - 1
    down, up = range(half), range(half, num_micro_batches)
    upper = [_actions(r, down, last - r, up, r, depth) for r in range(depth)]
    lower = [_actions(last - r, up, r, down, last - r, depth) for r in range(depth, num_ranks)]
    return tuple(map(tuple, upper + lower))


def dualpipev(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank under DualPipeV: two stages a rank, folded into a V."""
    ids, last = range(num_micro_batches), 2 * num_ranks - 1
    return tuple(tuple(_actions(r, ids, last - r, ids, r, num_ranks)) for r in range(num_ranks))


def _actions(near_stage: int, near_ids: range, far_stage: int, far_ids: range, d: int, depth: int) -> Iterator[Action]:
    """What the rank at depth `d` of `depth` does; eight phases, named after what they repeat."""
    inner = depth - 1 - d  # ranks between this one and the fold
    deferred: deque[Backward] = deque()  # one queue for both: an I may be followed by the W of the other stage
    near, far = StageActions(near_stage, near_ids, deferred), StageActions(far_stage, far_ids, deferred)

    for _ in range(2 * inner):  # 1: F
        yield near.forward()
    for _ in range(d + 1):  # 2: F F
        yield near.forward()
        yield far.forward()
    for _ in range(inner):  # 3: I W F - splitting sends the gradient on sooner
        yield far.input_grad()
        yield far.weight_grad()
        yield far.forward()
    for i in range(len(near_ids) - 2 * depth + d + 1):  # 4: the steady state, (F B) (F B)
        first, second = near.forward(), far.backward()
        # At the fold the very first pair stays apart: its forward is what the other side of the fold waits for.
        yield from (first, second) if i == 0 and inner == 0 else (Overlap(first, second),)
        yield Overlap(far.forward(), near.backward())
    for _ in range(inner):  # 5: B (F B)
        yield far.backward()
        yield Overlap(far.forward(), near.backward())
    for i in range(2 * (d + 1)):  # 6: B B, and from the middle on I I, whose W fill the bubble that follows
        lane = near if i % 2 else far
        yield lane.backward() if i < d + 1 else lane.input_grad()
    for _ in range(inner):  # 7: W I
        yield near.weight_grad()
        yield near.input_grad()
    for _ in range(d + 1):  # 8: W
        yield near.weight_grad()
