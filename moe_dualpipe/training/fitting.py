"""What a run needs at the peak of a step, and the nearest division of the same batch that needs less.

A division that needs too much memory is refused before anything is allocated. What to use instead is searched among the
options that do not change what is learned: recomputation, the fused loss, pipeline and expert ranks, smaller
micro-batches, and last, more processes. The number of sequences in a step stays the same, unless it is too small for
them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from typing import Any

from ..models import ModelConfig
from ..models.config import RECOMPUTE, Recompute
from ..runtime.layout import divisors
from ..schedule import Schedule, check_numbers, default_schedule
from ..tools.planner import MicroBatch, ModelShape, PeakMemory, full_schedule, peak_memory, shape_of
from .config import TrainConfig
from .resolve import RunSetup

MARGIN = 0.05
"""Predictions of activations may be that much too high (tests/training/test_measured_memory.py)."""
MOST_PROCESSES = 256
"""Up to how many times as many processes are suggested."""


@dataclass(frozen=True, slots=True)
class Division:
    """How a run is divided, and what it recomputes."""

    processes: int
    pp: int
    ep: int
    micro_batch_size: int
    recompute: Recompute
    fused_loss: bool

    @property
    def dp(self) -> int:
        return self.processes // self.pp

    def distance(self, other: "Division") -> float:
        """How much has changed: one for each option, and less for the size of the change."""
        pairs = [(self.pp, other.pp), (self.ep, other.ep), (self.micro_batch_size, other.micro_batch_size)]
        kinds = abs(RECOMPUTE.index(self.recompute) - RECOMPUTE.index(other.recompute))
        sizes = sum(1 + abs(log2(a / b)) / 10 for a, b in pairs if a != b)
        return sizes + (kinds > 0) * (0.5 + kinds / 10) + 0.4 * (self.fused_loss != other.fused_loss)

    def options(self, other: "Division") -> str:
        """The options of this division that differ from those of `other`, as typed."""
        words = []
        for name in ("pp", "ep", "micro_batch_size", "recompute"):
            if getattr(self, name) != getattr(other, name):
                words.append(f"--{name.replace('_', '-')} {getattr(self, name)}")
        words += ["--fused-loss"] * (self.fused_loss and not other.fused_loss)
        return " ".join(words)


def step_memory(config: TrainConfig, setup: RunSetup) -> tuple[PeakMemory, ...]:
    """What each pipeline rank needs at the peak of a step. Raises ValueError for custom attention and blocks."""
    return _memory(config.model, config, setup, division_of(config, setup), setup.schedule)


def division_of(config: TrainConfig, setup: RunSetup) -> Division:
    layout, batch = setup.layout, config.batch
    return Division(
        layout.pp * layout.dp, layout.pp, layout.ep, batch.micro_batch_size, config.compute.recompute,
        config.compute.fused_loss,
    )  # fmt: skip


def _memory(
    model: ModelConfig | ModelShape, config: TrainConfig, setup: RunSetup, division: Division, schedule: Schedule
) -> tuple[PeakMemory, ...]:
    """The memory of each pipeline rank of a division of `model`, with the other options of `config`."""
    element = setup.dtype.itemsize
    batch = MicroBatch(
        division.micro_batch_size, config.batch.seq_len, element, division.ep, division.recompute, division.fused_loss,
        plain=setup.kernels == "reference",
    )  # fmt: skip
    return peak_memory(
        model, schedule, batch, division.dp, "fp32" if element == 4 else "bf16", config.parallel.zero,
        gradient_copies=2 if setup.device.type == "cpu" else 1,
    )  # fmt: skip


def nearest_division(config: TrainConfig, setup: RunSetup, free: int) -> tuple[str, int] | None:
    """The options of the nearest division whose fullest rank needs at most `free` bytes, and these bytes.

    The text begins with the number of processes if more are needed. If a step has too few sequences for them, it has as
    many times more, and the text ends with how many times. None if there is none.
    """
    now = division_of(config, setup)
    sequences = setup.schedule.num_micro_batches * now.micro_batch_size * now.dp
    shape, factors = shape_of(config.model), [2**n for n in range(MOST_PROCESSES.bit_length())]
    for factor, times in [*((factor, 1) for factor in factors), *((factor, factor) for factor in factors[1:])]:
        needs = partial(_division_needs, config, setup, shape, sequences=times * sequences, free=free)
        possible: dict[tuple[int, int], bool] = {}  # whether the smallest division of so many ranks fits
        for one in sorted(_divisions(now, factor, config.model), key=now.distance):
            ranks = one.pp, one.ep
            if ranks not in possible:
                least = replace(one, micro_batch_size=1, recompute=RECOMPUTE[-1], fused_loss=True)
                possible[ranks] = needs(least) is not None
            if not possible[ranks] or (found := needs(one)) is None:
                continue
            micro_batches, needed = found
            more = f"{one.processes} processes with " if factor > 1 else ""
            count = f" --micro-batches {micro_batches}" * (micro_batches != setup.schedule.num_micro_batches)
            pp = f"--pp {one.pp} " * (factor > 1 and one.pp == now.pp)
            larger = f" ({times} times the sequences in a step)" * (times > 1)
            return f"{more}{pp}{one.options(now)}{count}{larger}".strip(), needed
    return None


def _division_needs(
    config: TrainConfig, setup: RunSetup, shape: ModelShape, one: Division, sequences: int, free: int
) -> tuple[int, int] | None:
    """The micro-batches of a division that runs `sequences` in a step, and the bytes that its fullest rank needs.

    None if it needs more than `free`, or cannot run them.
    """
    # Weights and gradients of the average rank: a quick answer for most divisions of a model that is too large.
    parameters = (shape.dense_parameters + shape.expert_parameters / one.ep) / one.pp
    micro_batches, rest = divmod(sequences, one.micro_batch_size * one.dp)
    if rest or (setup.dtype.itemsize + 4) * parameters > free:
        return None
    needed = 0
    try:
        schedule = _schedule(config, one.pp, micro_batches)
        # What a shape needs is a little less, and quick to compute.
        for model in (shape, config.model):
            needed = max(_least(rank, config, setup) for rank in _memory(model, config, setup, one, schedule))
            if needed > free:
                return None
    except ValueError:  # this schedule or model cannot be divided so
        return None
    return micro_batches, needed


def _schedule(config: TrainConfig, pp: int, micro_batches: int) -> Schedule:
    """With the peak memory of so many micro-batches. Raises ValueError for numbers that the schedule cannot run."""
    name = default_schedule(pp) if config.parallel.schedule == "auto" else config.parallel.schedule
    check_numbers(name, pp, micro_batches, config.parallel.num_chunks)
    return full_schedule(name, pp, micro_batches, config.parallel.num_chunks)


def least_bytes(rank: PeakMemory) -> int:
    """Bytes of a rank in a step, at the lower end of the prediction."""
    return rank.total - round(MARGIN * (rank.activations + rank.temporary))


def _least(rank: PeakMemory, config: TrainConfig, setup: RunSetup) -> int:
    """`least_bytes`, or on a CPU those of a save with a copy of the state."""
    step = least_bytes(rank)
    if setup.device.type != "cpu" or not config.checkpoint.save_async:
        return step
    copy = rank.optimizer * 12 // (8 if setup.dtype.itemsize == 4 else 12)  # weights and two moments in fp32
    return max(step, rank.weights + rank.optimizer + copy)


def _divisions(now: Division, factor: int, model: ModelConfig) -> Iterator[Division]:
    """All divisions of `factor` times as many processes."""
    processes = now.processes * factor
    kinds: Any = RECOMPUTE[RECOMPUTE.index(now.recompute) :]
    for pp in divisors(processes):
        for ep in divisors(processes // pp):
            if model.num_experts % ep == 0:
                yield from (
                    Division(processes, pp, ep, size, kind, fused)
                    for size in divisors(now.micro_batch_size)
                    for kind in kinds
                    for fused in {now.fused_loss, True}
                )
