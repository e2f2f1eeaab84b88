"""The schedules that DualPipe is measured against."""

from collections.abc import Iterator

from .actions import Action, Backward, Forward


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """1F1B (PipeDream-Flush; arXiv 2006.09503): as few micro-batches in flight as keep every rank busy."""

    def actions(rank: int) -> Iterator[Action]:
        warm_up = num_ranks - 1 - rank
        for i in range(num_micro_batches + warm_up):
            if i < num_micro_batches:
                yield Forward(rank, i)
            if i >= warm_up:
                yield Backward(rank, i - warm_up)

    return tuple(tuple(actions(rank)) for rank in range(num_ranks))
