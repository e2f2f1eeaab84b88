"""Orders of stages for operations on their weights and gradients, equal on all ranks.

Two ranks that hold the same stages may finish them in different orders, but must launch the collectives of their group
in one order. So each order is that of the slowest holder, and depends only on the schedule.
"""

from collections.abc import Callable, Iterable

from .actions import Action, Backward, members
from .schedule import Schedule


def last_gradients(actions: Iterable[Action]) -> dict[int, Action]:
    """For each stage, the action of a rank's list after which its gradients are complete."""
    return {member.stage: action for action in actions for member in members(action) if isinstance(member, Backward)}


def order_of_completion(schedule: Schedule) -> tuple[int, ...]:
    """The stages in the order in which their gradients are complete: those first that the most actions follow."""

    def position(rank: int, stage: int) -> int:
        actions = schedule.actions[rank]
        last = last_gradients(actions).get(stage)
        return 0 if last is None else actions.index(last) - len(actions)

    return _by_slowest(schedule, position)


def order_of_use(schedule: Schedule) -> tuple[int, ...]:
    """The stages in the order of their first actions."""

    def position(rank: int, stage: int) -> int:
        uses = (i for i, action in enumerate(schedule.actions[rank]) if any(h.stage == stage for h in members(action)))
        return next(uses, len(schedule.actions[rank]))

    return _by_slowest(schedule, position)


def _by_slowest(schedule: Schedule, position: Callable[[int, int], int]) -> tuple[int, ...]:
    """The stages by their largest position on any rank that holds them."""
    placement = schedule.placement
    latest = {s: max(position(rank, s) for rank in placement.holders(s)) for s in range(placement.num_stages)}
    return tuple(sorted(latest, key=lambda stage: (latest[stage], stage)))
