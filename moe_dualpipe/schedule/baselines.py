"""The schedules that DualPipe is measured against, each a few lines: the rest of them is in their placement.

F is a forward, B a full backward, I and W its input and weight halves; `num_ranks` is written p in the comments.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from .actions import Action, Backward, Forward, Part
from .stage_actions import StageActions

Actions = tuple[tuple[Action, ...], ...]


def _in_turns(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Iterator[Action]:
    """`warm_up` forwards, then a forward and a backward in turns, then the backwards that are left."""
    yield from forwards[:warm_up]
    for pair in zip_longest(forwards[warm_up:], backwards):
        yield from (action for action in pair if action is not None)


def gpipe(num_ranks: int, num_micro_batches: int) -> Actions:
    """GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards (the first first, as in torch)."""
    ids = range(num_micro_batches)
    return tuple((*(Forward(r, i) for i in ids), *(Backward(r, i) for i in ids)) for r in range(num_ranks))


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Actions:
    """1F1B (PipeDream-Flush; arXiv 2006.09503): as few micro-batches in flight as keep every rank busy."""
    ids = range(num_micro_batches)
    return tuple(
        tuple(_in_turns([Forward(r, i) for i in ids], [Backward(r, i) for i in ids], num_ranks - 1 - r))
        for r in range(num_ranks)
    )


def interleaved_one_f_one_b(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Actions:
    """Interleaved 1F1B, or "virtual pipeline" (Narayanan et al., arXiv 2104.04473): `num_chunks` stages a rank.

    Micro-batches pass in groups of p: a rank runs the group on its first stage, then on its second, and so on.
    """

    def visits(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(chunk, micro-batch), in the order in which a rank runs them."""
        for first in range(0, num_micro_batches, num_ranks):
            for chunk in chunks:
                yield from ((chunk, first + i) for i in range(num_ranks))

    def actions(rank: int) -> Iterator[Action]:
        chunks = range(num_chunks)
        forwards = [Forward(chunk * num_ranks + rank, i) for chunk, i in visits(chunks)]
        backwards = [Backward(chunk * num_ranks + rank, i) for chunk, i in visits(chunks[::-1])]
        # The first group has to come round to the last chunk; a neighbour's place costs a forward there and one back.
        return _in_turns(forwards, backwards, (num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank))

    return tuple(tuple(actions(rank)) for rank in range(num_ranks))


def zb1p(num_ranks: int, num_micro_batches: int) -> Actions:
    """ZB1P, that is ZB-H1 (Qi et al., arXiv 2401.10241): 1F1B whose weight gradients are put off into the bubble.

    Rank r puts off those of r micro-batches and keeps p - r in flight, so no rank holds more than 1F1B's first does.
    """

    def actions(rank: int) -> Iterator[Action]:
        ids = range(num_micro_batches)
        forwards, inputs = [Forward(rank, i) for i in ids], [Backward(rank, i, Part.INPUT) for i in ids]
        deferred: deque[Action] = deque()
        for action in _in_turns(forwards, inputs, num_ranks - 1 - rank):
            yield action
            if isinstance(action, Backward):
                deferred.append(Backward(rank, action.micro_batch, Part.WEIGHT))
            if len(deferred) > rank:
                yield deferred.popleft()
        yield from deferred

    return tuple(tuple(actions(rank)) for rank in range(num_ranks))


def zbv(num_ranks: int, num_micro_batches: int) -> Actions:
    """ZB-V (Qi et al., arXiv 2401.10241, section 6): two stages a rank, folded into a V, every backward split.

    A micro-batch turns round where it ends, so its backward begins at once, and memory is 1F1B's on every rank.
    """

    def actions(rank: int) -> Iterator[Forward | Backward]:
        inner = num_ranks - rank  # ranks from here to the fold, this one included
        ids = range(max(num_micro_batches, 2 * num_ranks - 1))  # as many as fill the pipeline
        near, far = StageActions(rank, ids), StageActions(2 * num_ranks - 1 - rank, ids)
        for _ in range(2 * inner - 1):
            yield near.forward()
        for _ in range(rank):
            yield far.forward()
            yield near.forward()
        for _ in range(inner):
            yield far.forward()
            yield far.input_grad()
            yield far.weight_grad()
        for i in range(len(ids) - num_ranks):  # the steady state
            if i < len(ids) - 2 * num_ranks + 1 + rank:
                yield near.forward()
            yield near.input_grad()
            yield near.weight_grad()
            yield far.forward()
            yield far.input_grad()
            yield far.weight_grad()
        for _ in range(rank):
            yield near.input_grad()
            yield far.input_grad()
        for _ in range(inner):
            yield near.input_grad()
            yield near.weight_grad()
        yield from far.deferred
        yield from near.deferred

    return tuple(
        tuple(action for action in actions(rank) if action.micro_batch < num_micro_batches) for rank in range(num_ranks)
    )


def chimera(num_ranks: int, num_micro_batches: int) -> Actions:
    """Chimera (Li & Hoefler, arXiv 2107.06925): half of the micro-batches flow down, half up, like DualPipe's.

    With slots of one forward or one backward, a flow starts a micro-batch every second slot, and the other flow fits
    exactly between. p micro-batches make a unit of 2p busy slots on each rank; more are concatenated directly, the next
    unit's forwards in the slots that this one leaves empty.
    """
    half, last = num_micro_batches // 2, num_ranks - 1

    def slots(stage: int, ids: range) -> Iterator[tuple[int, Forward | Backward]]:
        for i, micro_batch in enumerate(ids):
            unit, j = divmod(i, num_ranks // 2)
            enters = 2 * num_ranks * unit + 2 * j
            yield enters + stage, Forward(stage, micro_batch)
            yield enters + 2 * num_ranks - 1 - stage, Backward(stage, micro_batch)

    def actions(rank: int) -> Iterator[Action]:
        both = [*slots(rank, range(half)), *slots(last - rank, range(half, num_micro_batches))]
        return (action for _, action in sorted(both, key=lambda slot: slot[0]))

    return tuple(tuple(actions(rank)) for rank in range(num_ranks))
