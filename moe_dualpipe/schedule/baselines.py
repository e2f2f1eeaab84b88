"""The schedules to compare DualPipe with: GPipe, 1F1B, interleaved 1F1B, both with pairs, ZB1P, ZB-V and Chimera.

Each function yields the actions of one rank. F is a forward, B a full backward, I an input gradient and W a weight
gradient. p is `num_ranks`.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from .actions import Action, Backward, Forward, Overlap
from .stage_actions import StageActions


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Iterator[Action]:
    """Yield `warm_up` forwards, then one forward and one backward in turn, then the remaining backwards."""
    yield from forwards[:warm_up]
    for pair in zip_longest(forwards[warm_up:], backwards):
        yield from (action for action in pair if action is not None)


def gpipe(rank: int, _num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards in the same order, as in torch."""
    yield from (Forward(rank, i) for i in range(num_micro_batches))
    yield from (Backward(rank, i) for i in range(num_micro_batches))


def one_f_one_b(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """1F1B (PipeDream-Flush, arXiv 2006.09503): only as many micro-batches in flight as keep every rank busy."""
    ids = range(num_micro_batches)
    return _alternate([Forward(rank, i) for i in ids], [Backward(rank, i) for i in ids], num_ranks - 1 - rank)


def interleaved_one_f_one_b(rank: int, num_ranks: int, num_micro_batches: int, num_chunks: int) -> Iterator[Action]:
    """Interleaved 1F1B, or "virtual pipeline" (Narayanan et al., arXiv 2104.04473): `num_chunks` stages per rank.

    Micro-batches run in groups of p. A rank runs a group on its first stage, then on its second stage, and so on.
    """
    forwards, backwards = _visits(rank, num_ranks, num_micro_batches, num_chunks)
    # The warm-up is one group on every stage of the rank but the last, and two forwards per later rank.
    return _alternate(forwards, backwards, (num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank))


def interleaved_overlap(rank: int, num_ranks: int, num_micro_batches: int, num_chunks: int) -> Iterator[Action]:
    """Interleaved 1F1B whose forwards and backwards run as pairs: Megatron's "1F1B with EP overlap".

    The last rank cannot pair a backward with its own forward, so every rank runs one forward more ahead, and holds one
    micro-batch more on one of its stages.
    """
    forwards, backwards = _visits(rank, num_ranks, num_micro_batches, num_chunks)
    ahead = min((num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank) + 1, len(forwards))
    yield from forwards[:ahead]
    paired = len(forwards) - ahead
    yield from map(Overlap, forwards[ahead:], backwards)
    yield from backwards[paired:]


def one_f_one_b_overlap(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """`interleaved_overlap` with one stage per rank. Rank r holds 2(p - r) micro-batches, twice as many as in 1F1B."""
    return interleaved_overlap(rank, num_ranks, num_micro_batches, 1)


def _visits(rank: int, num_ranks: int, num_micro_batches: int, num_chunks: int) -> tuple[list[Forward], list[Backward]]:
    """The forwards and the backwards of an interleaved pipeline in the order in which a rank runs them."""

    def visits(stages: Sequence[int]) -> Iterator[tuple[int, int]]:
        for first in range(0, num_micro_batches, num_ranks):
            for stage in stages:
                yield from ((stage, i) for i in range(first, min(first + num_ranks, num_micro_batches)))

    stages = range(rank, num_chunks * num_ranks, num_ranks)
    return [Forward(*visit) for visit in visits(stages)], [Backward(*visit) for visit in visits(stages[::-1])]


def zb1p(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """ZB1P, also called ZB-H1 (Qi et al., arXiv 2401.10241): 1F1B with weight gradients deferred into the bubble.

    Rank r defers the weight gradients of r micro-batches and has p - r micro-batches in flight. No rank holds more than
    the first rank of 1F1B.
    """
    stage, warm_up = StageActions(rank, range(num_micro_batches)), num_ranks - 1 - rank
    for _ in range(warm_up):
        yield stage.forward()
    for i in range(num_micro_batches):
        if i < num_micro_batches - warm_up:
            yield stage.forward()
        yield stage.input_grad()
        if len(stage.deferred) > rank:
            yield stage.weight_grad()
    yield from stage.deferred


def zbv(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """ZB-V (Qi et al., arXiv 2401.10241, section 6): two stages per rank, folded into a V, every backward split.

    The last stage is on the rank of the first stage, so its backward starts early. Every rank holds as many activations
    as the first rank of 1F1B.
    """
    # The order is defined for 2p - 1 micro-batches or more. Those that do not exist are left out.
    actions = _zbv(rank, num_ranks, max(num_micro_batches, 2 * num_ranks - 1))
    return (action for action in actions if action.micro_batch < num_micro_batches)


def _zbv(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Forward | Backward]:
    to_fold = num_ranks - rank  # number of ranks from this one to the last, inclusive
    ids = range(num_micro_batches)
    near, far = StageActions(rank, ids), StageActions(2 * num_ranks - 1 - rank, ids)
    for _ in range(2 * to_fold - 1):
        yield near.forward()
    for _ in range(rank):
        yield far.forward()
        yield near.forward()
    for _ in range(to_fold):
        yield far.forward()
        yield far.input_grad()
        yield far.weight_grad()
    for i in range(num_micro_batches - num_ranks):  # the steady state
        if i < num_micro_batches - 2 * num_ranks + 1 + rank:
            yield near.forward()
        yield near.input_grad()
        yield near.weight_grad()
        yield far.forward()
        yield far.input_grad()
        yield far.weight_grad()
    for _ in range(rank):
        yield near.input_grad()
        yield far.input_grad()
    for _ in range(to_fold):
        yield near.input_grad()
        yield near.weight_grad()
    yield from far.deferred
    yield from near.deferred


def chimera(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """Chimera (Li & Hoefler, arXiv 2107.06925): half of the micro-batches flow down and half flow up, as in DualPipe.

    A slot holds one forward or one backward. A flow starts a micro-batch every second slot, and the other flow uses the
    slots between. p micro-batches form a unit of 2p busy slots per rank. The forwards of the next unit use the slots
    that this unit leaves empty (direct concatenation).
    """
    half = num_micro_batches // 2
    by_slot: dict[int, Action] = {}
    for stage, ids in ((rank, range(half)), (num_ranks - 1 - rank, range(half, num_micro_batches))):
        for i, micro_batch in enumerate(ids):
            unit, position = divmod(i, num_ranks // 2)
            first_slot = 2 * num_ranks * unit + 2 * position
            by_slot[first_slot + stage] = Forward(stage, micro_batch)
            by_slot[first_slot + 2 * num_ranks - 1 - stage] = Backward(stage, micro_batch)
    return (by_slot[slot] for slot in sorted(by_slot))
