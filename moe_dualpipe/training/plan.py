"""What a run will do, checked before any rank hears of another: the schedule, the stages, the text, what to resume."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint import check_model, check_weights, find_checkpoint
from ..data import TextData, load_data
from ..drawing.output import make_folder
from ..models import split
from ..models.experts import expert_class
from ..runtime.groups import Layout
from ..schedule import Schedule, build
from . import metrics, restart
from .config import TrainConfig
from .optimizer import check_saved
from .profiling import WARM_UP


class Plan:
    """Everything that can be checked without another rank: the schedule, the stages, the text, what to resume from."""

    def __init__(
        self,
        config: TrainConfig,
        arguments: Sequence[str],
        text: TextData,
        resume: Path | None,
        first_step: int,
    ):
        self.config, self.arguments, self.text = config, arguments, text
        self.resume, self.first_step = resume, first_step
        self.schedule: Schedule = build(config.schedule, config.pp, config.micro_batches, config.num_chunks or None)
        self.stages = split(config.model, self.schedule.num_stages)

    @classmethod
    def make(cls, config: TrainConfig, arguments: Sequence[str] = ()) -> "Plan":
        """Plan the run of a `resolve`d configuration, which `arguments` asked for.

        Raises ValueError for whatever a user would want to change.
        """
        if config.seq_len <= (ahead := config.model.mtp_layers):
            raise ValueError(f"--model.mtp-layers {ahead} needs --seq-len {ahead + 1} or more: got {config.seq_len}")
        if config.document_mask and ahead:
            raise ValueError(
                "--document-mask: what predicts further ahead attends to all documents; leave it out, or use "
                f"--model.mtp-layers 0: got {ahead}"
            )
        expert_class(config.model.experts)
        again = restart.newest(config.out)  # an attempt before this one of the same launcher
        resume = again or (find_checkpoint(config.resume) if config.resume else None)
        first_step = check_model(resume, config.model) if resume else 0
        if resume:
            check_saved(resume, config.optim)
        elif config.weights:
            check_weights(Path(config.weights), config.model)
        if first_step >= config.steps and not again:
            raise ValueError(f"{resume} is at step {first_step} already: use --steps larger than that to go on")
        if config.profile and first_step + WARM_UP + config.profile > config.steps and not again:
            raise ValueError(
                f"--profile {config.profile} needs {WARM_UP + config.profile} steps, {WARM_UP} of them to warm up, but "
                f"the run has {config.steps - first_step}: use --steps {first_step + WARM_UP + config.profile}"
            )
        if first_step + WARM_UP + config.profile > config.steps:
            config = dataclasses.replace(config, profile=0)  # an attempt that begins so late records nothing
        text = load_data(config.data, config.seq_len, config.model.vocab_size, config.data_field, config.data_dtype)
        if start := resume or config.weights:
            text.check_tokenizer(Path(start))
        _check_prompt(config, text)
        if config.document_mask and text.tokenizer.end_id < 0:
            raise ValueError("--document-mask: where documents end is not known of these token ids; prepare them anew")
        make_folder(Path(config.out))
        if Path(config.out, metrics.FILE).exists():
            metrics.read_records(Path(config.out))  # a line that is none is told before the ranks meet
        return cls(config, arguments, text, resume, first_step)

    def introduction(self, layout: Layout, dense: float, experts: float, state_mb: float) -> str:
        """The run in words: dense, experts are numbers of parameters, state_mb what the optimizer keeps on a rank."""
        config, model = self.config, self.config.model
        active = dense + experts * model.experts_per_token / model.num_experts
        tokens = config.micro_batches * config.micro_batch_size * config.seq_len * layout.dp
        lines = [
            f"model {config.preset}: {(dense + experts) / 1e6:.2f} M parameters, {active / 1e6:.2f} M active",
            f"{config.schedule} over {layout.pp} pipeline x {layout.dp} data-parallel ranks"
            f"{f', experts over {layout.ep}' if layout.ep > 1 else ''}, on {config.device} in {config.dtype}"
            f"{', Triton kernels' if config.kernels == 'triton' else ''}",
            f"{config.optim.name}: {state_mb:,.1f} MB of optimizer state on the fullest rank",
        ]
        for index, spec in enumerate(self.stages):
            holders = self.schedule.placement.holders(index)
            where = f"rank{'s' * (len(holders) > 1)} {' and '.join(map(str, holders))}"
            lines.append(f"  stage {index} on pipeline {where}: {spec}")
        start = f"resumed from {self.resume}, " if self.resume else ""
        steps = f"steps {self.first_step + 1} to {config.steps}"
        of = f"{config.micro_batches * layout.dp} micro-batches, {tokens:,} tokens each"
        return "\n".join([*lines, self.text.description, f"{start}{steps} of {of}"])


def _check_prompt(config: TrainConfig, text: TextData) -> None:
    if not config.sample_tokens:
        return
    largest, size = max(text.tokenizer.encode(config.prompt or "\n"), default=None), config.model.vocab_size
    if largest is None or largest >= size:
        what = "has no token" if largest is None else f"has token {largest}, and the model's are below {size}"
        raise ValueError(f"--prompt {config.prompt!r} {what}: use another one, or --sample-tokens 0")
