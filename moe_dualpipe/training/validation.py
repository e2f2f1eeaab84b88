"""The mean loss of the held-out sequences."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..inference import eval_mode


def validation_loss(trainer: Any) -> float:
    """The mean over all labeled tokens of the held-out sequences, in nats per token, the same on all ranks.

    Collective. Raises ValueError for a run with `batches` and without `validation`.
    """
    if not trainer.text.has_held_out:
        raise ValueError("validation_loss needs held-out sequences: pass them to `train` as `validation`")
    with trainer.progress.during("validation"):
        losses = [loss for losses in validation_losses(trainer) for loss in losses]
        return trainer.pipeline.mean_loss(losses)


@torch.no_grad()
def validation_losses(trainer: Any) -> Iterator[list[Tensor]]:
    """Run the held-out sequences in batches. Yields the losses of each batch, as from `Pipeline.step`."""
    config, dp = trainer.config, trainer.layout.dp
    step, length = config.batch.batch_size, config.batch.seq_len
    batches = -(-config.metrics.eval_sequences // step)
    total, own = batches * step, step // dp
    labels = trainer.text.num_held_out_labels(total, length) / batches
    firsts = [batch * step + trainer.layout.dp_rank * own for batch in range(batches)]
    for first in firsts:
        trainer.read_ahead.held_out(first, own, total)
    for first in firsts:
        batch = trainer.text.held_out_batch(first, own, total, length)
        with eval_mode(trainer.stages.values()):
            losses = trainer.pipeline.step(*batch, num_labels=labels)
        yield losses
