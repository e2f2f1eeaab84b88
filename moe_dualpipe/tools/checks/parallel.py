"""`moe-dualpipe check parallel`: a token's loss, logits and gradients are the same in any parallel layout.

The whole model runs in one process, one micro-batch after the other, and its results and tensors are stored. Then the
same sequences run again in every variant (run.py), in processes of this machine. If the results differ by more
than rounding explains, the variant runs once more, and every tensor of every segment is compared, to name the first one
that differs.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...messages import plural
from ...models import StageOptions
from ...runtime.layout import check_ep
from ...training.checks import check_options
from ...training.config import TrainConfig
from ...training.layout_choice import DEFAULT_SIZE
from .first_difference import Trace, find_difference
from .laws import Check, Report, Status
from .ranks import Failure, run_tasks
from .run import (
    REFERENCE,
    STEPS,
    Job,
    Run,
    Variant,
    default_variants,
    find_assignment,
    micro_batches_for,
    requested_variant,
    run_variant,
)


def check_parallel(
    config: TrainConfig, variants: Sequence[Variant] | None = None, on_rank: Callable[[Run], None] | None = None
) -> Report:
    """Compare every variant with one process that runs the same model on the same sequences.

    config: the options of train.py. Its model, seed, sequence length and micro-batch size are used, and its layout
    is one of the variants. variants: None means this layout and `default_variants`. on_rank: see `Job`.

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
        return _compare(job, variants, Path(folder) / "reference.pt")


def make_job(config: TrainConfig, variants: Sequence[Variant], on_rank: Callable[[Run], None] | None = None) -> Job:
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
    end_id = None
    if config.batch.document_mask:
        end_id = vocab_size - 1
        tokens[torch.rand(shape, generator=generator) < 0.1] = end_id
    kernels = "reference" if config.compute.kernels == "auto" else config.compute.kernels
    options = StageOptions(config.seed, kernels=kernels, fused_loss=config.compute.fused_loss, document_end_id=end_id)
    return Job(config.model, options, tokens, size, on_rank=on_rank)


def check_runs(job: Job, variant: Variant) -> None:
    """Raise ValueError if the variant cannot run with its schedule, or with the model's layers or experts."""
    check_ep(variant.ep, job.model.num_experts)
    find_assignment(job, variant, 0)


@dataclass(frozen=True)
class _Task:
    """What a rank runs. file: holds the results and tensors of the reference."""

    job: Job
    variant: Variant
    file: Path


def _run_reference(task: _Task) -> None:
    trace = Trace()
    torch.save((run_variant(task.job, task.variant, trace), trace.tensors), task.file)


def _run_and_compare(task: _Task) -> tuple[str, str]:
    """What was measured, and the problem: equal on all ranks."""
    job, variant = task.job, task.variant
    reference, tensors = torch.load(task.file, weights_only=False, mmap=True)

    def again() -> Trace:
        trace = Trace(tensors, variant.tolerance.tokens)
        run_variant(job, variant, trace)
        return trace

    return find_difference(run_variant(job, variant), reference, variant.tolerance, again)


def _compare(job: Job, variants: Sequence[Variant], file: Path) -> Report:
    """Raises ValueError if the model cannot be built."""
    sequences, length = job.tokens.shape[1], job.tokens.shape[2] - 1
    sizes = f"{plural(STEPS, 'step')} of {plural(sequences, 'sequence')} of {plural(length, 'token')}"
    subject = f"{sizes}, compared with one process: relative differences, of their tolerances"
    (done,) = run_tasks(1, _run_reference, [_Task(job, REFERENCE, file)])
    if isinstance(done, Failure):
        if done.invalid:
            raise ValueError(done.message)
        return Report(subject, (Check(REFERENCE.name, "failed", problem=str(done)),))
    checks: dict[Variant, Check] = {}
    for variant in variants:
        try:
            check_runs(job, variant)
        except ValueError as error:
            checks[variant] = Check(variant.name, "skipped", problem=str(error))
    for processes in sorted({variant.processes for variant in variants}):  # each number of processes starts once
        group = [v for v in variants if v.processes == processes and v not in checks]
        outcomes = run_tasks(processes, _run_and_compare, [_Task(job, variant, file) for variant in group])
        checks |= {v: judge(v.name, outcome) for v, outcome in zip(group, outcomes, strict=True)}
    return Report(subject, tuple(checks[variant] for variant in variants))


def judge(name: str, outcome: list[tuple[str, str]] | Failure, if_failed: Status = "failed", why: str = "") -> Check:
    """The check of a run. outcome: on each rank, from `find_difference`. if_failed, why: say so if the run failed."""
    if isinstance(outcome, Failure):
        return Check(name, if_failed, problem=f"{why}{outcome}")
    measured, problem = outcome[0]
    return Check(name, "failed" if problem else "passed", measured, problem)
