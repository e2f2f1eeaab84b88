"""Check a schedule. An error says which rule is broken, and shows where.

1. The rank, stage and micro-batch of every action exist, and the action is on the rank that holds its stage.
2. Every stage runs every micro-batch forward exactly once and backward exactly once: B, or I and W.
3. The order can run: no rank waits forever for a result.
4. All stages of a rank have the same ranks: they sum the gradients of their replicas in one group.
5. The order with sends and receives can run, even if they block. Every result that another rank needs is sent once,
   after it is computed, and received once, before it is used. No transfers wait for each other in a cycle.
"""

from collections import deque
from typing import NoReturn

from ..messages import plural
from .actions import Action, Backward, Forward, Part, Recv, Send, Step, members
from .comms import add_comms, carried, destination
from .grid import Cell, ScheduleError, grid
from .schedule import Schedule
from .walk import DeadlockError, Result, needs, produces, result_name

Steps = tuple[tuple[Step, ...], ...]
Queue = list[tuple[int, Result, int]]
"""The transfers of a rank: the index in its list, the result, and the other rank."""
_TRANSFERS = (Send, Recv)  # isinstance is faster with a tuple than with a union


def validate(schedule: Schedule) -> Schedule:
    """Return `schedule` unchanged if it obeys all rules. Raise ScheduleError otherwise."""
    _check_cells(schedule)
    _check_counts(schedule)
    _check_holders(schedule)
    try:
        steps = add_comms(schedule)
    except DeadlockError as deadlock:
        known = {
            produces(member)
            for rank, actions in enumerate(schedule.actions)
            for action in actions[: deadlock.waiting.get(rank, len(actions))]
            for member in members(action)
        }
        stuck = [
            f"rank {rank} needs {_missing(schedule, action, known)} before {action}"
            for rank, action in ((rank, schedule.actions[rank][i]) for rank, i in deadlock.waiting.items())
        ]
        problem = "the order deadlocks: " + "; ".join(stuck)
        raise _error(schedule, problem, list(deadlock.waiting.items())) from None
    validate_transfers(schedule, steps)
    return schedule


def validate_transfers(schedule: Schedule, steps: Steps) -> None:
    """Raise ScheduleError unless rule 5 holds for `steps`: a valid schedule's actions, sends and receives."""
    # Only transfers can block: `_check_transfers` ensures that the inputs of an action are received before it.
    queues = _check_transfers(schedule, steps)
    done = [0] * schedule.num_ranks
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        while done[rank] < len(queues[rank]):
            _, result, peer = queues[rank][done[rank]]
            if done[peer] == len(queues[peer]) or queues[peer][done[peer]][1:] != (result, rank):
                break  # the other rank has not reached this transfer
            done[rank] += 1
            done[peer] += 1
            ready.append(peer)
    stuck = [(rank, queues[rank][i][0]) for rank, i in enumerate(done) if i < len(queues[rank])]
    if stuck:
        waits = [f"rank {rank} at {steps[rank][i]}" for rank, i in stuck]
        raise _error(schedule, f"blocking transfers deadlock: {'; '.join(waits)}", stuck, steps)


def _check_cells(schedule: Schedule) -> None:
    if schedule.num_ranks != schedule.placement.num_ranks:
        raise ScheduleError(
            f"actions for {plural(schedule.num_ranks, 'rank')}, but a placement on {schedule.placement.num_ranks}"
        )
    for rank, actions in enumerate(schedule.actions):
        for step, action in enumerate(actions):
            for member in members(action):
                if not (
                    0 <= member.stage < schedule.num_stages and 0 <= member.micro_batch < schedule.num_micro_batches
                ):
                    problem = (
                        f"{member} is outside the schedule's {plural(schedule.num_stages, 'stage')} and "
                        f"{plural(schedule.num_micro_batches, 'micro-batch', 'es')}"
                    )
                elif (home := schedule.rank_of(member.stage, member.micro_batch)) != rank:
                    problem = (
                        f"{member} is on rank {rank}, but rank {home} holds stage {member.stage} for that micro-batch"
                    )
                else:
                    continue
                raise _error(schedule, problem, [(rank, step)])


