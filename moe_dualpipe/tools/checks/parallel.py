"""`moe-dualpipe check parallel`: a token's loss, logits and gradients are the same in any parallel layout.

The whole model runs in one process, one micro-batch after the other. Then the same sequences run again in every variant
(variants.py), in processes of this machine, and the results are compared. If they differ by more than rounding
explains, both run once more, and every tensor of every segment is compared, to name the first one that differs.

Processes are launched as rarely as possible: 1. Run the reference. 2. Run all variants. 3. Run those that differ in
float64: if they agree there, the difference was rounding, which can change the choice of an expert. 4. Record the
others that differ.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...messages import plural
from ...models import StageOptions
from ...runtime.layout import check_ep
from ...training.checks import check_options
from ...training.config import TrainConfig
from ...training.layout_choice import DEFAULT_SIZE
from .compare import Compared, compare, find_faults, may_be_rounding
from .first_difference import Recorded, first_difference
from .ranks import Failure, run_tasks
from .recorder import Recorder
from .report import Check, Report
from .run import STEPS, Job, Results, Run, find_assignment, run_variant
from .variants import REFERENCE, Variant, default_variants, micro_batches_for, requested_variant


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


def check_runs(job: Job, variant: Variant) -> None:
    """Raise ValueError if the variant cannot run with its schedule, or with the model's layers or experts."""
    check_ep(variant.ep, job.model.num_experts)
    find_assignment(job, variant, 0)


@dataclass(frozen=True)
class _Task:
    """What a rank runs. folder: holds the results of the reference, one file per dtype, and of recorded runs."""

    job: Job
    variant: Variant
    folder: Path

    @property
    def reference(self) -> Path:
        return self.folder / f"reference-{self.job.dtype}.pt"

    def recorded(self, rank: int) -> Path:
        return self.folder / f"{self.variant.name.replace('/', ' ')}-{rank}.pt"


def _run_reference(task: _Task) -> None:
    torch.save(run_variant(task.job, task.variant), task.reference)


def _run_and_compare(task: _Task) -> Compared:
    reference: Results = torch.load(task.reference, weights_only=False, mmap=True)
    return compare(run_variant(task.job, task.variant), reference)


def _run_and_record(task: _Task) -> None:
    recorder = Recorder()
    run_variant(task.job, task.variant, recorder.observe)
    torch.save(recorder.records, task.recorded(dist.get_rank()))


Outcome = list[Any] | Failure
"""What a function returned on each rank, or the first failure."""


class Comparison:
    """Compares variants with the reference. searched: the number of failed variants whose first difference is found."""

    def __init__(self, job: Job, folder: Path, searched: int):
        self.job, self.folder, self.searched = job, folder, searched

    def report(self, variants: Sequence[Variant]) -> Report:
        """Raises ValueError if the model cannot be built."""
        sequences, length = self.job.tokens.shape[1], self.job.tokens.shape[2] - 1
        sizes = f"{plural(STEPS, 'step')} of {plural(sequences, 'sequence')} of {plural(length, 'token')}"
        subject = f"{sizes}, compared with one process: relative differences, of their tolerances"
        checks: dict[Variant, Check] = {}
        for variant in variants:
            try:
                check_runs(self.job, variant)
            except ValueError as error:
                checks[variant] = Check(variant.name, "skipped", problem=str(error))
        done = self._run(_run_reference, [REFERENCE])[REFERENCE]
        if isinstance(done, Failure):
            if done.invalid:
                raise ValueError(done.message)
            return Report(subject, (Check(REFERENCE.name, "failed", problem=str(done)),))
        outcomes = self._run(_run_and_compare, [variant for variant in variants if variant not in checks])
        checks |= {variant: _judge(variant, outcome) for variant, outcome in outcomes.items()}
        differing = {v: o for v, o in outcomes.items() if checks[v].status == "failed" and isinstance(o, list)}
        rounding = [v for v in differing if v.tolerance.parameters and may_be_rounding(differing[v])]
        for variant in self._rounded(rounding):
            what = "float32 results differ and float64 results agree: rounding, which can change the choice of experts"
            checks[variant] = replace(checks[variant], status="warning", problem=f"{what}; {checks[variant].problem}")
            del differing[variant]
        for variant, problem in self._first_differences(dict([*differing.items()][: self.searched])).items():
            checks[variant] = replace(checks[variant], problem=problem)
        return Report(subject, tuple(checks[variant] for variant in variants))

    def _run(
        self, function: Callable[[_Task], Any], variants: Sequence[Variant], dtype: torch.dtype = torch.float32
    ) -> dict[Variant, Outcome]:
        """Run the function for each variant, in one launch for each number of processes."""
        job, outcomes = replace(self.job, dtype=dtype), {}
        for processes in sorted({variant.processes for variant in variants}):
            group = [variant for variant in variants if variant.processes == processes]
            tasks = [_Task(job, variant, self.folder) for variant in group]
            outcomes |= zip(group, run_tasks(processes, function, tasks), strict=True)
        return outcomes

    def _rounded(self, variants: Sequence[Variant]) -> list[Variant]:
        """The variants that agree with the reference in float64; empty if the model does not run in float64."""
        if not variants or isinstance(self._run(_run_reference, [REFERENCE], torch.float64)[REFERENCE], Failure):
            return []
        outcomes = self._run(_run_and_compare, variants, torch.float64)
        in_float64 = {v: _judge(replace(v, tolerance=v.tolerance.in_float64()), o) for v, o in outcomes.items()}
        return [variant for variant, check in in_float64.items() if check.status == "passed"]

    def _first_differences(self, differing: Mapping[Variant, list[Compared]]) -> Mapping[Variant, str]:
        """Describe the first difference of each variant that runs again while it is recorded."""
        outcomes = self._run(_run_and_record, [REFERENCE, *differing]) if differing else {}
        recorded = {v: self._load(v) for v, outcome in outcomes.items() if not isinstance(outcome, Failure)}
        if (reference := recorded.pop(REFERENCE, None)) is None:
            return {}
        faults = {v: find_faults(differing[v], v.tolerance)[1] for v in recorded}
        found = {v: first_difference(run, reference, v.tolerance, faults[v]) for v, run in recorded.items()}
        return {variant: text for variant, text in found.items() if text}

    def _load(self, variant: Variant) -> Recorded:
        task = _Task(self.job, variant, self.folder)
        records = [torch.load(task.recorded(rank), weights_only=False) for rank in range(variant.processes)]
        return Recorded([*chain(*records)], self.job.model.num_experts // variant.ep)


def _judge(variant: Variant, outcome: Outcome) -> Check:
    if isinstance(outcome, Failure):
        return Check(variant.name, "failed", problem=str(outcome))
    measured, faults = find_faults(outcome, variant.tolerance)
    return Check(variant.name, "failed" if faults else "passed", measured, "; ".join([*faults.values()][:2]))
