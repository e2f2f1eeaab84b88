"""Derive the point-to-point traffic of a schedule.

The idea: run the schedule once on paper. Whenever a rank finishes an action whose result another rank needs, append
the send to the one list and the receive to the other *at the same moment*. All lists are then projections of a single
order in which every transfer is one event seen by both sides, so they cannot deadlock - not even with blocking sends -
and on every directed link the receiver expects messages in the order in which the sender sends them.
"""

from collections.abc import Iterator

from .actions import Action, Backward, Flow, Forward, Overlap, Part, Recv, Send, Step, halves
from .schedule import Schedule

Result = tuple[int, int, str]  # stage, micro-batch, and what is known of it: "F", "B" (its gradient) or "W"


class DeadlockError(Exception):
    """No rank can go on; `waiting[r]` is the index of the action on which rank `r` is stuck."""

    def __init__(self, waiting: dict[int, int]):
        super().__init__(waiting)
        self.waiting = waiting


def needs(half: Forward | Backward, num_stages: int) -> Iterator[Result]:
    """What must have been computed, on whichever rank, before `half` can run."""
    match half:
        case Forward(stage=stage, micro_batch=micro_batch):
            if stage > 0:
                yield stage - 1, micro_batch, "F"
        case Backward(stage=stage, micro_batch=micro_batch, part=Part.WEIGHT):
            yield stage, micro_batch, "B"
        case Backward(stage=stage, micro_batch=micro_batch):
            yield stage, micro_batch, "F"
            if stage < num_stages - 1:
                yield stage + 1, micro_batch, "B"


def gives(half: Forward | Backward) -> Result:
    """What is known once `half` has run."""
    match half:
        case Forward(stage=stage, micro_batch=micro_batch):
            return stage, micro_batch, "F"
        case Backward(stage=stage, micro_batch=micro_batch, part=part):
            return stage, micro_batch, "W" if part is Part.WEIGHT else "B"


def add_comms(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Insert each rank's sends, right after what they carry was computed, and receives, when the sender sends.

    Raises DeadlockError when the order cannot run.
    """
    steps: list[list[Step]] = [[] for _ in schedule.actions]
    position = [0] * schedule.num_ranks
    known: list[set[Result]] = [set() for _ in schedule.actions]  # per rank: its own results, and what it received

    def ready(rank: int) -> bool:
        own, action = known[rank], schedule.actions[rank][position[rank]]
        return all(need in own for half in halves(action) for need in needs(half, schedule.num_stages))

    def finish(rank: int, action: Action) -> None:
        # Of an overlapped pair, the backward first: its gradient can leave before its own last weight gradients.
        for half in reversed(halves(action)):
            known[rank].add(gives(half))
            if (transfer := _transfer(half, schedule)) is not None:
                send, recv, peer = transfer
                steps[rank].append(send)
                steps[peer].append(recv)
                known[peer].add(gives(half))

    def unfinished() -> list[int]:
        return [rank for rank, actions in enumerate(schedule.actions) if position[rank] < len(actions)]

    while open_ranks := unfinished():
        able = [rank for rank in open_ranks if ready(rank)]  # these run side by side, then exchange results
        if not able:
            raise DeadlockError({rank: position[rank] for rank in open_ranks})
        running = {rank: schedule.actions[rank][position[rank]] for rank in able}
        for rank, action in running.items():
            steps[rank].append(action)
            position[rank] += 1
        for rank, action in running.items():
            finish(rank, action)
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
