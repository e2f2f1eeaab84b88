"""What a run prints and records: the introduction, progress, metrics, results of saves, and how to resume."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from ..checkpoint import PartialLoad, SaveResult, list_checkpoints
from ..data.stores import StorageError
from ..health.program import program_name
from ..inference import printable_text
from ..messages import plural, printable, with_shown_names
from .command_line import resume_command
from .fitting import step_memory
from .interval import merged
from .metrics import Metrics
from .plan import RunPlan
from .sinks import Sink


class RunFailed(SystemExit):
    """Ends a run. The command exits with code 1; for a run from Python, `train` raises RuntimeError with `text`."""

    def __init__(self, text: str):
        super().__init__(1)
        self.text = text


class Reporter:
    """Reports on the run of `plan`. Only the first rank prints and writes.

    sinks: also get the metrics. verbose: False prints nothing.
    """

    def __init__(self, plan: RunPlan, sinks: Sequence[Sink] = (), verbose: bool = True):
        self.plan, self.config, self.setup = plan, plan.config, plan.setup
        self.enabled = self.setup.layout.rank == 0
        self.verbose = verbose and self.enabled
        tensorboard = self.config.metrics.tensorboard
        self.metrics = Metrics(self.setup.folder, self.enabled, plan.first_step, tensorboard, sinks)
        self._unwritten: list[dict[str, float]] = []

    def say(self, text: str) -> None:
        if self.verbose:
            print(text, flush=True)

    def introduce(self, dense: float, experts: float, trained: float, state_mb: float) -> None:
        """dense, experts, trained: numbers of parameters. state_mb: optimizer state of the fullest rank in MB."""
        config, model, layout, schedule = self.config, self.config.model, self.setup.layout, self.setup.schedule
        active = dense + experts * model.experts_per_token / model.num_experts
        tokens = schedule.num_micro_batches * config.batch.micro_batch_size * config.batch.seq_len * layout.dp
        frozen = round(dense + experts) - round(trained)
        lines = [
            *([self.plan.elastic.text] if self.plan.elastic and self.plan.elastic.text else []),
            f"model {printable(config.name)}: {(dense + experts) / 1e6:.2f} M parameters, {active / 1e6:.2f} M active"
            f"{f', {trained / 1e6:.2f} M trained, {frozen / 1e6:.2f} M frozen' if frozen else ''}",
            f"{schedule.name} over {layout.pp} pipeline x {layout.dp} data-parallel ranks"
            f"{f', experts over {layout.ep}' if layout.ep > 1 else ''}, on {self.setup.device.type} "
            f"in {str(self.setup.dtype).removeprefix('torch.')}"
            f"{', Triton kernels' if self.setup.kernels == 'triton' else ''}"
            f"{', torch.compile' if self.setup.compiled else ''}"
            f"{', CUDA graphs' if config.compute.cuda_graphs else ''}",
            *([self.plan.machines] if self.plan.machines else []),
            f"{config.optim.name}: {state_mb:,.1f} MB of optimizer state on the fullest rank",
            *self._memory_of_a_step(),
        ]
        for index, stage in enumerate(self.plan.stages):
            holders = schedule.placement.holders(index)
            where = f"rank{'s' * (len(holders) > 1)} {' and '.join(map(str, holders))}"
            lines.append(f"  stage {index} on pipeline {where}: {stage}")
        start = f"resumed from {printable(self.plan.resume)}, " if self.plan.resume else ""
        steps = f"steps {self.plan.first_step + 1} to {config.steps}"
        of = f"{plural(schedule.num_micro_batches * layout.dp, 'micro-batch', 'es')}, {tokens:,} tokens each"
        data = (printable(line, 1000) for line in self.plan.text.description.split("\n"))
        self.say("\n".join([*lines, *data, f"{start}{steps} of {of}"]))
        if self.plan.elastic:
            division = str(self.plan.elastic.division)
            self.metrics.write(step=self.plan.first_step, processes=layout.pp * layout.dp, division=division)

    def _memory_of_a_step(self) -> list[str]:
        """What the fullest rank will need; [] if that is not known."""
        with suppress(ValueError):
            needs = max(step_memory(self.config, self.setup), key=lambda rank: rank.total)
            parts = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in needs.parts().items())
            return [f"memory of a step: {needs.total / 2**20:,.1f} MB on the fullest rank ({parts})"]
        return []

    def loaded(self, partial: PartialLoad) -> None:
        """Report what --weights-partial loaded, and how the models differ."""
        differences = "; ".join(self.plan.differences)
        other = f" of another model ({differences})" if differences else ""
        self.say(f"weights from {printable(self.config.checkpoint.weights)}{other}: {partial}")

    def step(self, record: dict[str, float], bar: tqdm) -> None:
        """Report a training step: at once, or with others in one record (--log-every)."""
        self._unwritten.append(record)
        if record["step"] % self.config.metrics.log_every == 0:
            shown = self.write_steps()
            bar.set_postfix_str(f"loss {shown['loss']:.3f}, {shown['tokens_per_s']:,.0f} tokens/s", refresh=False)
        bar.update()

    def write_steps(self) -> dict[str, float]:
        """Write one record of the steps since the last one, if there are any, and return it.

        A checkpoint needs that: a run that resumes there records only later steps.
        """
        record = merged(self._unwritten) if self._unwritten else {}
        self._unwritten = []
        if record:
            self.metrics.write(**record)
        return record

    def close(self) -> None:
        self.write_steps()
        self.metrics.close()

    def saved(self, result: SaveResult) -> None:
        """Report a save that failed."""
        if result.error and self.enabled:
            failure = f"{printable(result.path)} could not be written: {printable(result.error, 1000)}"
            sys.stderr.write(f"\n{program_name()}: error: {failure}\n")
            self.metrics.write(step=result.step, save_error=result.error)

    def fail(self, text: str) -> NoReturn:
        """End the run. A command prints the error; from Python, it is raised."""
        if self.enabled and self.plan.arguments is not None:
            sys.stderr.write(f"{program_name()}: error: {text}\n")
        raise RunFailed(text)

    def sample(self, text: str) -> None:
        self.say("sample:\n" + "\n".join(f"    | {line}" for line in printable_text(text).split("\n")))

    def how_to_resume(self, checkpoint: Path, steps: int) -> str:
        """Names the run, or `checkpoint` if the folder has later ones, from before a resume at an earlier step."""
        newer = False
        with suppress(StorageError):
            newer = checkpoint in list_checkpoints(checkpoint.parent)[1:]
        run = with_shown_names(str(checkpoint if newer else self.setup.folder))
        if self.plan.arguments is None:
            return f"CheckpointConfig(resume={run!r})"
        return resume_command(self.plan.arguments, run, steps)
