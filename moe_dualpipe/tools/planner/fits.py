"""Does a training run fit into memory, and if not, which change makes it fit?

`peak_memory` predicts each pipeline rank from the options alone. So every rank of a run comes to the same answer before
anything is allocated, without asking the others. Activations count at the lower end of their prediction, so that a run
that fits is not refused. With Muon and with frozen parameters, the prediction is a lower bound.

What to use instead does not change what is learned. It is the first that fits of a short list: less saved on the same
ranks, another layout of them, and then more ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING

import torch

from ...models.config import RECOMPUTE
from ...models.costs import shape_of
from ...runtime.layout import Layout, layouts
from ...schedule import Schedule, check_numbers, default_schedule
from .activations import MicroBatch
from .peak import PeakMemory, peak_memory
from .workload_memory import full_schedule

if TYPE_CHECKING:
    from ...training.config import TrainConfig

MARGIN = 0.05
"""Predictions of activations may be that much too high (tests/training/test_measured_memory.py)."""
FACTORS = [2**n for n in range(9)]
"""How many times as many ranks are tried."""


def step_memory(
    config: "TrainConfig", schedule: Schedule, layout: Layout, dtype: torch.dtype, device: torch.device
) -> tuple[PeakMemory, ...]:
    """What each pipeline rank needs at the peak of a step. Activations are 0 on a rank with frozen parameters, with
    which less is saved.

    Raises ValueError for custom attention and blocks, and for layers that cannot be built on the meta device.
    """
    cpu, compute = device.type == "cpu", config.compute
    size = _sequences(config) // (layout.dp * schedule.num_micro_batches)
    plain = compute.kernels == "reference" or (compute.kernels == "auto" and cpu)
    batch = MicroBatch(
        size, config.batch.seq_len, ep=layout.ep, recompute=compute.recompute, fused_loss=compute.fused_loss,
        plain=plain,
    )  # fmt: skip
    ranks = peak_memory(
        config.model, schedule, batch, layout.dp, "fp32" if dtype.itemsize == 4 else "bf16", config.parallel.zero,
        gradient_copies=2 if cpu else 1, moments=1 if config.optim.name == "muon" else 2,
        frozen=lambda name: any(fnmatchcase(name, pattern) for pattern in config.freeze),
    )  # fmt: skip
    partly = [rank.gradients < 4 * (rank.dense_parameters + rank.expert_parameters) for rank in ranks]
    return tuple(
        replace(rank, activations=0, temporary=0) if frozen else rank
        for rank, frozen in zip(ranks, partly, strict=True)
    )


def memory_line(
    config: "TrainConfig", schedule: Schedule, layout: Layout, dtype: torch.dtype, device: torch.device
) -> str:
    """What the fullest rank needs, by parts; "" if that is unknown."""
    try:
        needs = max(step_memory(config, schedule, layout, dtype, device), key=lambda rank: rank.total)
    except ValueError:
        return ""
    parts = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in needs.parts().items())
    return f"memory of a step: {needs.total / 2**20:,.1f} MB on the fullest rank ({parts})"


def memory_problem(
    config: "TrainConfig", schedule: Schedule, layout: Layout, dtype: torch.dtype, device: torch.device, free_bytes: int
) -> str:
    """One line with the numbers and the way out if a rank needs more than `free_bytes`; "" if all fit, or if what they
    need is unknown.

    free_bytes: what each rank may use, the least of all ranks. On CPUs, the ranks of a machine share its memory.
    """
    try:
        number, needs = _fullest(config, schedule, layout, dtype, device)
    except ValueError:
        return ""
    if sum(needs.values()) <= free_bytes:
        return ""
    use = _way_out(config, schedule, layout, dtype, device, free_bytes) or "a smaller model or more ranks"
    parts = ", ".join(f"{name} {_text(size)}" for name, size in needs.items())
    return (
        f"pipeline rank {number} needs {_text(sum(needs.values()))} ({parts}), and {_text(free_bytes)} are free: "
        f"use {use}, or --set health.check_memory=false to start anyway"
    )


def _way_out(
    config: "TrainConfig", schedule: Schedule, layout: Layout, dtype: torch.dtype, device: torch.device, limit: int
) -> str:
    """The first change with which no rank needs more than `limit`, as typed, and what the fullest then needs."""
    shape, ways = (
        shape_of(config.model),
        [*_savings(config, _sequences(config) // (layout.dp * schedule.num_micro_batches))],
    )
    for ranks in (layout.num_ranks * factor for factor in FACTORS):
        possible = layouts(ranks, config.model.num_layers, config.model.num_experts)
        for one in sorted(possible, key=lambda one: (one.pp != layout.pp) + (one.ep != layout.ep)):
            # Weights and gradients of the average rank: a quick answer for most layouts of a model that is too large.
            least = (dtype.itemsize + 4) * (shape.dense_parameters + shape.expert_parameters / one.ep) / one.pp
            if least > limit or _needs(*ways[-1][1:], one, dtype, device) > limit:
                continue
            more = f"{ranks} processes with " * (ranks > layout.num_ranks)
            more += f"--pp {one.pp} --ep {one.ep} " * ((one.pp, one.dp, one.ep) != (layout.pp, layout.dp, layout.ep))
            fit = ((words, _needs(changed, size, one, dtype, device)) for words, changed, size in ways)
            words, needs = next((words, needs) for words, needs in fit if needs <= limit)
            return f"{more}{' '.join(words)}".strip() + f", which needs {_text(round(needs))}"
    return ""


def _savings(config: "TrainConfig", size: int) -> Iterator[tuple[list[str], "TrainConfig", int]]:
    """What saves memory on the same ranks, from nothing to everything: as typed, the options, and the sequences of a
    micro-batch."""
    compute, save = config.compute, config.checkpoint
    kinds, sizes = RECOMPUTE[RECOMPUTE.index(compute.recompute) :], dict.fromkeys((size, 1))
    fused, copies = dict.fromkeys((compute.fused_loss, True)), dict.fromkeys((save.save_async, False))
    for each, loss, kind, copy in product(sizes, fused, kinds, copies):
        words = [f"--recompute {kind}"] * (kind != compute.recompute) + ["--fused-loss"] * (loss != compute.fused_loss)
        words += [f"--micro-batch-size {each}"] * (each != size)
        words += ["--set checkpoint.save_async=false"] * (copy != save.save_async)
        changed = replace(compute, recompute=kind, fused_loss=loss)
        yield words, replace(config, compute=changed, checkpoint=replace(save, save_async=copy)), each


def _needs(config: "TrainConfig", size: int, layout: Layout, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes of the fullest rank; infinite if the schedule or the model cannot be divided so."""
    micro_batches, rest = divmod(_sequences(config), size * layout.dp)
    chosen, chunks = config.parallel.schedule, config.parallel.num_chunks
    name = default_schedule(layout.pp) if chosen == "auto" else chosen
    try:
        check_numbers(name, layout.pp, 0 if rest else micro_batches, chunks)
        schedule = full_schedule(name, layout.pp, micro_batches, chunks)
        batch = replace(config.batch, batch_size=size * layout.dp * schedule.num_micro_batches)
        return sum(_fullest(replace(config, batch=batch), schedule, layout, dtype, device)[1].values())
    except ValueError:
        return math.inf


def _fullest(
    config: "TrainConfig", schedule: Schedule, layout: Layout, dtype: torch.dtype, device: torch.device
) -> tuple[int, dict[str, int]]:
    """The pipeline rank that needs most, and the parts of what it needs: in a step, or on a CPU to save a checkpoint,
    which copies weights and moments."""
    needs, moments = [], 1 if config.optim.name == "muon" else 2
    for rank in step_memory(config, schedule, layout, dtype, device):
        low = {name: round((1 - MARGIN) * getattr(rank, name)) for name in ("activations", "temporary")}
        ways = [rank.parts() | low]
        if device.type == "cpu" and config.checkpoint.save_async:
            copy = rank.optimizer * (moments + 1) // (moments + (dtype.itemsize < 4))
            ways.append({"weights": rank.weights, "optimizer": rank.optimizer, "copy for checkpoints": copy})
        needs.append(max(ways, key=lambda parts: sum(parts.values())))
    return max(enumerate(needs), key=lambda rank: sum(rank[1].values()))


def _sequences(config: "TrainConfig") -> int:
    return config.batch.batch_size  # pyright: ignore[reportAttributeAccessIssue]


def _text(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
