"""Derive the point-to-point transfers of a schedule.

Problem: sends and receives in the wrong order deadlock. Idea: simulate the schedule with actions of equal duration.
When an action produces a result for another rank, append the send and the receive to the two lists at the same time.
All lists then follow one global order of transfers. They cannot deadlock, even with blocking sends, and on every link
the receives are in the order of the sends.
"""

from collections import defaultdict

from .actions import Action, Backward, Flow, Forward, Overlap, Part, Recv, Send, Step, Transfer, halves
from .schedule import Schedule
from .walk import Result, walk


def add_comms(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Return the steps of each rank: its actions, and its sends and receives.

    A send directly follows the action that computes its data. Raises DeadlockError if the order cannot run.
    """
    steps: list[list[Step]] = [[] for _ in schedule.actions]
    by_start: defaultdict[float, list[tuple[int, Action]]] = defaultdict(list)
    for rank, spans in enumerate(walk(schedule, duration=lambda _: 1)):
        for span in spans:
            by_start[span.start].append((rank, span.action))
    for _, running in sorted(by_start.items()):  # these actions run at the same time; then their results are sent
        for rank, action in running:
            steps[rank].append(action)
        for rank, action in running:
            # The gradient of an overlapped pair is sent first: it is ready before the last weight gradient.
            for half in reversed(halves(action)):
                if (peer := destination(schedule, half)) is not None:
                    flow = Flow.ACTIVATION if isinstance(half, Forward) else Flow.GRADIENT
                    send = Send(half.stage, half.micro_batch, flow)
                    steps[rank].append(send)
                    steps[peer].append(counterpart(send))
    return tuple(map(tuple, steps))


def destination(schedule: Schedule, half: Forward | Backward) -> int | None:
    """Return the rank that receives the result of `half`, or None if no other rank needs it."""
    if isinstance(half, Backward) and half.part is Part.WEIGHT:
        return None
    route = schedule.route_of(half.micro_batch)
    target = half.stage + (1 if isinstance(half, Forward) else -1)
    return route[target] if 0 <= target < len(route) and route[target] != route[half.stage] else None


def carried(transfer: Transfer) -> Result:
    """Return the result that `transfer` carries."""
    send = transfer if isinstance(transfer, Send) else counterpart(transfer)
    return send.stage, send.micro_batch, send.flow.value


def counterpart(transfer: Transfer) -> Transfer:
    """Return the receive of a send, or the send of a receive."""
    up = (transfer.flow is Flow.ACTIVATION) == isinstance(transfer, Send)
    other = Recv if isinstance(transfer, Send) else Send
    return other(transfer.stage + (1 if up else -1), transfer.micro_batch, transfer.flow)


def receive_early(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Move every receive before the preceding compute action, so that the data arrives while that action runs.

    Receives keep their order. They must be asynchronous: a receive that is posted early must not block.

    Example: `0F0 0SEND_F0 0RECV_B0 0B0` becomes `0RECV_B0 0F0 0SEND_F0 0B0`.
    """
    early: list[Step] = []
    insert_at = 0  # index of the previous compute action, after the receives that were moved before it
    for step in steps:
        if isinstance(step, Recv):
            early.insert(insert_at, step)
            insert_at += 1
        else:
            if isinstance(step, Forward | Backward | Overlap):
                insert_at = len(early)
            early.append(step)
    return tuple(early)
