"""The schedules to compare DualPipe with: GPipe, 1F1B, interleaved 1F1B, ZB1P, ZB-V and Chimera.

Each function returns the actions of every rank. F is a forward, B a full backward, I an input gradient and W a weight
gradient. p is `num_ranks`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from .actions import Action, Backward, Forward, Part
from .stage_actions import StageActions

Actions = tuple[tuple[Action, ...], ...]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Iterator[Action]:
    """Yield `warm_up` forwards, then one forward and one backward in turn, then the remaining backwards."""
    yield from forwards[:warm_up]
    for pair in zip_longest(forwards[warm_up:], backwards):
        yield from (action for action in pair if action is not None)


def gpipe(num_ranks: int, num_micro_batches: int) -> Actions:
    """GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards in the same order, as in torch."""
    ids = range(num_micro_batches)
    return tuple((*(Forward(r, i) for i in ids), *(Backward(r, i) for i in ids)) for r in range(num_ranks))


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Actions:
    """1F1B (PipeDream-Flush, arXiv 2006.09503): the fewest micro-batches in flight that keep every rank busy."""
    ids = range(num_micro_batches)
    return tuple(
        tuple(_alternate([Forward(r, i) for i in ids], [Backward(r, i) for i in ids], num_ranks - 1 - r))
        for r in range(num_ranks)
    )


def interleaved_one_f_one_b(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Actions:
    """Interleaved 1F1B, or "virtual pipeline" (Narayanan et al., arXiv 2104.04473): `num_chunks` stages per rank.

    Micro-batches run in groups of p. A rank runs a group on its first stage, then on its second stage, and so on.
    """

    def visits(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (chunk, micro-batch) in the order in which a rank runs them."""
        for first in range(0, num_micro_batches, num_ranks):
            for chunk in chunks:
                yield from ((chunk, first + i) for i in range(num_ranks))

    def actions(rank: int) -> Iterator[Action]:
        chunks = range(num_chunks)
        forwards = [Forward(chunk * num_ranks + rank, i) for chunk, i in visits(chunks)]
        backwards = [Backward(chunk * num_ranks + rank, i) for chunk, i in visits(chunks[::-1])]
        # Before its first backward, a rank runs one group on every chunk but the last, and two forwards per later rank.
        return _alternate(forwards, backwards, (num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank))

    return tuple(tuple(actions(rank)) for rank in range(num_ranks))


def zb1p(num_ranks: int, num_micro_batches: int) -> Actions:
    """ZB1P, also called ZB-H1 (Qi et al., arXiv 2401.10241): 1F1B with weight gradients deferred into the bubble.

    Rank r defers the weight gradients of r micro-batches and has p - r micro-batches in flight. No rank holds more than
    the first rank of 1F1B.
    """

    def actions(rank: int) -> Iterator[Action]:
        ids = range(num_micro_batches)
        forwards, input_grads = [Forward(rank, i) for i in ids], [Backward(rank, i, Part.INPUT) for i in ids]
        deferred: deque[Action] = deque()
        for action in _alternate(forwards, input_grads, num_ranks - 1 - rank):
            yield action
            if isinstance(action, Backward):
                deferred.append(Backward(rank, action.micro_batch, Part.WEIGHT))
            if len(deferred) > rank:
                yield deferred.popleft()
        yield from deferred

    return tuple(tuple(actions(rank)) for rank in range(num_ranks))


def zbv(num_ranks: int, num_micro_batches: int) -> Actions:
    """ZB-V (Qi et al., arXiv 2401.10241, section 6): two stages per rank, folded into a V, every backward split.

    The last stage is on the rank of the first stage, so its backward starts early. Every rank holds as many activations
    as the first rank of 1F1B.
    """

    def actions(rank: int) -> Iterator[Forward | Backward]:
        inner = num_ranks - rank  # number of ranks from this one to the fold, inclusive
        # The order is defined for a full pipeline. Micro-batches that do not exist are removed at the end.
        ids = range(max(num_micro_batches, 2 * num_ranks - 1))
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
    """Chimera (Li & Hoefler, arXiv 2107.06925): half of the micro-batches flow down and half flow up, as in DualPipe.

    A slot holds one forward or one backward. A flow starts a micro-batch every second slot, and the other flow uses the
    slots between. p micro-batches form a unit of 2p busy slots per rank. The forwards of the next unit use the slots
    that this unit leaves empty (direct concatenation).
    """
    half, last = num_micro_batches // 2, num_ranks - 1

    def slots(stage: int, ids: range) -> Iterator[tuple[int, Forward | Backward]]:
        for i, micro_batch in enumerate(ids):
            unit, j = divmod(i, num_ranks // 2)
            first_slot = 2 * num_ranks * unit + 2 * j
            yield first_slot + stage, Forward(stage, micro_batch)
            yield first_slot + 2 * num_ranks - 1 - stage, Backward(stage, micro_batch)

    def actions(rank: int) -> Iterator[Action]:
        both = [*slots(rank, range(half)), *slots(last - rank, range(half, num_micro_batches))]
        return (action for _, action in sorted(both, key=lambda slot: slot[0]))

    return tuple(tuple(actions(rank)) for rank in range(num_ranks))
