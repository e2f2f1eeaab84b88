"""What a run prints and records: the introduction, progress, metrics, results of saves, and how to resume.

What is printed matters less than the run: output that cannot be written, as on a full disk, is dropped.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from ..checkpoint import PartialLoad, SaveResult
from ..health.report import program_name, training_command
from ..inference import printable_text
from ..messages import plural, printable, shell_word, with_shown_names
from ..models import split
from ..models.adapters import describe_adapters
from ..runtime.launch import Launch
from .extensions.balance import describe_balancing
from .memory_check import memory_line
from .metrics import Metrics, Sink, merged
from .options import words_to_resume
from .resolve import Run

COMPILED = {"off": "", "on": ", torch.compile", "whole": ", torch.compile of whole micro-batches"}


class RunFailed(SystemExit):
    """Ends a run. The command exits with code 1; for a run from Python, `train` raises RuntimeError with `text`."""

    def __init__(self, text: str):
        super().__init__(1)
        self.text = text


class Console:
    """Reports on a run. Only the first rank prints and writes.

    sinks: also get the metrics. verbose: False prints nothing.
    """

    def __init__(self, run: Run, sinks: Sequence[Sink] = (), verbose: bool = True):
        self.run, self.config = run, run.config
        self.enabled = run.layout.rank == 0
        self.verbose = verbose and self.enabled
        self.metrics = Metrics(run.folder, run.start.first_step, sinks) if self.enabled else Metrics(None)
        self._unwritten: list[dict[str, float]] = []
        self._bar: tqdm | None = None

    def say(self, text: str) -> None:
        if self.verbose:
            with suppress(OSError):
                print(text, flush=True)

    def introduce(self, dense: float, experts: float, trained: float, state_mb: float) -> None:
        """dense, experts, trained: numbers of parameters. state_mb: optimizer state in MB, where it is largest."""
        run, config, layout, numerics = self.run, self.config, self.run.layout, self.run.numerics
        active = dense + experts * config.model.experts_per_token / config.model.num_experts
        triton = numerics.options.kernels == "triton"
        compute, fp8 = config.compute, config.compute.fp8.replace("+", " and ")
        frozen, why = round(dense + experts) - round(trained), run.choice.changed.partition(": use")[0]
        lines = [
            why and f"using another layout, because {why}",
            f"model {printable(config.name)}: {(dense + experts) / 1e6:.2f} M parameters, {active / 1e6:.2f} M active"
            f"{f', {trained / 1e6:.2f} M trained, {frozen / 1e6:.2f} M frozen' if frozen else ''}",
            f"{run.choice.name} over {layout.pp} pipeline x {layout.dp} data-parallel ranks"
            f"{f' x {layout.cp} context ranks' if layout.cp > 1 else ''}"
            f"{f', experts over {layout.ep}' if layout.ep > 1 else ''}, on {run.device.type} "
            f"in {str(numerics.dtype).removeprefix('torch.')}{', Triton kernels' if triton else ''}"
            f"{', products in oneDNN' if numerics.products == 'onednn' else ''}"
            f"{f', {fp8} in FP8 ({compute.fp8_recipe})' if fp8 != 'off' else ''}"
            f"{COMPILED[compute.compile]}{', CUDA graphs' if compute.cuda_graphs else ''}",
            run.machines,
            f"{config.optim.name}: {state_mb:,.1f} MB of optimizer state on the rank that needs the most",
            describe_balancing(config.model, 0.0 if config.lora.rank else config.bias_rate),
            self._adapters(),
            memory_line(config, run.choice, numerics.dtype, run.device),
        ]
        for index, stage in enumerate(split(config.model, run.schedule.num_stages, run.parallel.layers)):
            holders = run.schedule.placement.holders(index)
            where = f"rank{'s' * (len(holders) > 1)} {' and '.join(map(str, holders))}"
            lines.append(f"  stage {index} on pipeline {where}: {stage}")
        start = f"resumed from {printable(run.start.resume)}, " if run.start.resume else ""
        micro_batches = plural(run.schedule.num_micro_batches * layout.dp, "micro-batch", "es")
        tokens = config.batch.batch_size * config.batch.seq_len
        lines += [
            *(printable(line, 1000) for line in run.text.description.split("\n")),
            f"{start}steps {run.start.first_step + 1} to {config.steps} of {micro_batches}, "
            f"{plural(config.batch.batch_size, 'sequence')} and {tokens:,} tokens each",
        ]
        self.say("\n".join(filter(None, lines)))

    def _adapters(self) -> str:
        """The adapters that are trained, in one line; "" without."""
        lora, width = self.config.lora, self.run.numerics.dtype.itemsize
        if not lora.rank:
            return ""
        return (
            f"{describe_adapters(self.config.model, lora)}: {12 + width + 4 * (width < 4)} bytes for each trained "
            f"parameter with gradient and optimizer state, {width} for each frozen one"
        )

    def loaded(self, partial: PartialLoad) -> None:
        """Report what --weights-partial loaded, and how the models differ."""
        differences = "; ".join(self.run.start.differences)
        other = f" of another model ({differences})" if differences else ""
        self.say(f"weights from {printable(self.config.checkpoint.weights)}{other}: {partial}")

    def step(self, record: dict[str, float], notes: Sequence[str] = ()) -> None:
        """Report a training step: at once, or with others in one record (--log-every)."""
        self._unwritten.append(record)
        shown = self.write_steps() if record["step"] % self.config.metrics.log_every == 0 else {}
        with suppress(OSError):
            if self._bar is None:  # updates less often if stderr is not a terminal
                self._bar = tqdm(
                    total=self.config.steps, initial=self.run.start.first_step, disable=not self.verbose, unit="step",
                    mininterval=0.2 if sys.stderr.isatty() else 5.0, dynamic_ncols=True,
                    bar_format="{desc}{percentage:3.0f}%|{bar}| step {n}/{total} [{elapsed} < {remaining}{postfix}]",
                )  # fmt: skip
            if shown:
                text = f"loss {shown['loss']:.3f}, {shown['tokens_per_s']:,.0f} tokens/s"
                self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        for note in notes:
            self.say(note)

    def write_steps(self) -> dict[str, float]:
        """Write one record of the steps since the last one, if there are any, and return it.

        A checkpoint needs that: a run that resumes there records only later steps.
        """
        record = merged(self._unwritten) if self._unwritten else {}
        self._unwritten = []
        if record:
            self.metrics.write(**record)
        return record

    def end_of_steps(self) -> None:
        self.write_steps()
        with suppress(OSError):
            if self._bar is not None:
                self._bar.close()

    def close(self) -> None:
        self.end_of_steps()
        self.metrics.close()

    def saved(self, result: SaveResult) -> None:
        """Report a save that failed."""
        if result.error and self.enabled:
            self._error(f"{printable(result.path)} could not be written: {printable(result.error, 1000)}")
            self.metrics.write(step=result.step, save_error=result.error)

    def fail(self, text: str) -> NoReturn:
        """End the run. A command prints the error; from Python, it is raised."""
        if self.enabled and self.run.start.from_command:
            self._error(text)
        raise RunFailed(text)

    def _error(self, text: str) -> None:
        with suppress(OSError):
            of_its_own = "\n" * (self._bar is not None and not self._bar.disable)  # a line, after the progress bar
            sys.stderr.write(f"{of_its_own}{program_name()}: error: {text}\n")

    def sample(self, text: str) -> None:
        self.say("sample:\n" + "\n".join(f"    | {line}" for line in printable_text(text).split("\n")))

    def how_to_resume(self, steps: int) -> str:
        run = with_shown_names(str(self.run.folder))
        if not self.run.start.from_command:
            return f"CheckpointConfig(resume={run!r})"
        launch = Launch.from_environment()
        program = training_command(launch.local_world_size if launch.world_size > 1 else None)
        words = map(shell_word, [*program, "--resume", run, "--steps", str(steps)])
        return " ".join([*words, *words_to_resume(self.run.folder or Path(), self.config)])
