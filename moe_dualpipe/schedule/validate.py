"""The laws that every schedule obeys. An error names the rule that is broken and draws where.

1. Every rank, stage and micro-batch of an action exists, and the action stands on the rank that holds its stage.
2. Every stage runs every micro-batch forward exactly once, and backward exactly once: B, or I and W.
3. The order can run: nothing comes before what it needs, on its own rank or on another, so nobody waits forever.
"""

from collections import Counter
from collections.abc import Collection

from .actions import Action, Forward, Part, halves
from .comms import add_comms
from .schedule import Schedule
from .walk import DeadlockError, needs


class ScheduleError(ValueError):
    """A schedule breaks a law; the message ends with the rank x step grid, the offending cells marked `>like this<`."""


def validate(schedule: Schedule) -> Schedule:
    """Return `schedule` unchanged if it obeys all laws; raise ScheduleError otherwise."""
    _check_cells(schedule)
    _check_counts(schedule)
    try:
        add_comms(schedule)
    except DeadlockError as deadlock:
        stuck = [
            f"rank {rank} waits before {schedule.actions[rank][i]} for {_missing(schedule, rank, i)}"
            for rank, i in deadlock.waiting.items()
        ]
        problem = "the order cannot run: " + "; ".join(stuck)
        raise ScheduleError(_drawn(schedule, problem, list(deadlock.waiting.items()))) from None
    return schedule


def grid(actions: tuple[tuple[Action, ...], ...], marked: Collection[tuple[int, int]] = ()) -> str:
    """Draw `actions` as text, one line per rank and one column per step; `marked` lists (rank, step) cells."""
    rows = [
        [f">{action}<" if (rank, step) in marked else str(action) for step, action in enumerate(row)]
        for rank, row in enumerate(actions)
    ]
    length = max(map(len, rows), default=0)
    widths = [max((len(row[step]) for row in rows if step < len(row)), default=0) for step in range(length)]
    return "\n".join(
        f"rank {rank:<3}" + " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        for rank, row in enumerate(rows)
    )


def _check_cells(schedule: Schedule) -> None:
    if schedule.num_ranks != schedule.placement.num_ranks:
        raise ScheduleError(
            f"actions for {schedule.num_ranks} ranks, but a placement on {schedule.placement.num_ranks}"
        )
    for rank, actions in enumerate(schedule.actions):
        for step, action in enumerate(actions):
            for half in halves(action):
                if not (0 <= half.stage < schedule.num_stages and 0 <= half.micro_batch < schedule.num_micro_batches):
                    problem = (
                        f"{half} is outside the schedule's {schedule.num_stages} stages and "
                        f"{schedule.num_micro_batches} micro-batches"
                    )
                elif (home := schedule.rank_of(half.stage, half.micro_batch)) != rank:
                    problem = (
                        f"{half} stands on rank {rank}, but stage {half.stage} of that micro-batch is on rank {home}"
                    )
                else:
                    continue
                raise ScheduleError(_drawn(schedule, problem, [(rank, step)]))


def _check_counts(schedule: Schedule) -> None:
    count: Counter[tuple[int, int, str]] = Counter()
    where: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for rank, actions in enumerate(schedule.actions):
        for step, action in enumerate(actions):
            for half in halves(action):
                letter = "F" if isinstance(half, Forward) else half.part.value
                key = half.stage, half.micro_batch, letter
                count[key] += 1
                where.setdefault(key, []).append((rank, step))
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            f, b, i, w = (count[stage, micro_batch, letter] for letter in ("F", *(part.value for part in Part)))
            if f != 1:
                problem, letters = f"{f} forwards", "F"
            elif (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                problem, letters = f"{b} B, {i} I and {w} W instead of one B, or one I and one W", "BIW"
            else:
                continue
            cells = [cell for letter in letters for cell in where.get((stage, micro_batch, letter), [])]
            raise ScheduleError(_drawn(schedule, f"stage {stage} runs micro-batch {micro_batch} with {problem}", cells))


def _missing(schedule: Schedule, rank: int, step: int) -> str:
    """The results that the action at (rank, step) needs and that nothing before it on its own rank provides."""
    before = {
        (half.stage, half.micro_batch, "F" if isinstance(half, Forward) else "B")
        for action in schedule.actions[rank][:step]
        for half in halves(action)
    }
    wanted = [
        f"{stage}{letter}{micro_batch}"
        for half in halves(schedule.actions[rank][step])
        for stage, micro_batch, letter in needs(half, schedule.num_stages)
        if (stage, micro_batch, letter) not in before
    ]
    return " and ".join(wanted)


def _drawn(schedule: Schedule, problem: str, marked: list[tuple[int, int]]) -> str:
    return f"{schedule.name}: {problem}\n{grid(schedule.actions, marked)}"
