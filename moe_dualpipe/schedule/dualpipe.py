"""DualPipe and DualPipeV from one generator.

The source is the DeepSeek-V3 technical report (arXiv 2412.19437); the order is that of github.com/deepseek-ai/DualPipe.

The two schedules differ only in their placement. DualPipe on 2R ranks is symmetric: rank r and rank 2R - 1 - r run the
same actions with the two flows exchanged. DualPipeV on R ranks is one half of it. At depth d (0 on the outermost rank)
a rank of either holds two of the S stages and runs the same list of actions on them:

    near = stage d                  its forward starts the pipeline
    far  = stage S - 1 - d          its backward runs first

In DualPipe, `near` belongs to one flow and `far` to the other. In DualPipeV both run the same micro-batches, and the
innermost rank holds two consecutive stages.
"""

from collections import deque
from collections.abc import Iterator

from .actions import Action, Backward, Overlap
from .stage_actions import StageActions


def dualpipe(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """Yield the actions of one rank of DualPipe. Both numbers must be even; there are `num_ranks` stages."""
    half = num_micro_batches // 2
    down, up = range(half), range(half, num_micro_batches)
    near_ids, far_ids = (down, up) if rank < num_ranks // 2 else (up, down)
    return _actions(min(rank, num_ranks - 1 - rank), num_ranks // 2, near_ids, far_ids)


def dualpipev(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """Yield the actions of one rank of DualPipeV: two stages per rank, folded into a V."""
    ids = range(num_micro_batches)
    return _actions(rank, num_ranks, ids, ids)


def _actions(d: int, depth: int, near_ids: range, far_ids: range) -> Iterator[Action]:
    """Yield the actions of a rank at depth `d` of `depth`: eight phases, named by the actions that they repeat."""
    inner = depth - 1 - d  # ranks between this one and the fold
    deferred: deque[Backward] = deque()  # shared: the W of one stage may follow an I of the other
    near, far = StageActions(d, near_ids, deferred), StageActions(2 * depth - 1 - d, far_ids, deferred)

    for _ in range(2 * inner):  # 1: F
        yield near.forward()
    for _ in range(d + 1):  # 2: F F
        yield near.forward()
        yield far.forward()
    for _ in range(inner):  # 3: I W F; a split backward sends its gradient earlier
        yield far.input_grad()
        yield far.weight_grad()
        yield far.forward()
    for i in range(len(near_ids) - 2 * depth + d + 1):  # 4: the steady state, (F B) (F B)
        first, second = near.forward(), far.backward()
        # The first pair at the fold is not overlapped: the rank on the other side of the fold waits for its forward.
        yield from (first, second) if i == 0 and inner == 0 else (Overlap(first, second),)
        yield Overlap(far.forward(), near.backward())
    for _ in range(inner):  # 5: B (F B)
        yield far.backward()
        yield Overlap(far.forward(), near.backward())
    for i in range(2 * (d + 1)):  # 6: B B, in the second half I I, so that the W can fill the following bubble
        stage = near if i % 2 else far
        yield stage.backward() if i < d + 1 else stage.input_grad()
    for _ in range(inner):  # 7: W I
        yield near.weight_grad()
        yield near.input_grad()
    for _ in range(d + 1):  # 8: W
        yield near.weight_grad()
