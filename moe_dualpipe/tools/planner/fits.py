"""Does a training run fit into memory, and if not, which change makes it fit?

`peak_memory` predicts each pipeline rank from the options alone. So every rank of a run comes to the same answer before
anything is allocated, without asking the others. Activations count at the lower end of their prediction, so that a run
that fits is not refused. With Muon, the prediction is a lower bound. With layers of your own and with frozen
parameters, it is unknown.

What to use instead changes neither the layout nor what is learned. `moe-dualpipe plan estimate` has the memory of other
layouts.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from ...messages import with_suggestions
from ...models import StageSpec, split
from ...models.config import RECOMPUTE
from ...runtime.layout import Layout
from ...schedule import Schedule, build
from ...training.layout_choice import listed_layers
from .activations import MicroBatch
from .device import precision_of
from .peak import PeakMemory, peak_memory

if TYPE_CHECKING:
    from ...training.config import TrainConfig

MARGIN = 0.05
"""Predictions of activations may be that much too high (tests/training/test_measured_memory.py)."""


def step_memory(
    config: "TrainConfig", schedule: Schedule, layout: Layout, dtype: torch.dtype, device: torch.device
) -> tuple[PeakMemory, ...]:
    """What each pipeline rank needs at the peak of a step. Raises ValueError if that is unknown."""
    if config.freeze or {*config.model.own_layers} - {"router"}:
        raise ValueError("memory is known only for built-in layers, and without frozen parameters")
    cpu, compute = device.type == "cpu", config.compute
    size = config.batch.batch_size // (layout.dp * schedule.num_micro_batches)
    plain = compute.kernels == "reference" or (compute.kernels == "auto" and cpu)
    batch = MicroBatch(
        size, config.batch.seq_len, ep=layout.ep, recompute=compute.recompute, fused_loss=compute.fused_loss,
        plain=plain,
    )  # fmt: skip
    return peak_memory(
        config.model, schedule, batch, layout.dp, precision_of(dtype), config.parallel.zero,
        stages=stages_of_run(config, schedule), gradient_copies=2 if cpu else 1,
        moments=1 if config.optim.name == "muon" else 2,
    )  # fmt: skip


def stages_of_run(config: "TrainConfig", schedule: Schedule) -> tuple[StageSpec, ...]:
    """The layers of each stage, by the numbers in the options if they are for these stages."""
    listed = listed_layers(config)
    return split(config.model, schedule.num_stages, listed if len(listed) == schedule.num_stages else ())


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
    parts = ", ".join(f"{name} {_text(size)}" for name, size in needs.items())
    saved = (
        f"{words}, which needs {_text(total)}"
        for words, changed, smaller in _savings(config, schedule, layout)
        if (total := sum(_fullest(changed, smaller, layout, dtype, device)[1].values())) <= free_bytes
    )
    less = next(saved, "more processes, a smaller model or shorter sequences")
    needed = f"needs {_text(sum(needs.values()))} ({parts}), and {_text(free_bytes)} are free"
    ways = [less, "--set health.check_memory=false to start anyway"]
    return with_suggestions(f"pipeline rank {number} {needed}", ways)


def _savings(
    config: "TrainConfig", schedule: Schedule, layout: Layout
) -> Iterator[tuple[str, "TrainConfig", Schedule]]:
    """What saves memory on the same ranks, from little to everything: as typed, the options, and the schedule."""
    compute, save = config.compute, config.checkpoint
    own = config.batch.batch_size // layout.dp
    kinds, sizes = (
        RECOMPUTE[RECOMPUTE.index(compute.recompute) :],
        dict.fromkeys((own // schedule.num_micro_batches, 1)),
    )
    fused, copies = dict.fromkeys((compute.fused_loss, True)), dict.fromkeys((save.save_async, False))
    for size, loss, kind, copy in product(sizes, fused, kinds, copies):
        words = {
            f"--recompute {kind}": kind != compute.recompute, "--fused-loss": loss != compute.fused_loss,
            f"--micro-batch-size {size}": size * schedule.num_micro_batches != own,
            "--set checkpoint.save_async=false": copy != save.save_async,
        }  # fmt: skip
        changed = replace(
            config, compute=replace(compute, recompute=kind, fused_loss=loss), checkpoint=replace(save, save_async=copy)
        )
        smaller = build(schedule.name, layout.pp, own // size, layout.chunks)
        yield " ".join(word for word, differs in words.items() if differs), changed, smaller


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


def _text(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
