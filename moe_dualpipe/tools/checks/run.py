"""The variants of `check parallel`, and one rank of one: build the model, run two steps, and trace what they compute.

A variant is a way to run the same sequences, and how much it may differ from the reference: the whole model in one
process, one micro-batch after the other, with a plain forward and backward.

Two steps are needed, because router biases carry state from one to the next.
Everything is in float64, so that rounding does not change the choice of an expert between two almost equal scores.

N sequences, S positions.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

import torch
from torch import Tensor, nn

from ...expert_parallel.gather import gather_objects
from ...expert_parallel.parameters import global_tensors
from ...models import ModelConfig, StageOptions, split
from ...models.config import RECOMPUTE, Recompute
from ...models.layers import seed_of
from ...pipeline import Numerics, Parallel, Pipeline
from ...runtime.buffers import Buffers
from ...runtime.replicas import ReplicaSet
from ...schedule import NAMES, Forward, Schedule, build, members
from ...training.config import ParallelConfig
from .first_difference import Kind, StageObserver, StepTrace, Tolerance, verdict
from .probe import probe
from .subject import prepare, without_dropout

# A relative difference r is a cosine distance 1 - 2xy/(xx+yy) of about r^2 / 2.
SAME_ORDER: Tolerance = {"weights": 0, "segments": 0, "logits": 0, "losses": 0, "buffers": 0, "gradients": 0}
"""The same operations in the same order."""
OTHER_ORDER: Tolerance = {**SAME_ORDER, "gradients": 4.5e-7}
"""A token's operations are the same, but gradients are added in another order."""
OTHER_ROWS: Tolerance = {**SAME_ORDER, "segments": 1e-5, "logits": 1e-5, "losses": 1e-6, "gradients": 4.5e-6}
"""A matrix product may round a row differently if it has other rows."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the sequences.

    schedule: None runs one micro-batch after the other without a pipeline. neighbors: the seed of a random order of
    the sequences; None: as in the reference. size: sequences per micro-batch; None: as in the reference.
    """

    name: str
    tolerance: Tolerance
    pp: int = 1
    dp: int = 1
    ep: int = 1
    schedule: str | None = None
    num_chunks: int | None = None
    overlap: bool = True
    recompute: Recompute = "none"
    size: int | None = None
    neighbors: int | None = None
    cp: int = 1

    @property
    def processes(self) -> int:
        return self.pp * self.dp * self.cp


REFERENCE = Variant("one process", SAME_ORDER)


def default_variants(size: int) -> list[Variant]:
    """The default variants, on 1, 2 and 4 processes. size: sequences per micro-batch of the reference."""
    one = [
        Variant("repeated", SAME_ORDER),
        *(Variant(f"recompute {name}", SAME_ORDER, recompute=name) for name in RECOMPUTE[1:]),
        Variant("dualpipev, overlapped", OTHER_ORDER, schedule="dualpipev"),
        Variant("each sequence alone" if size > 1 else "two sequences together", OTHER_ROWS, size=1 if size > 1 else 2),
        Variant("shuffled sequences", OTHER_ROWS, neighbors=1),
    ]
    two = [
        *(Variant(f"pp=2, {name}", OTHER_ORDER, pp=2, schedule=name) for name in NAMES),
        Variant("pp=2, dualpipe, no overlap", OTHER_ORDER, pp=2, schedule="dualpipe", overlap=False),
        Variant("dp=2", OTHER_ORDER, dp=2, schedule="1f1b"),
        Variant("ep=2", OTHER_ROWS, dp=2, ep=2, schedule="dualpipev"),
        Variant("ep=2, no overlap", OTHER_ROWS, dp=2, ep=2, schedule="1f1b", overlap=False),
        Variant("ep=2, shuffled sequences", OTHER_ROWS, dp=2, ep=2, schedule="dualpipev", neighbors=2),
        Variant("cp=2", OTHER_ROWS, schedule="dualpipev", cp=2),
        Variant("ep=2, recompute full", OTHER_ROWS, dp=2, ep=2, schedule="dualpipev", recompute="full"),
    ]
    four = [
        Variant("pp=4, dualpipe", OTHER_ORDER, pp=4, schedule="dualpipe"),
        Variant("pp=2 x ep=2, dualpipe", OTHER_ROWS, pp=2, dp=2, ep=2, schedule="dualpipe"),
        Variant("ep=4", OTHER_ROWS, dp=4, ep=4, schedule="dualpipev"),
        Variant("pp=2 x cp=2 x ep=2, dualpipe", OTHER_ROWS, pp=2, ep=2, schedule="dualpipe", cp=2),
    ]
    return one + two + four


