"""What a run will do, checked on every rank before the ranks meet: the stages, the text, the checkpoint to resume."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import check_model, check_weights, find_checkpoint
from ..data import TextData, load_data
from ..drawing.output import make_folder
from ..models import StageSpec, check_layers, split
from ..runtime.launch import Launch
from . import metrics, restart
from .config import TrainConfig
from .optimizer import check_saved
from .profiling import WARM_UP
from .resolve import RunSetup, resolve_options


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A checked run."""

    config: TrainConfig
    setup: RunSetup
    arguments: Sequence[str] | None
    """The command line, for the command that resumes the run. None: the run was started from Python."""
    stages: Sequence[StageSpec]
    text: TextData
    resume: Path | None
    """The checkpoint to start from."""
    differences: Sequence[str]
    """With --weights-partial: the options in which the model of the weights differs, one message each."""
    first_step: int
    """Number of steps that were done before."""
    profiled_steps: int


def plan_run(config: TrainConfig, launch: Launch, arguments: Sequence[str] | None = ()) -> RunPlan:
    """Check the options, the text, the checkpoint and the folders. Raises ValueError.

    arguments: the command line. None: the run is started from Python, and writes only into a folder that is named.
    """
    setup = resolve_options(config, launch, new_folder=arguments is not None)
    check_layers(config.model)
    stages = split(config.model, setup.schedule.num_stages)
    restarted = restart.newest_checkpoint(setup.folder) if setup.folder else None
    resume = restarted or (find_checkpoint(config.checkpoint.resume) if config.checkpoint.resume else None)
    weights = Path(config.checkpoint.weights) if config.checkpoint.weights else None
    first_step, differences = 0, []
    if resume:
        first_step = check_model(resume, config.model)
        check_saved(resume, config.optim, config.model)
    elif weights:
        differences = check_weights(weights, config.model, config.checkpoint.weights_partial)
    profiled_steps = config.metrics.profile
    last_profiled = first_step + WARM_UP + profiled_steps
    if restarted:
        profiled_steps = profiled_steps if last_profiled <= config.steps else 0
    elif first_step >= config.steps:
        raise ValueError(f"{resume} is already at step {first_step}: use a larger --steps")
    elif profiled_steps and last_profiled > config.steps:
        raise ValueError(
            f"--profile {profiled_steps} needs {WARM_UP + profiled_steps} steps, including {WARM_UP} to warm up, but "
            f"the run has {config.steps - first_step}: use --steps {last_profiled}"
        )
    text = _load_text(config, resume or weights)
    if setup.folder:
        make_folder(setup.folder)
        if Path(setup.folder, metrics.FILE).exists():
            metrics.read_records(setup.folder)  # raises ValueError
    return RunPlan(config, setup, arguments, stages, text, resume, differences, first_step, profiled_steps)


def _load_text(config: TrainConfig, start: Path | None) -> TextData:
    batch, vocab_size = config.batch, config.model.vocab_size
    text = load_data(batch.data, batch.seq_len, vocab_size, batch.data_field, batch.data_dtype)
    if start:
        text.check_tokenizer(start)
    if config.sample.sample_tokens:
        largest = max(text.tokenizer.encode(config.sample.prompt or "\n"), default=None)
        if largest is None or largest >= vocab_size:
            what = "has no token" if largest is None else f"has token {largest}, but --model.vocab-size is {vocab_size}"
            raise ValueError(f"--prompt {config.sample.prompt!r} {what}: use another one, or --sample-tokens 0")
    if batch.document_mask and text.tokenizer.end_id < 0:
        raise ValueError("--document-mask: these token ids do not tell where documents end; prepare them again")
    return text
