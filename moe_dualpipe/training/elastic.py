"""Go on with another number of processes: the same batches, divided in another way.

torchrun's agents bring the processes together again after a machine was lost or added (`--nnodes 2:4`). With
`--elastic N`, the options of a run are those for N processes. They say how many sequences a step has, and which. With
another number, `choose_division` finds the nearest division, and each data-parallel rank reads its part of these same
sequences. All of this follows from the options and the number of processes, so nothing has to be remembered. The ranks
only agree first on what machines may see differently (agreement.py).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..data import GivenBatches, TextData
from ..messages import plural
from ..runtime.launch import Launch
from ..schedule import build
from .agreement import Agreed
from .checks import check_options
from .config import TrainConfig
from .division import Division, Limits, choose_division, problem
from .fitting import least_bytes, step_memory
from .resolve import RunSetup, choose_dtype, choose_kernels, choose_layout, choose_schedule


@dataclass(frozen=True, slots=True)
class Elastic:
    """A run that was divided anew. sequences: of a step, on each data-parallel rank of the division asked for.

    text: what was, what is now, and why; "" if nothing has changed.
    """

    agreed: Agreed
    division: Division
    sequences: int
    text: str


# ---- The division ----


def divide(config: TrainConfig, processes: int, agreed: Agreed) -> tuple[TrainConfig, Elastic]:
    """The options for this number of processes, in place of those for `--elastic`. Raises ValueError if none fit."""
    check_options(config)
    asked = division_asked_for(config)
    limits = Limits(config.model.num_layers, config.model.num_experts)
    if found := problem(asked, limits):
        raise ValueError(f"--elastic {asked.processes}: {found}")

    def problem_of_memory(division: Division) -> str:
        return memory_problem(divided(config, division), division, agreed.free)

    division, why = choose_division(asked, processes, limits, problem_of_memory)
    text, before = "", agreed.before or str(asked)
    if str(division) != before:
        because = f" ({why})" if why else ""
        was = "before" if agreed.before else f"asked for with --elastic {asked.processes}"
        text = f"elastic: {plural(processes, 'process', 'es')}: {division}{because}; {was}: {before}"
    sequences = asked.micro_batches * config.batch.micro_batch_size
    return divided(config, division), Elastic(agreed, division, sequences, text)


def division_asked_for(config: TrainConfig) -> Division:
    """What the options say for `--elastic` processes. Raises ValueError if they contradict each other."""
    processes = config.parallel.elastic
    assert processes is not None
    layout = choose_layout(config, Launch(0, 0, processes, processes))
    name, micro_batches = choose_schedule(config, layout.pp)
    named = config.parallel.schedule != "auto"
    return Division(name, layout.pp, layout.dp, layout.ep, micro_batches, config.parallel.num_chunks, named)


def divided(config: TrainConfig, division: Division) -> TrainConfig:
    """The options with those of `division`. With another --ep, experts start in order, and one rank moves none."""
    parallel = config.parallel
    if division.ep != parallel.ep:
        every = parallel.move_experts_every if division.ep > 1 else None
        parallel = replace(parallel, place_experts=None, move_experts_every=every)
    schedule: Any = division.schedule
    parallel = replace(
        parallel, pp=division.pp, ep=division.ep, schedule=schedule, num_chunks=division.num_chunks
    )  # fmt: skip
    batch = replace(config.batch, micro_batches=division.micro_batches)
    return replace(config, parallel=parallel, batch=batch)


def memory_problem(config: TrainConfig, division: Division, free: int | None) -> str:
    """Why the fullest rank does not fit into `free` bytes by the planner's estimate; "" if it fits, or is unknown."""
    if free is None or not config.health.check_memory:
        return ""
    launch = Launch(0, 0, division.processes, 1)
    schedule = build(division.schedule, division.pp, division.micro_batches, division.num_chunks)
    device, kernels = choose_kernels(config.compute, launch)
    dtype = choose_dtype(config.compute, device.type)
    setup = RunSetup(choose_layout(config, launch), schedule, device, dtype, kernels, compiled=False, folder=None)
    try:
        needed = max(map(least_bytes, step_memory(config, setup)))
    except ValueError:  # custom layers whose memory is not known
        return ""
    if needed <= free:
        return ""
    return f"{division} needs {needed / 2**30:,.1f} GiB on a rank, and {free / 2**30:,.1f} GiB are free"


# ---- The batches ----


def draws_of(first: int, count: int, drawn: int) -> range:
    """The draws, of `drawn` sequences each, that have sequences `first` to `first + count` of a step."""
    return range(first // drawn, -(-(first + count) // drawn))


def sequences_of_step(
    text: TextData | GivenBatches, seed: int, step: int, first: int, count: int, drawn: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences `first` to `first + count` of a step: inputs and labels, each [count, S].

    drawn: sequences that are drawn together, for one data-parallel rank of the division that was asked for. Example:
    drawn=6, first=4, count=4 -> the last two of the first draw, and the first two of the second.
    """
    draws = draws_of(first, count, drawn)
    parts = [text.batch(seed, step, rank, drawn, seq_len) for rank in draws]
    rows = slice(first - draws[0] * drawn, first - draws[0] * drawn + count)
    inputs, labels = (torch.cat(tensors)[rows] for tensors in zip(*parts, strict=True))
    return inputs, labels
