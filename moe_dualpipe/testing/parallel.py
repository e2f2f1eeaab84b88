"""`moe-dualpipe check parallel`: a token's loss, logits and gradients are the same in any parallel layout.

The whole model runs in one process, one micro-batch after the other. Then the same sequences run again in every variant
(variants.py), in processes of this machine, and are compared. If results differ by more than rounding explains, both
run once more, and every tensor of every segment is compared, to name the first one that differs.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from ..messages import plural
from ..models import StageOptions
from ..models.experts import expert_class
from ..runtime.groups import check_ep_divides_experts
from ..training.checks import check_options
from ..training.config import TrainConfig
from .compare import Compared, compare, find_faults
from .first_difference import Recorded, first_difference
from .ranks import Failure, run_tasks
from .recorder import Recorder
from .report import Check, Report
from .run import STEPS, Job, Results, Run, find_place, run_variant
from .variants import REFERENCE, Variant, default_variants, micro_batches_for, requested_variant

_MOST_SEARCHED = 3


def check_parallel(
    config: TrainConfig, variants: Sequence[Variant] | None = None, on_rank: Callable[[Run], None] | None = None
) -> Report:
    """Compare every variant with one process that runs the same model on the same sequences.

    config: the options of train.py. Its model, seed, sequence length and micro-batch size are used, and its layout
    is one of the variants. variants: None means this layout and `default_variants`. on_rank: see `Job`.
    Raises ValueError for invalid options, and for a layout of the config that cannot run.
    """
    requested = requested_variant(config.parallel, config.compute.recompute)
    if variants is None:
        variants = [*([requested] if requested else []), *default_variants(config.batch.micro_batch_size)]
    job = make_job(config, variants, on_rank)
    if requested is not None and requested in variants:
        _check_runs(job, requested)
    with tempfile.TemporaryDirectory() as folder:
        return _Comparison(job, Path(folder)).report(variants)


def make_job(config: TrainConfig, variants: Sequence[Variant], on_rank: Callable[[Run], None] | None = None) -> Job:
    """Raises ValueError for invalid options."""
    check_options(config)
    expert_class(config.model.experts)
    if config.compute.dtype == "bfloat16":
        raise ValueError(
            "check parallel computes in float32, because rounding in bfloat16 hides faults: use no --dtype"
        )
    size, vocab_size = config.batch.micro_batch_size, config.model.vocab_size
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


def _check_runs(job: Job, variant: Variant) -> None:
    """Raise ValueError if the variant cannot run."""
    check_ep_divides_experts(variant.ep, job.model.num_experts)
    find_place(job, variant, 0)


@dataclass(frozen=True)
class _Task:
    """What a rank runs. folder: has the results of the reference, by dtype, and of recorded runs."""

    job: Job
    variant: Variant
    folder: Path

    @property
    def reference(self) -> Path:
        return self.folder / f"reference-{self.job.dtype}.pt"

    def recorded(self, rank: int) -> Path:
        return self.folder / f"recorded-{rank}.pt"


def _run_reference(task: _Task) -> None:
    torch.save(run_variant(task.job, task.variant), task.reference)


def _run_and_compare(task: _Task) -> Compared:
    reference: Results = torch.load(task.reference, weights_only=False, mmap=True)
    return compare(run_variant(task.job, task.variant), reference)


def _run_and_record(task: _Task) -> None:
    recorder = Recorder()
    results = run_variant(task.job, task.variant, recorder.observe)
    torch.save((results, recorder.records), task.recorded(dist.get_rank()))


class _Comparison:
    def __init__(self, job: Job, folder: Path):
        self.job, self.folder = job, folder
        self.searched = 0

    def report(self, variants: Sequence[Variant]) -> Report:
        [done] = run_tasks(1, _run_reference, [_Task(self.job, REFERENCE, self.folder)])
        sequences, length = self.job.tokens.shape[1], self.job.tokens.shape[2] - 1
        subject = (
            f"{plural(STEPS, 'step')} of {plural(sequences, 'sequence')} of {plural(length, 'token')}, compared with "
            "one process"
        )
        if isinstance(done, Failure):
            return Report(subject, (Check("one process", "failed", problem=str(done)),))
        checks: dict[str, Check] = {}
        runnable: list[Variant] = []
        for variant in variants:
            try:
                _check_runs(self.job, variant)
                runnable.append(variant)
            except ValueError as error:
                checks[variant.name] = Check(variant.name, "skipped", problem=str(error))
        for processes in sorted({variant.processes for variant in runnable}):
            group = [variant for variant in runnable if variant.processes == processes]
            tasks = [_Task(self.job, variant, self.folder) for variant in group]
            for variant, parts in zip(group, run_tasks(processes, _run_and_compare, tasks), strict=True):
                checks[variant.name] = self.judge(variant, parts)
        return Report(subject, tuple(checks[variant.name] for variant in variants))

    def judge(self, variant: Variant, parts: list[Compared] | Failure) -> Check:
        if isinstance(parts, Failure):
            return Check(variant.name, "failed", problem=str(parts))
        measured, faults = find_faults(parts, variant.tolerance)
        if not faults:
            return Check(variant.name, "passed", measured)
        if variant.tolerance.tokens and self.agrees_in_float64(variant):
            what = "float32 results differ, and float64 results agree: rounding has changed the choice of an expert"
            return Check(variant.name, "warning", measured, f"{what} ({faults[0]})")
        first = self.first_difference(variant) if self.searched < _MOST_SEARCHED else ""
        return Check(variant.name, "failed", measured, "; ".join([first] if first else faults))

    def agrees_in_float64(self, variant: Variant) -> bool:
        """Whether the variant agrees with the reference in float64; False if it does not run in float64."""
        job = replace(self.job, dtype=torch.float64)
        reference = _Task(job, REFERENCE, self.folder)
        if not reference.reference.exists() and isinstance(run_tasks(1, _run_reference, [reference])[0], Failure):
            return False
        [parts] = run_tasks(variant.processes, _run_and_compare, [_Task(job, variant, self.folder)])
        return not isinstance(parts, Failure) and not find_faults(parts, variant.tolerance.in_float64())[1]

    def first_difference(self, variant: Variant) -> str:
        """Run both again, record all segments, and describe the first difference; "" if a run failed."""
        self.searched += 1
        recorded = []
        for one in (variant, REFERENCE):
            task = _Task(self.job, one, self.folder)
            if isinstance(run_tasks(one.processes, _run_and_record, [task])[0], Failure):
                return ""
            saved = [torch.load(task.recorded(rank), weights_only=False) for rank in range(one.processes)]
            results, records = zip(*saved, strict=True)
            recorded.append(Recorded(one, self.job.model.num_experts, results, records))
        return first_difference(recorded[0], recorded[1], variant.tolerance)
