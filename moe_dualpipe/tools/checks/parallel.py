"""`moe-dualpipe check parallel`: a token's loss, logits and gradients are the same in any parallel layout.

The whole model runs in one process, one micro-batch after the other. Then the same sequences run again in every variant
(variants.py), in processes of this machine, and the results are compared. If they differ by more than rounding
explains, both run once more, and every tensor of every segment is compared, to name the first one that differs.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...models import StageOptions
from ...training.checks import check_options
from ...training.config import TrainConfig
from ...training.layout_choice import DEFAULT_SIZE
from .comparison import Comparison, check_runs
from .report import Report
from .run import STEPS, Job, Run
from .variants import Variant, default_variants, micro_batches_for, requested_variant


def check_parallel(
    config: TrainConfig, variants: Sequence[Variant] | None = None, on_rank: Callable[[Run], None] | None = None,
    searched: int = 3,
) -> Report:  # fmt: skip
    """Compare every variant with one process that runs the same model on the same sequences.

    config: the options of train.py. Its model, seed, sequence length and micro-batch size are used, and its layout
    is one of the variants. variants: None means this layout and `default_variants`. on_rank: see `Job`. searched: the
    number of failed variants whose first difference is found.

    Raises ValueError for invalid options, for a layout of the config that cannot run, and for a model that cannot be
    built.
    """
    requested = requested_variant(config.parallel, config.compute.recompute)
    if variants is None:
        variants = [
            *([requested] if requested else []),
            *default_variants(config.batch.micro_batch_size or DEFAULT_SIZE),
        ]
    job = make_job(config, variants, on_rank)
    if requested is not None and requested in variants:
        check_runs(job, requested)
    with tempfile.TemporaryDirectory() as folder:
        return Comparison(job, Path(folder), searched).report(variants)


def make_job(config: TrainConfig, variants: Sequence[Variant], on_rank: Callable[[Run], None] | None = None) -> Job:
    """What all variants run, with random tokens. Raises ValueError for invalid options."""
    check_options(config)
    if config.compute.dtype == "bfloat16":
        raise ValueError(
            "check parallel computes in float32, because rounding in bfloat16 hides faults: leave out --dtype"
        )
    size, vocab_size = (config.batch.micro_batch_size or DEFAULT_SIZE), config.model.vocab_size
    shape = STEPS, micro_batches_for([*variants]) * size, config.batch.seq_len + 1
    generator = torch.Generator().manual_seed(config.seed % 2**63)
    tokens = torch.randint(vocab_size, shape, generator=generator)
    end_id = None
    if config.batch.document_mask:
        end_id = vocab_size - 1
        tokens[torch.rand(shape, generator=generator) < 0.1] = end_id
    kernels = "reference" if config.compute.kernels == "auto" else config.compute.kernels
    options = StageOptions(config.seed, kernels=kernels, fused_loss=config.compute.fused_loss, document_end_id=end_id)
    return Job(config.model, options, tokens, size, on_rank=on_rank)
