"""How the processes of a launch share a run: the layout, the schedule and the size of a micro-batch.

What was typed must fit; the error names what fits instead, found by trying. A run that goes on with other processes
takes the nearest layout that fits: the sequences of a step, and so what is learned, do not depend on it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from ..messages import plural, printable, quoted, with_suggestions, without_suggestions
from ..models.context_parallel import check_context
from ..models.partition import check_layers_of_stages, check_stages
from ..runtime.layout import Layout, check_cp, check_ep, divisors, layouts
from ..schedule import FILL, Schedule, build, default_schedule
from ..schedule.schedule_file import is_file_name, read_schedule
from .config import TrainConfig

DEFAULT_SIZE = 2
"""Sequences of a micro-batch, unless the schedule needs more micro-batches."""
WHOLE_BATCH_TOKENS = 16_384
"""One process overlaps nothing, so its micro-batches are as large as the batch, up to this number of tokens."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout, and what one data-parallel rank runs. changed: why it is not the one asked for; "" if it is."""

    layout: Layout
    name: str
    schedule: Schedule
    micro_batch_size: int
    changed: str = ""

    def at(self, rank: int) -> "Choice":
        """The choice, as the process with this rank runs it."""
        return replace(self, layout=replace(self.layout, rank=rank))


def choose(
    config: TrainConfig, processes: int, strict: bool = True, problem: Callable[[Choice], str] = lambda _: ""
) -> Choice:
    """The choice for this number of processes.

    strict: raise ValueError if what `config` asks for does not fit. Otherwise, choose the nearest layout that fits, by
    the ratios in which pp and ep change. problem: why a choice cannot run, such as too little memory; "" if it can.
    Errors name the nearest layout that fits, if there is one; if memory is the reason, `problem` does.
    """
    asked = None
    _read.cache_clear()
    if is_file_name(config.parallel.schedule):
        _read(config.parallel.schedule)  # an invalid file is an error in every layout
    try:
        asked = _asked(config, processes, problem)
        why = problem(asked)
    except ValueError as error:
        why = without_suggestions(str(error))
    if asked and not why:
        return asked
    if asked and strict:
        raise ValueError(why)
    if not strict:  # a list of layers is for the stages of one layout
        config = replace(config, parallel=replace(config.parallel, layers=None))
    best = next((one for one in _nearest_first(config, processes) if not problem(one)), None)
    if best and not strict:
        return replace(best, changed=why)
    raise ValueError(with_suggestions(why, [_typed(config, best, processes)] if best else []))


