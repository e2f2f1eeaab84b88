"""`moe-dualpipe check parallel`: a token's loss, logits and gradients are the same in any parallel layout.

The whole model runs in one process, one micro-batch after the other, and every tensor of every segment is stored. Then
the same sequences run again in every variant (run.py), in processes of this machine. If the results differ by more than
rounding explains, the report names the first tensor that differs.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...messages import plural
from ...models import StageOptions
from ...models.context_parallel import check_context
from ...runtime.layout import check_ep
from ...training.config import TrainConfig
from ...training.layout_choice import DEFAULT_SIZE
from ...training.rules import check_options
from .laws import Check, Report
from .ranks import Failure, run_task
from .run import (
    STEPS,
    CheckedRun,
    Job,
    Variant,
    default_variants,
    find_difference,
    micro_batches_for,
    record_reference,
    requested_variant,
    schedule_of,
)


def check_parallel(
    config: TrainConfig, variants: Sequence[Variant] | None = None, on_rank: Callable[[CheckedRun], None] | None = None
) -> Report:
    """Compare every variant with one process that runs the same model on the same sequences.

    config: the options of train.py. Its model, seed, sequence length and micro-batch size are used, and its layout
    is one of the variants. variants: None means this layout and `default_variants`. on_rank: see `Job`.

    Raises ValueError for invalid options, for a layout of the config that cannot run, and for a model that does not run
    in one process.
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
    _, sequences, length = job.tokens.shape
    sizes = f"{plural(STEPS, 'step')} of {plural(sequences, 'sequence')} of {plural(length - 1, 'token')}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.pt"
        done = run_task(1, record_reference, job, file)
        if isinstance(done, Failure):
            raise ValueError(f"cannot run the model in one process: {done.message}")
        title = f"{sizes}, compared with one process: relative differences, of their tolerances"
        return Report(title, tuple(_check(job, file, variant) for variant in variants))


def make_job(
    config: TrainConfig, variants: Sequence[Variant], on_rank: Callable[[CheckedRun], None] | None = None
) -> Job:
    """What all variants run, with random tokens. Raises ValueError for invalid options."""
    check_options(config)
    if config.compute.dtype == "bfloat16":
        raise ValueError(
            "check parallel computes in float64, because rounding in bfloat16 hides faults: leave out --dtype"
        )
    size, vocab_size = (config.batch.micro_batch_size or DEFAULT_SIZE), config.model.vocab_size
    shape = STEPS, micro_batches_for([*variants]) * size, config.batch.seq_len + 1
    generator = torch.Generator().manual_seed(config.seed % 2**63)
    tokens = torch.randint(vocab_size, shape, generator=generator)
    documents = None
    if config.batch.document_mask:
        ends = torch.rand(shape, generator=generator)[..., :-1] < 0.1
        documents = ends.cumsum(-1, dtype=torch.int32)
    kernels = "reference" if config.compute.kernels == "auto" else config.compute.kernels
    options = StageOptions(config.seed, kernels=kernels, fused_loss=config.compute.fused_loss)
    return Job(config.model, options, tokens, size, documents, on_rank)


def check_runs(job: Job, variant: Variant) -> None:
    """Raise ValueError if the variant cannot run with its schedule, or with the model's layers or experts."""
    check_ep(variant.ep, job.model.num_experts)
    check_context(variant.cp, job.tokens.shape[2] - 1)
    schedule_of(job, variant)


def _check(job: Job, file: Path, variant: Variant) -> Check:
    try:
        check_runs(job, variant)
    except ValueError as error:
        return Check(variant.name, "skipped", problem=str(error))
    outcome = run_task(variant.processes, find_difference, job, file, variant)
    if isinstance(outcome, Failure):
        return Check(variant.name, "failed", problem=str(outcome))
    measured, problem = outcome[0]
    return Check(variant.name, "failed" if problem else "passed", measured, problem)
