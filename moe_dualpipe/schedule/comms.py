"""Derive the point-to-point traffic of a schedule.

The idea: run the schedule once on paper, every action taking one unit of time. Whenever a rank finishes an action
whose result another rank needs, append the send to the one list and the receive to the other *at the same moment*. All
lists are then projections of a single order in which every transfer is one event seen by both sides, so they cannot
deadlock - not even with blocking sends - and on every directed link the receiver expects messages in the order in
which the sender sends them.
"""

from itertools import groupby

from .actions import Backward, Flow, Forward, Overlap, Part, Recv, Send, Step, halves
from .schedule import Schedule
from .walk import walk


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
                if (transfer := _transfer(half, schedule)) is not None:
                    send, recv, peer = transfer
                    steps[rank].append(send)
                    steps[peer].append(recv)
    return tuple(map(tuple, steps))


def _transfer(half: Forward | Backward, schedule: Schedule) -> tuple[Send, Recv, int] | None:
    """The transfer that `half` causes, with the receiving rank; None when its result stays on this rank."""
    if isinstance(half, Backward) and half.part is Part.WEIGHT:
        return None
    if isinstance(half, Forward):
        flow, neighbour = Flow.ACTIVATION, half.stage + 1
    else:
        flow, neighbour = Flow.GRADIENT, half.stage - 1
    if not 0 <= neighbour < schedule.num_stages:
        return None
    peer = schedule.rank_of(neighbour, half.micro_batch)
    if peer == schedule.rank_of(half.stage, half.micro_batch):
        return None
    return Send(half.stage, half.micro_batch, flow), Recv(neighbour, half.micro_batch, flow), peer


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
