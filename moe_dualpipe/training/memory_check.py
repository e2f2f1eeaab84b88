"""Does a training run fit into memory, and if not, which change makes it fit?

`peak_memory` predicts each pipeline rank from the options alone. So every rank of a run comes to the same answer before
anything is allocated, without asking the others. Activations count at the lower end of their prediction, so that a run
that fits is not refused. With Muon, the prediction is a lower bound. With layers of your own and with frozen
parameters, it is unknown.

The suggested changes affect neither the layout nor what is learned. `moe-dualpipe plan estimate` shows the memory of
other layouts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from ..kernels.fp8 import RECIPES
from ..messages import with_suggestions
from ..models import split
from ..models.adapters import chosen_targets
from ..models.config import RECOMPUTE
from ..models.costs import shape_of
from ..pipeline.activations import MicroBatch
from ..pipeline.peak_memory import Adapters, PeakMemory, peak_memory
from ..schedule import build
from .config import TrainConfig
from .layout_choice import Choice, listed_layers

MARGIN = 0.05
"""Predictions of activations may be too high by this share (tests/training/test_measured_memory.py)."""


def step_memory(config: TrainConfig, choice: Choice, dtype: torch.dtype, device: torch.device) -> Sequence[PeakMemory]:
    """What each pipeline rank needs at the peak of a step. Raises ValueError if that is unknown."""
    if config.freeze or {*config.model.own_layers} - {"router"}:
        raise ValueError("memory is known only for built-in layers, without frozen parameters")
    cpu, compute, layout, stages = device.type == "cpu", config.compute, choice.layout, choice.schedule.num_stages
    listed, lora = listed_layers(config), config.lora
    batch = MicroBatch(
        choice.micro_batch_size, config.batch.seq_len, ep=layout.ep, cp=layout.cp, recompute=compute.recompute,
        fused_loss=compute.fused_loss, plain=compute.kernels == "reference" or (compute.kernels == "auto" and cpu),
        fp8_block=RECIPES[compute.fp8_recipe].block if compute.fp8 != "off" else 0, qk_norm=config.model.qk_norm,
        fp32_router=config.model.router_dtype == "float32", frozen=lora.rank > 0,
    )  # fmt: skip
    return peak_memory(
        shape_of(config.model), choice.schedule, batch,
        split(config.model, stages, listed if len(listed) == stages else ()), layout.dp,
        "fp32" if dtype.itemsize == 4 else "bf16", config.parallel.zero, whole_embedding=True,
        gradient_copies=2 if cpu else 1, moments=1 if config.optim.name == "muon" and not lora.rank else 2,
        adapters=Adapters(lora.rank, chosen_targets(config.model, lora)) if lora.rank else None,
    )  # fmt: skip


def memory_line(config: TrainConfig, choice: Choice, dtype: torch.dtype, device: torch.device) -> str:
    """What the rank that holds the most needs, by parts; "" if that is unknown."""
    try:
        needs = max(step_memory(config, choice, dtype, device), key=lambda rank: rank.total)
    except ValueError:
        return ""
    parts = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in needs.parts().items())
    return f"memory of a step: {needs.total / 2**20:,.1f} MB on the rank that needs the most ({parts})"


def memory_problem(
    config: TrainConfig, choice: Choice, dtype: torch.dtype, device: torch.device, free_bytes: int
) -> str:
    """One line with the numbers and what to change if a rank needs more than `free_bytes`; "" if all fit, or if their
    needs are unknown.

    free_bytes: what each rank may use, the least of all ranks. On CPUs, the ranks of a machine share its memory.
    """
    try:
        number, needs = _largest(config, choice, dtype, device)
    except ValueError:
        return ""
    if sum(needs.values()) <= free_bytes:
        return ""
    less = "more processes, a smaller model or shorter sequences"
    for words, changed, smaller in _savings(config, choice):
        total = sum(_largest(changed, smaller, dtype, device)[1].values())
        if total <= free_bytes:
            less = f"{words}, which needs {_text(total)}"
            break
    parts = ", ".join(f"{name} {_text(size)}" for name, size in needs.items())
    needed = f"needs {_text(sum(needs.values()))} ({parts}), and {_text(free_bytes)} are free"
    ways = [less, "--set health.check_memory=false to start anyway"]
    return with_suggestions(f"pipeline rank {number} {needed}", ways)


def _savings(config: TrainConfig, choice: Choice) -> Iterator[tuple[str, TrainConfig, Choice]]:
    """Ways to save memory on the same ranks, smallest change first: as typed, the options, and the choice."""
    compute, save, first = config.compute, config.checkpoint, choice.micro_batch_size
    sizes, losses = dict.fromkeys((first, 1)), dict.fromkeys((compute.fused_loss, True))
    kinds, copies = RECOMPUTE[RECOMPUTE.index(compute.recompute) :], dict.fromkeys((save.save_async, False))
    for size, fused, kind, copy in product(sizes, losses, kinds, copies):
        words = {
            f"--recompute {kind}": kind != compute.recompute, "--fused-loss": fused != compute.fused_loss,
            f"--micro-batch-size {size}": size != first, "--set checkpoint.save_async=false": copy != save.save_async,
        }  # fmt: skip
        options = replace(compute, recompute=kind, fused_loss=fused)
        changed = replace(config, compute=options, checkpoint=replace(save, save_async=copy))
        number = first // size * choice.schedule.num_micro_batches
        schedule = build(choice.schedule.name, choice.layout.pp, number, choice.layout.chunks)
        smaller = replace(choice, schedule=schedule, micro_batch_size=size)
        yield " ".join(word for word, differs in words.items() if differs), changed, smaller


def _largest(
    config: TrainConfig, choice: Choice, dtype: torch.dtype, device: torch.device
) -> tuple[int, dict[str, int]]:
    """The pipeline rank that needs the most memory, and its needs by part: in a step or, on a CPU, while saving a
    checkpoint, which copies weights and moments."""
    needs = []
    for rank in step_memory(config, choice, dtype, device):
        low = {name: round((1 - MARGIN) * getattr(rank, name)) for name in ("activations", "temporary")}
        ways = [rank.parts() | low]
        if device.type == "cpu" and config.checkpoint.save_async:
            ways.append({
                "weights": rank.weights, "optimizer": rank.optimizer, "copy for checkpoints": rank.checkpoint
            })  # fmt: skip
        needs.append(max(ways, key=lambda parts: sum(parts.values())))
    return max(enumerate(needs), key=lambda rank: sum(rank[1].values()))


def _text(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