def _check_counts(schedule: Schedule) -> None:
    where: dict[tuple[int, int, str], list[Cell]] = {}
    for rank, actions in enumerate(schedule.actions):
        for step, action in enumerate(actions):
            for member in members(action):
                letter = "F" if isinstance(member, Forward) else member.part.value
                where.setdefault((member.stage, member.micro_batch, letter), []).append((rank, step))
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            cells = {letter: where.get((stage, micro_batch, letter), []) for letter in "FBIW"}
            f, b, i, w = map(len, cells.values())
            if f != 1:
                problem, letters = f"{f} forwards", "F"
            elif (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                problem, letters = f"{b} B, {i} I and {w} W instead of one B, or one I and one W", "BIW"
            else:
                continue
            marked = [cell for letter in letters for cell in cells[letter]]
            # A missing action has no cell: mark the other actions of this stage and micro-batch.
            marked = marked or [cell for others in cells.values() for cell in others]
            raise _error(schedule, f"stage {stage} runs micro-batch {micro_batch} with {problem}", marked)


def _check_holders(schedule: Schedule) -> None:
    placement = schedule.placement
    for rank, (first, *others) in enumerate(placement.stages):
        for stage in others:
            if (found := placement.holders(stage)) != (expected := placement.holders(first)):
                problem = f"rank {rank} holds stage {first}, as do ranks {expected}, and stage {stage}, as do {found}"
                cells = [(rank, i) for i, one in enumerate(schedule.actions[rank]) if members(one)[0].stage == stage]
                raise _error(schedule, f"{problem}: all stages of a rank must have the same ranks", cells)


def _check_transfers(schedule: Schedule, steps: Steps) -> list[Queue]:
    """Check that every result for another rank is sent once and received once, in the right place."""

    def refuse(problem: str, *cells: Cell) -> NoReturn:
        raise _error(schedule, problem, list(cells), steps)

    if len(steps) != schedule.num_ranks:
        raise ScheduleError(f"lists for {plural(len(steps), 'rank')}, but {schedule.name} has {schedule.num_ranks}")
    endpoints: dict[Result, tuple[int, int]] = {}  # the sender and the receiver of each transferred result
    for rank, actions in enumerate(schedule.actions):
        if tuple(step for step in steps[rank] if not isinstance(step, _TRANSFERS)) != actions:
            refuse(f"the compute actions of rank {rank} are not those of the schedule")
        for member in (member for action in actions for member in members(action)):
            if (peer := destination(schedule, member)) is not None:
                endpoints[produces(member)] = rank, peer

    queues: list[Queue] = [[] for _ in steps]
    sent, received = set[Result](), set[Result]()
    for rank, row in enumerate(steps):
        known: set[Result] = set()
        for i, step in enumerate(row):
            if isinstance(step, _TRANSFERS):
                result, sends = carried(step), isinstance(step, Send)
                source, target = endpoints.get(result, (-1, -1))
                own, other, done = (source, target, sent) if sends else (target, source, received)
                if rank != own:
                    refuse(f"{step} does not belong on rank {rank}", (rank, i))
                if result in done:
                    refuse(f"rank {rank} runs {step} twice", (rank, i))
                if sends and result not in known:
                    refuse(f"rank {rank} sends {result_name(result)} before it has computed it", (rank, i))
                known.add(result)
                done.add(result)
                queues[rank].append((i, result, other))
                continue
            for member in members(step):
                for need in needs(member, schedule.num_stages):
                    if need not in known:
                        refuse(f"rank {rank} runs {member} before it has received {result_name(need)}", (rank, i))
            known.update(map(produces, members(step)))
    for result, (rank, _) in endpoints.items():
        if result not in sent:
            for i, step in enumerate(steps[rank]):
                if not isinstance(step, _TRANSFERS) and result in map(produces, members(step)):
                    refuse(f"rank {rank} never sends {result_name(result)}", (rank, i))
    return queues


def _missing(schedule: Schedule, action: Action, known: set[Result]) -> str:
    """Name the results that `action` needs and that are not `known`."""
    wanted = []
    for member in members(action):
        missing = [need for need in needs(member, schedule.num_stages) if need not in known]
        if isinstance(member, Backward) and member.part is Part.WEIGHT:
            wanted += [str(Backward(member.stage, member.micro_batch, Part.INPUT)) for _ in missing]
        else:
            wanted += map(result_name, missing)
    return " and ".join(wanted)


def _error(schedule: Schedule, problem: str, marked: list[Cell], steps: Steps | None = None) -> ScheduleError:
    return ScheduleError(f"{schedule.name}: {problem}\n{grid(schedule.actions if steps is None else steps, marked)}")
