"""Derive the point-to-point transfers of a schedule.

Problem: sends and receives in the wrong order deadlock. Idea: simulate the schedule with actions of equal duration.
When an action produces a result for another rank, append the send and the receive to the two lists at the same time.
All lists then follow one global order of transfers. They cannot deadlock, even with blocking sends, and on every link
the receives are in the order of the sends.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from .actions import Action, Backward, Flow, Forward, Part, Recv, Send, Step, Transfer, members
from .schedule import Schedule
from .walk import Result, needs, produces, walk


def add_comms(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Return the steps of each rank: its actions, and its sends and receives.

    A send directly follows the action that computes its data. Raises DeadlockError if the order cannot run.
    """
    steps: list[list[Step]] = [[] for _ in schedule.actions]
    for running in _simultaneous(schedule):  # all of them run, then their results are sent
        for rank, action in running:
            steps[rank].append(action)
        for rank, action in running:
            # The gradient of an overlapped pair is sent first: it is ready before the last weight gradient.
            for member in reversed(members(action)):
                if (peer := destination(schedule, member)) is not None:
                    flow = Flow.ACTIVATION if isinstance(member, Forward) else Flow.GRADIENT
                    send = Send(member.stage, member.micro_batch, flow)
                    steps[rank].append(send)
                    steps[peer].append(counterpart(send))
    return tuple(map(tuple, steps))


def destination(schedule: Schedule, member: Forward | Backward) -> int | None:
    """Return the rank that receives the result of `member`, or None if no other rank needs it."""
    if isinstance(member, Backward) and member.part is Part.WEIGHT:
        return None
    route = schedule.route_of(member.micro_batch)
    target = member.stage + (1 if isinstance(member, Forward) else -1)
    return route[target] if 0 <= target < len(route) and route[target] != route[member.stage] else None


def carried(transfer: Transfer) -> Result:
    """Return the result that `transfer` carries."""
    send = transfer if isinstance(transfer, Send) else counterpart(transfer)
    return send.stage, send.micro_batch, send.flow.value


def counterpart(transfer: Transfer) -> Transfer:
    """Return the receive of a send, or the send of a receive."""
    up = (transfer.flow is Flow.ACTIVATION) == isinstance(transfer, Send)
    other = Recv if isinstance(transfer, Send) else Send
    return other(transfer.stage + (1 if up else -1), transfer.micro_batch, transfer.flow)


def receive_early(schedule: Schedule, lists: Sequence[Sequence[Step]]) -> tuple[tuple[Step, ...], ...]:
    """In the lists of all ranks, move each receive before the preceding action, so that the data arrives meanwhile.

    A receive is not moved if its data depends on that action, because the data cannot arrive before the action ends. On
    a GPU, an early receive would occupy multiprocessors for nothing. And if the action waits for all work on the
    device, as when a kernel is loaded, the ranks would wait for each other forever.

    Receives keep their order. They must be asynchronous: a receive that is posted early must not block.

    Example: rank 0 of gpipe with 2 ranks and 2 micro-batches. Rank 1 runs `1F1` before `1B0`, so 0RECV_B0 is not moved:
    `0F0 0F1 0RECV_B0 0B0 0RECV_B1 0B1` becomes `0F0 0F1 0RECV_B0 0RECV_B1 0B0 0B1` (without sends).
    """
    required = required_actions(schedule)
    early: list[tuple[Step, ...]] = []
    for rank, steps in enumerate(lists):
        moved: list[Step] = []
        num_actions = insert_at = 0  # insert_at: index of the preceding action, after the receives moved before it
        for step in steps:
            if not isinstance(step, Recv):
                if not isinstance(step, Send):
                    num_actions, insert_at = num_actions + 1, len(moved)
                moved.append(step)
                continue
            if num_actions and required[carried(step)][rank] == num_actions:
                insert_at = len(moved)
            moved.insert(insert_at, step)
            insert_at += 1
        early.append(tuple(moved))
    return tuple(early)


def required_actions(schedule: Schedule) -> dict[Result, tuple[int, ...]]:
    """The number of actions that each rank must have run before a result exists, by result.

    Each rank runs its list in order, so these are always the first actions of the list. Raises DeadlockError.
    """
    required: dict[Result, tuple[int, ...]] = {}
    latest = [(0,) * schedule.num_ranks] * schedule.num_ranks  # for each rank: the counts after its last action
    for rank, action in chain.from_iterable(_simultaneous(schedule)):
        inputs = [required[need] for member in members(action) for need in needs(member, schedule.num_stages)]
        counts = [max(column) for column in zip(latest[rank], *inputs, strict=True)]
        counts[rank] += 1
        latest[rank] = tuple(counts)
        required |= dict.fromkeys(map(produces, members(action)), latest[rank])
    return required


def _simultaneous(schedule: Schedule) -> list[list[tuple[int, Action]]]:
    """The actions with their ranks, in order, in groups that run at the same time if all take equally long."""
    groups: defaultdict[float, list[tuple[int, Action]]] = defaultdict(list)
    for rank, spans in enumerate(walk(schedule, duration=lambda _: 1)):
        for span in spans:
            groups[span.start].append((rank, span.action))
    return [group for _, group in sorted(groups.items())]