def requested_variant(options: ParallelConfig, recompute: Recompute) -> Variant | None:
    """The layout that the options of train.py ask for; None if they ask for none."""
    if options == ParallelConfig() and recompute == "none":
        return None
    pp, ep, cp = options.pp or 1, options.ep, options.cp
    schedule = options.schedule if options.schedule != "auto" else ("dualpipev" if pp % 2 else "dualpipe")
    name = [
        f"pp={pp} x {f'cp={cp} x ' if cp > 1 else ''}ep={ep}, {schedule}",
        *(["no overlap"] if not options.overlap else []),
    ]
    name += [f"recompute {recompute}"] if recompute != "none" else []
    return Variant(
        ", ".join(name), OTHER_ROWS if max(ep, cp) > 1 else OTHER_ORDER, pp, lcm(ep, cp) // cp, ep, schedule,
        options.num_chunks, options.overlap, recompute, cp=cp,
    )  # fmt: skip


def micro_batches_for(variants: list[Variant]) -> int:
    """A number of micro-batches of the reference's size that all variants can run."""
    multiple = lcm(*(2 * variant.dp for variant in variants))
    least = max(2 * variant.processes for variant in variants)
    return -(-least // multiple) * multiple


# ---- a run ----

STEPS = 2
_BIAS_RATE = 0.02  # enough to change choices in one step


@dataclass(frozen=True, slots=True)
class Job:
    """What all variants run. tokens: [steps, N, S + 1]. size: sequences per micro-batch of the reference.

    documents: the numbers of the documents of all positions, [steps, N, S]; None: no document mask.
    on_rank: called on every rank before the first step. Tests use it to inject faults.
    """

    model: ModelConfig
    options: StageOptions
    tokens: Tensor
    size: int
    documents: Tensor | None = None
    on_rank: "Callable[[CheckedRun], None] | None" = None


def record_reference(job: Job, file: Path) -> None:
    """Run the reference, and write its trace to `file`."""
    trace = StepTrace()
    run_variant(job, REFERENCE, trace)
    torch.save(trace.recorded, file)


def find_difference(job: Job, file: Path, variant: Variant) -> tuple[str, str]:
    """Compare a variant with the trace in `file`. Collective.

    Returns the largest differences, and the first one above the tolerance; "" if there is none.
    """
    expected = torch.load(file, weights_only=False, mmap=True)
    trace = StepTrace(expected, variant.tolerance)
    run_variant(job, variant, trace)
    traces = gather_objects((trace.largest, trace.compared, trace.first))
    return verdict(traces, expected, variant.tolerance)


def run_variant(job: Job, variant: Variant, trace: StepTrace) -> None:
    """Run the variant on this rank, and pass its results to the trace. Collective over `variant.processes` ranks."""
    run = CheckedRun(job, variant, trace)
    if job.on_rank is not None:
        job.on_rank(run)
    with ExitStack() as probes:
        for index, stage in run.stages.items():
            probes.enter_context(probe(stage, StageObserver(trace, run.forwards(index), variant.ep)))
        run.steps()


def schedule_of(job: Job, variant: Variant) -> Schedule:
    """The schedule of the variant. Raises ValueError if it cannot be built, or does not fit the model's layers."""
    micro_batches = job.tokens.shape[1] // variant.dp // (variant.size or job.size)
    schedule = build(variant.schedule or "1f1b", variant.pp, micro_batches, variant.num_chunks)
    split(job.model, schedule.num_stages)
    return schedule


class CheckedRun:
    """One rank's model and its training steps. `Job.on_rank` receives it before the first step."""

    def __init__(self, job: Job, variant: Variant, trace: StepTrace):
        self.job, self.variant, self.trace = job, variant, trace
        self.schedule, size = schedule_of(job, variant), variant.size or job.size
        self.pipeline = Pipeline(
            job.model, self.schedule, (size, job.tokens.shape[2] - 1),
            Parallel(variant.ep, "all_to_all", cp=variant.cp),
            Numerics(dtype=torch.float64, options=replace(job.options, recompute=variant.recompute)),
        )  # fmt: skip
        order = torch.arange(job.tokens.shape[1])
        if variant.neighbors is not None:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(variant.neighbors))
        own = order.chunk(variant.dp)[self.pipeline.layout.dp_rank]
        self.micro_batches: list[list[int]] = [part.tolist() for part in own.split(size)]
        """The sequences of each micro-batch of this data-parallel rank."""
        self.stages, self.replicas = self.pipeline.stages, self.pipeline.replicas
        self.executor, self.balance = self.pipeline.executor, self.pipeline.balance
        self.executor.overlap = variant.overlap  # also where there is nothing to hide, to find faults
        for stage in self.stages.values():
            prepare(stage, job.options.seed)
            without_dropout(stage)
        self.last = self.stages.get(self.schedule.num_stages - 1)
        self.buffers = Buffers([*self.stages.values()], self.pipeline.groups)

    def forwards(self, stage: int) -> list[list[int]]:
        """The sequences of the micro-batches of the stage on this rank, in the order of their forwards."""
        parts = (half for action in self.schedule.actions[self.pipeline.layout.pp_rank] for half in members(action))
        forwards = (part for part in parts if isinstance(part, Forward) and part.stage == stage)
        return [self.micro_batches[part.micro_batch] for part in forwards]

    def steps(self) -> None:
        self._see("weights", [*self.replicas, *self.buffers.sets()])
        for step in range(STEPS):
            torch.manual_seed(seed_of(self.job.options.seed, f"step {step}"))
            self._step(step)
            self.pipeline.balance_experts(_BIAS_RATE)
            self._see("buffers", self.buffers.sets(), f" after step {step + 1}")
        self.pipeline.sum_gradients()
        self._see("gradients", self.replicas)

    def _step(self, step: int) -> None:
        tokens = self.job.tokens[step]
        batches = {m: tokens[sequences] for m, sequences in enumerate(self.micro_batches)}
        numbers = None if self.job.documents is None else self.job.documents[step]
        documents = [None if numbers is None else numbers[sequences] for sequences in self.micro_batches]
        self.pipeline.send_documents(numbers is not None)
        if self.variant.schedule is None:
            assert self.last is not None
            for m, batch in batches.items():
                output = self.last(*self.pipeline.inputs_of(batch[:, :-1], documents[m]))
                self._see_output(step, m, batch, output.detach())
                self.last.loss(output, batch[:, 1:]).backward()
            return
        schedule, own = self.schedule, self.pipeline.layout.pp_rank
        inputs = {
            m: self.pipeline.inputs_of(batch[:, :-1], documents[m])
            for m, batch in batches.items() if schedule.rank_of(0, m) == own
        }  # fmt: skip
        ends = {m: batch for m, batch in batches.items() if schedule.rank_of(schedule.num_stages - 1, m) == own}
        criterion = self.last.loss if self.last is not None else None
        labels = {m: (self.pipeline.cut(batch[:, 1:]),) for m, batch in ends.items()}
        done = self.executor.step(schedule, inputs, labels, criterion, return_outputs=True)
        for m, batch in ends.items():
            self._see_output(step, m, batch, done.outputs[m][0])

    @torch.no_grad()
    def _see_output(self, step: int, m: int, batch: Tensor, output: Tensor) -> None:
        assert self.last is not None
        sequences, logits_BSV = self.micro_batches[m], self.last.logits(output)
        if self.pipeline.context is not None:
            logits_BSV = self.pipeline.context.join(logits_BSV)
        losses = nn.functional.cross_entropy(logits_BSV.double().mT, batch[:, 1:], reduction="none")
        self.trace.see_tokens("logits", f"step {step + 1}, logits", sequences, logits_BSV)
        self.trace.see_tokens("losses", f"step {step + 1}, losses", sequences, losses)

    def _see(self, kind: Kind, sets: Iterable[ReplicaSet], when: str = "") -> None:
        """Pass the parameters of `sets`, or their gradients, to the trace by their global names."""
        for replicas in sets:
            for name, tensor in replicas.parameters.items():
                if kind == "gradients":
                    if not tensor.requires_grad:
                        continue
                    # A micro-batch's loss is the mean over its sequences, and over the ranks that share them.
                    grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                    tensor = grad * (len(self.micro_batches[0]) / self.variant.cp)
                for global_name, view in global_tensors(name, tensor, replicas.experts.get(name)):
                    self.trace.see(kind, f"{global_name}{when}", {0: view})
