"""Divide a step over another number of processes than it was meant for, with the same micro-batches in all.

A step has micro-batches x data-parallel ranks. With fewer processes, the first choice is fewer data-parallel ranks with
more micro-batches each: nothing else changes. Where that does not come out even, the number of pipeline ranks, of ranks
that share experts, or the schedule changes, and as little as possible.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from ..messages import plural
from ..runtime.layout import divisors
from ..schedule import check_numbers, default_schedule

MOST_SUGGESTED = 3
"""How many valid numbers of processes an error names in each direction."""


class NoDivisionError(ValueError):
    """A step cannot be divided over this number of processes. With another number, it can."""


@dataclass(frozen=True, slots=True)
class Division:
    """How a step is divided over processes. micro_batches: of each data-parallel rank."""

    schedule: str
    pp: int
    dp: int
    ep: int
    micro_batches: int
    num_chunks: int | None = None
    chosen_schedule: bool = True
    """Whether the schedule was asked for by name. If not, it is the default for `pp`."""

    @property
    def processes(self) -> int:
        return self.pp * self.dp

    @property
    def total_micro_batches(self) -> int:
        return self.micro_batches * self.dp

    def __str__(self) -> str:
        experts = f", experts over {self.ep}" if self.ep > 1 else ""
        return (
            f"{self.schedule} over {self.pp} pipeline x {self.dp} data-parallel ranks{experts}, "
            f"{plural(self.micro_batches, 'micro-batch', 'es')} each"
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model allows: a stage has a layer or more, and the experts are divided evenly."""

    layers: int
    experts: int


def problem(division: Division, limits: Limits) -> str:
    """Why a step cannot be divided in this way; "" if it can."""
    try:
        stages = check_numbers(division.schedule, division.pp, division.micro_batches, division.num_chunks)
    except ValueError as error:
        return str(error)
    if stages > limits.layers:
        return f"{plural(limits.layers, 'layer')} cannot be divided over {plural(stages, 'pipeline stage')}"
    if limits.experts % division.ep or division.dp % division.ep:
        return f"--ep {division.ep} does not divide {limits.experts} experts and {division.dp} data-parallel ranks"
    return ""


def choose_division(
    asked: Division, processes: int, limits: Limits, problem_of_memory: Callable[[Division], str] = lambda _: ""
) -> tuple[Division, str]:
    """The division over `processes` that is nearest to `asked`, and why another setting than the number of
    data-parallel ranks had to change ("": none had to).

    problem_of_memory: why a division does not fit into memory; "" if it does. It is not called for `asked` itself.
    Raises NoDivisionError, with numbers of processes that would do, if there is no such division.
    """
    if processes == asked.processes:
        return asked, ""
    why = unchanged_problem(asked, processes, limits)
    too_large = ""
    for division in divisions(asked, processes, limits):
        if not (found := problem_of_memory(division)):
            return division, why or too_large
        too_large = too_large or found
    if too_large:
        raise NoDivisionError(f"{too_large}, and no other division of {_over(asked, processes)} needs less")
    would = ", ".join(map(str, fitting_numbers(asked, processes, limits)))
    raise NoDivisionError(f"no schedule can divide {_over(asked, processes)}: use {would} processes ({why})")


def divisions(asked: Division, processes: int, limits: Limits) -> list[Division]:
    """All valid divisions with the micro-batches of `asked` in all, the nearest first.

    The distance is the product of the ratios by which pp and ep change, then whether the schedule does.
    """
    found = [d for d in _candidates(asked, processes, limits) if not problem(d, limits)]
    return sorted(found, key=lambda d: _distance(asked, d))


def unchanged_problem(asked: Division, processes: int, limits: Limits) -> str:
    """Why only the number of data-parallel ranks cannot change; "" if it can."""
    if processes % asked.pp:
        return f"--pp {asked.pp} does not divide {plural(processes, 'process', 'es')}"
    dp = processes // asked.pp
    if asked.total_micro_batches % dp:
        return f"{asked.total_micro_batches} micro-batches cannot be divided over {plural(dp, 'data-parallel rank')}"
    return problem(replace(asked, dp=dp, micro_batches=asked.total_micro_batches // dp), limits)


def fitting_numbers(asked: Division, processes: int, limits: Limits) -> list[int]:
    """Some numbers of processes that have a division, the nearest to `processes` in each direction."""
    most = 2 * max(asked.processes, processes)
    fewer = [n for n in range(processes - 1, 0, -1) if divisions(asked, n, limits)][:MOST_SUGGESTED]
    more = [n for n in range(processes + 1, most + 1) if divisions(asked, n, limits)][:MOST_SUGGESTED]
    return sorted(fewer + more)


def _candidates(asked: Division, processes: int, limits: Limits) -> Iterator[Division]:
    for pp in divisors(processes):
        dp = processes // pp
        if asked.total_micro_batches % dp:
            continue
        for schedule in _schedules(asked, pp):
            chunks = asked.num_chunks if schedule == asked.schedule else None
            for ep in divisors(math.gcd(dp, limits.experts)):
                micro_batches = asked.total_micro_batches // dp
                yield replace(asked, schedule=schedule, pp=pp, dp=dp, ep=ep, micro_batches=micro_batches,
                              num_chunks=chunks)  # fmt: skip


def _schedules(asked: Division, pp: int) -> list[str]:
    """The schedules to try: the one asked for, then dualpipev, which takes any number of ranks, then 1f1b, which needs
    the fewest layers and micro-batches."""
    first = asked.schedule if asked.chosen_schedule else default_schedule(pp)
    return [*dict.fromkeys((first, "dualpipev", "1f1b"))]


def _distance(asked: Division, division: Division) -> tuple[Fraction, int, bool, int, int]:
    ratio = _ratio(asked.pp, division.pp) * _ratio(asked.ep, division.ep)
    return (
        ratio, _schedules(asked, division.pp).index(division.schedule), division.pp != asked.pp, division.pp,
        division.ep,
    )  # fmt: skip


def _ratio(a: int, b: int) -> Fraction:
    return Fraction(max(a, b), min(a, b))


def _over(asked: Division, processes: int) -> str:
    return f"{asked.total_micro_batches} micro-batches over {plural(processes, 'process', 'es')}"