def _asked(config: TrainConfig, processes: int, problem: Callable[[Choice], str]) -> Choice:
    parallel, typed, whole = config.parallel, config.batch.micro_batch_size, plural(processes, "process", "es")
    check_ep(parallel.ep, config.model.num_experts)
    for option, ranks in (("--pp", parallel.pp), ("--cp", parallel.cp), ("--ep", parallel.ep)):
        if processes % (ranks or 1):
            raise ValueError(f"{option} {ranks} does not divide {whole}")
    pp = parallel.pp or processes // math.lcm(parallel.ep, parallel.cp) or 1
    check_cp(parallel.cp, processes // pp)
    layout = Layout(pp, processes // (pp * parallel.cp), parallel.ep, cp=parallel.cp)
    check_ep(layout.ep, config.model.num_experts, layout.replicas, f" ({whole} / {plural(pp, 'pipeline rank')})")
    if not typed and is_file_name(parallel.schedule):
        typed = config.batch.batch_size // layout.dp // _read(parallel.schedule).num_micro_batches
    for size in [] if typed else _default_sizes(config, layout):
        with suppress(ValueError):
            choice = _choice(config, layout, parallel.schedule, size)
            if size == DEFAULT_SIZE or not problem(choice):
                return choice
    return _choice(config, layout, parallel.schedule, typed or 1)


def _default_sizes(config: TrainConfig, layout: Layout) -> list[int]:
    """The sizes of a micro-batch to try, best first."""
    batch = config.batch
    if layout.num_ranks > 1 or config.parallel.schedule != "auto":
        return [DEFAULT_SIZE]
    most = WHOLE_BATCH_TOKENS // batch.seq_len
    return [*(size for size in reversed(divisors(batch.batch_size)) if DEFAULT_SIZE < size <= most), DEFAULT_SIZE]


def _typed(config: TrainConfig, choice: Choice, processes: int) -> str:
    """The options that lead to `choice` beside those of `config`."""
    parallel, layout = config.parallel, choice.layout
    schedule, pp = parallel.schedule, parallel.pp or processes // math.lcm(layout.ep, layout.cp)
    if schedule == "auto":
        schedule = default_schedule(layout.pp, max(layout.ep, layout.cp))
    options = (
        ("--pp", layout.pp, pp), ("--ep", layout.ep, parallel.ep), ("--cp", layout.cp, parallel.cp),
        ("--schedule", choice.name, schedule),
        ("--micro-batch-size", choice.micro_batch_size, config.batch.micro_batch_size or choice.micro_batch_size),
    )  # fmt: skip
    return " ".join(f"{option} {value}" for option, value, before in options if value != before)


def _nearest_first(config: TrainConfig, processes: int) -> Iterator[Choice]:
    """What can run, by the ratios in which pp and ep change, and for a layout by schedule and micro-batch size."""
    wanted, model = config.parallel, config.model
    pp = wanted.pp or processes // math.lcm(wanted.ep, wanted.cp) or 1
    size = config.batch.micro_batch_size or DEFAULT_SIZE
    names = dict.fromkeys((wanted.schedule, "auto", "dualpipev", "1f1b", "interleaved_1f1b"))

    def distance(layout: Layout) -> float:
        return sum(abs(math.log(ratio)) for ratio in (layout.pp / pp, layout.ep / wanted.ep, layout.cp / wanted.cp))

    cps = divisors(wanted.cp)
    found = [one for cp in cps for one in layouts(processes, model.num_layers, model.num_experts, cp)]
    near = sorted(found, key=distance)
    for layout, name, smaller in product(near, names, reversed(divisors(size))):
        with suppress(ValueError):
            yield _choice(config, layout, name, smaller)


def _choice(config: TrainConfig, layout: Layout, name: str, size: int) -> Choice:
    """Raises ValueError for a batch that the layout cannot divide, or that the schedule cannot run."""
    total, pp, dp = config.batch.batch_size, layout.pp, layout.dp
    check_context(layout.cp, config.batch.seq_len)
    if name.removesuffix(FILL) == "auto":
        name = default_schedule(pp, max(layout.ep, layout.cp)) + name.removeprefix("auto")
    if total % dp:
        raise ValueError(f"--batch-size {total} cannot be divided over {plural(dp, 'data-parallel rank')}")
    if (own := total // dp) % size:
        each = f" on each of {dp} data-parallel ranks" if dp > 1 else ""
        raise ValueError(f"--micro-batch-size {size} does not divide {plural(own, 'sequence')}{each}")
    schedule = _schedule(name, pp, own // size, config.parallel.num_chunks)
    check_stages(schedule.num_stages, config.model.num_layers)
    if layers := listed_layers(config):
        check_layers_of_stages(layers, schedule.num_stages, config.model.num_layers)
    return Choice(replace(layout, chunks=config.parallel.num_chunks), name, schedule, size)


def _schedule(name: str, pp: int, micro_batches: int, chunks: int | None) -> Schedule:
    if not is_file_name(name):
        return build(name.removesuffix(FILL), pp, micro_batches, chunks)
    schedule = _read(name)
    if chunks is not None:
        raise ValueError(f"--schedule {printable(name)} defines the stages of a rank: remove parallel.num_chunks")
    if (schedule.num_ranks, schedule.num_micro_batches) != (pp, micro_batches):
        ranks, own = plural(schedule.num_ranks, "pipeline rank"), schedule.num_micro_batches
        found = f"is for {ranks} and {plural(own, 'micro-batch', 'es')}: got {pp} and {micro_batches}"
        raise ValueError(f"--schedule {printable(name)} {found}")
    return schedule


@cache
def _read(name: str) -> Schedule:
    """The schedule in a file, which is read once for a choice."""
    return read_schedule(Path(name))[0]


def listed_layers(config: TrainConfig) -> tuple[int, ...]:
    """The numbers in `parallel.layers`; none if they are not listed there. Raises ValueError for other text."""
    text = config.parallel.layers
    if text in (None, "auto"):
        return ()
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"parallel.layers must be auto or numbers such as 4,4,3,3: got {quoted(text, 60)}") from None
