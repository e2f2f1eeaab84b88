"""Derive the point-to-point traffic of a schedule.

The idea: run the schedule once on paper, every action taking one unit of time. Whenever a rank finishes an action
whose result another rank needs, append the send to the one list and the receive to the other *at the same moment*. All
lists are then projections of a single order in which every transfer is one event seen by both sides, so they cannot
deadlock - not even with blocking sends - and on every directed link the receiver expects messages in the order in
which the sender sends them.
"""

from itertools import groupby

from .actions import Backward, Flow, Forward, Overlap, Part, Recv, Send, Step, Transfer, halves
from .schedule import Schedule
from .walk import Result, walk


def add_comms(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Insert each rank's sends, right after what they carry was computed, and receives, when the sender sends.

    Raises DeadlockError when the order cannot run.
    """
    steps: list[list[Step]] = [[] for _ in schedule.actions]
    ran = [
        (span.start, rank, span.action)
        for rank, spans in enumerate(walk(schedule, duration=lambda _: 1))
        for span in spans
    ]
    for _, together in groupby(sorted(ran, key=lambda event: event[:2]), key=lambda event: event[0]):
        running = [(rank, action) for _, rank, action in together]  # these run side by side, then exchange results
        for rank, action in running:
            steps[rank].append(action)
        for rank, action in running:
            # Of an overlapped pair, the backward first: its gradient can leave before its own last weight gradients.
            for half in reversed(halves(action)):
                if (peer := destination(schedule, half)) is not None:
                    flow = Flow.ACTIVATION if isinstance(half, Forward) else Flow.GRADIENT
                    send = Send(half.stage, half.micro_batch, flow)
                    steps[rank].append(send)
                    steps[peer].append(counterpart(send))
    return tuple(map(tuple, steps))


def destination(schedule: Schedule, half: Forward | Backward) -> int | None:
    """The rank to which the result of `half` is sent; None when it stays where it is."""
    if isinstance(half, Backward) and half.part is Part.WEIGHT:
        return None
    route = schedule.route_of(half.micro_batch)
    there = half.stage + (1 if isinstance(half, Forward) else -1)
    if not 0 <= there < len(route) or route[there] == route[half.stage]:
        return None
    return route[there]


def carried(transfer: Transfer) -> Result:
    """The result that `transfer` carries: an output goes up by one stage, the gradient of an input down."""
    up = transfer.flow is Flow.ACTIVATION
    from_stage = transfer.stage if isinstance(transfer, Send) else transfer.stage - (1 if up else -1)
    return from_stage, transfer.micro_batch, "F" if up else "B"


def counterpart(transfer: Transfer) -> Transfer:
    """The other side of `transfer`, on the stage above or below."""
    up = (transfer.flow is Flow.ACTIVATION) == isinstance(transfer, Send)
    other = Recv if isinstance(transfer, Send) else Send
    return other(transfer.stage + (1 if up else -1), transfer.micro_batch, transfer.flow)


def receive_early(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Move every receive ahead of the compute action before it, so that data arrives while that action runs.

    Receives keep their order among themselves, and only asynchronous receives may be moved: posting one early must not
    block.

    Example: `0F0 0SEND_F0 0RECV_B0 0B0` becomes `0RECV_B0 0F0 0SEND_F0 0B0`.
    """
    early: list[Step] = []
    insert_at = 0  # where the previous compute action stands, after the receives already moved in front of it
    for step in steps:
        if isinstance(step, Recv):
            early.insert(insert_at, step)
            insert_at += 1
        else:
            if isinstance(step, Forward | Backward | Overlap):
                insert_at = len(early)
            early.append(step)
    return tuple(early)
