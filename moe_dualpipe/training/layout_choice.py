"""How the processes of a launch share a run: the layout, the schedule and the size of a micro-batch.

What was typed must fit. A run that goes on with other processes takes the nearest layout that fits: the sequences of a
step, and so what is learned, do not depend on it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..messages import plural
from ..models.partition import check_stages
from ..runtime.layout import Layout, check_ep_divides_experts, check_ep_divides_ranks, divisors, layouts
from ..schedule import Schedule, build, check_micro_batches, check_numbers, default_schedule
from .config import TrainConfig

DEFAULT_SIZE = 2
"""Sequences of a micro-batch, unless the schedule needs more micro-batches."""


class NoLayoutError(ValueError):
    """No layout fits this number of processes. Another number may have one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout, and what one data-parallel rank runs. changed: why it is not the one asked for; "" if it is."""

    layout: Layout
    name: str
    micro_batches: int
    micro_batch_size: int
    changed: str = ""

    @property
    def schedule(self) -> Schedule:
        return build(self.name, self.layout.pp, self.micro_batches, self.layout.chunks)

    def __str__(self) -> str:
        experts = f", experts over {self.layout.ep}" if self.layout.ep > 1 else ""
        return (
            f"{self.name} over {self.layout.pp} pipeline x {self.layout.dp} data-parallel ranks{experts}, "
            f"{plural(self.micro_batches, 'micro-batch', 'es')} of {self.micro_batch_size} each"
        )


def choose(
    config: TrainConfig, processes: int, strict: bool = True, problem: Callable[[Choice], str] = lambda _: ""
) -> Choice:
    """The choice for this number of processes.

    strict: raise ValueError if what `config` asks for does not fit. Otherwise, choose the nearest layout that fits, by
    the ratios in which pp and ep change. problem: why a choice cannot run, such as too little memory; "" if it can.
    Raises NoLayoutError if nothing fits; unless memory is the reason, it names numbers of processes that would do.
    """
    try:
        asked = _asked(config, processes)
    except ValueError as error:
        if strict:
            raise
        why = str(error)
    else:
        if strict or not (why := problem(asked)):
            return asked
    found = _nearest_first(config, processes)
    for one in found:
        if not problem(one):
            return replace(one, changed=why)
    if found:
        raise NoLayoutError(f"no layout fits {plural(processes, 'process', 'es')}: {problem(found[0])}")
    fitting = [n for n in range(1, 2 * processes + 1) if any(_nearest_first(config, n))]
    near = sorted(sorted(fitting, key=lambda n: abs(n - processes))[:4])
    use = f": use {' or '.join(map(str, near))} processes" if near else ""
    raise NoLayoutError(f"no layout fits {plural(processes, 'process', 'es')}{use} ({why})")


def _asked(config: TrainConfig, processes: int) -> Choice:
    parallel, experts = config.parallel, config.model.num_experts
    ep, pp = parallel.ep, parallel.pp
    check_ep_divides_experts(ep, experts)
    if pp is None:
        if processes % ep:
            whole = plural(processes, "process", "es")
            raise ValueError(f"--ep {ep} does not divide the {whole}: start a multiple of {ep} processes")
        pp = processes // ep
    if processes % pp:
        raise ValueError(
            f"--pp {pp} does not divide the number of processes, {processes}: "
            f"use --pp {', '.join(map(str, divisors(processes)))}, or start a multiple of {pp} processes"
        )
    dp = processes // pp
    ranks = f" ({plural(processes, 'process', 'es')} / {plural(pp, 'pipeline rank')})"
    check_ep_divides_ranks(ep, experts, dp, ranks)
    return _choice(config, Layout(pp, dp, ep), parallel.schedule)


def _nearest_first(config: TrainConfig, processes: int) -> list[Choice]:
    wanted, found = config.parallel, []
    pp, ep, size = wanted.pp or processes // wanted.ep or 1, wanted.ep, config.batch.micro_batch_size or DEFAULT_SIZE
    for layout in layouts(processes, config.model.num_layers, config.model.num_experts):
        distance = abs(math.log(layout.pp / pp)) + abs(math.log(layout.ep / ep))
        for order, name in enumerate(dict.fromkeys((wanted.schedule, "auto", "dualpipev", "1f1b"))):
            for smaller in divisors(size):
                one = replace(config, batch=replace(config.batch, micro_batch_size=smaller))
                try:
                    found.append((distance, order, layout.pp, -smaller, _choice(one, layout, name)))
                except ValueError:
                    continue
    return [one[-1] for one in sorted(found, key=lambda one: one[:-1])]


def _choice(config: TrainConfig, layout: Layout, name: str) -> Choice:
    """Raises ValueError for a batch that the layout cannot divide, or that the schedule cannot run."""
    batch, pp, dp = config.batch, layout.pp, layout.dp
    name = default_schedule(pp) if name == "auto" else name
    if batch.batch_size % dp:
        near = " or ".join(str(n) for n in (batch.batch_size // dp * dp, -(-batch.batch_size // dp) * dp) if n)
        ranks = plural(dp, "data-parallel rank")
        raise ValueError(f"--batch-size {batch.batch_size} cannot be divided over {ranks}: use --batch-size {near}")
    own, sizes = batch.batch_size // dp, [batch.micro_batch_size or DEFAULT_SIZE]
    if batch.micro_batch_size is None:
        sizes = [size for size in range(DEFAULT_SIZE, 0, -1) if own % size == 0]
    for size in sizes:
        if own % size:
            each = f" on each of {dp} data-parallel ranks" if dp > 1 else ""
            what = f"--micro-batch-size {size} does not divide {plural(own, 'sequence')}{each}"
            raise ValueError(f"{what}: use --micro-batch-size {' or '.join(map(str, divisors(own)))}")
        try:
            check_micro_batches(name, pp, own // size, lambda count: f"--batch-size {count * size * dp}")  # noqa: B023
            num_stages = check_numbers(name, pp, own // size, config.parallel.num_chunks)
        except ValueError:
            if size == sizes[-1]:
                raise
            continue
        check_stages(num_stages, config.model.num_layers)
        return Choice(replace(layout, chunks=config.parallel.num_chunks), name, own // size, size)
    raise AssertionError("a micro-batch may have one sequence")
