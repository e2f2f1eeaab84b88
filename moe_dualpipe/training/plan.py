"""What a run will do, checked on every rank before the ranks meet: the stages, the text, the checkpoint to resume."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ..checkpoint import check_model, check_weights, find_checkpoint, is_published, start_tokenizer
from ..checkpoint.atomic_folder import is_there
from ..checkpoint.huggingface import companions_of, find_architecture, read_companions
from ..data import (
    BYTES,
    TOKENIZER_FILE,
    Batches,
    GivenBatches,
    TextData,
    UnknownTokenizer,
    load_data,
)
from ..data import stores as storage
from ..messages import printable
from ..models import StageSpec, check_layers, split
from ..runtime.launch import Launch
from ..runtime.topology import Placed, machine_limit
from ..tools.drawing.output import make_folder
from . import metrics, restart, store_run
from .agreement import NOTHING_AGREED, Agreed
from .config import TrainConfig
from .elastic import Elastic, divide
from .optimizer import check_saved
from .profiling import WARM_UP
from .resolve import RunSetup, resolve_options


@dataclass(frozen=True, slots=True)
class Given:
    """What a program passes to `train` in memory, in place of files."""

    weights: Mapping[str, Tensor] | None = None
    batches: Batches | None = None
    validation: tuple[Tensor, Tensor] | None = None


NOTHING_GIVEN = Given()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A checked run."""

    config: TrainConfig
    setup: RunSetup
    arguments: Sequence[str] | None
    """The command line, for the command that resumes the run. None: the run was started from Python."""
    stages: Sequence[StageSpec]
    text: TextData | GivenBatches
    resume: Path | None
    """The checkpoint to start from."""
    weights: Mapping[str, Tensor] | None
    """The weights to start from, if they are given in memory."""
    differences: Sequence[str]
    """With --weights-partial: the options in which the model of the weights differs, one message each."""
    first_step: int
    """Number of steps that were done before."""
    profiled_steps: int
    companions: Mapping[str, str]
    """The texts of files that came with the weights of a published model, by file name, for an export."""
    elastic: Elastic | None
    """With --elastic: how the step was divided."""
    machines: str = ""
    """Where the expert groups are, in one line. Empty on one machine."""

    @property
    def sequences(self) -> int:
        """The number of sequences of a step that are drawn together."""
        own = self.setup.schedule.num_micro_batches * self.config.batch.micro_batch_size
        return self.elastic.sequences if self.elastic else own

    def placed(self, placed: Placed) -> "RunPlan":
        """The plan of the rank that this process has become."""
        layout, model, text = replace(self.setup.layout, rank=placed.launch.rank), self.config.model, placed.description
        if placed.span > 1:
            most = machine_limit(placed.span, model.expert_groups, model.top_groups)
            text += f"; a token goes to at most {most} of {placed.span} machines"
        return replace(self, setup=replace(self.setup, layout=layout), machines=text)


def plan_run(
    config: TrainConfig, launch: Launch, arguments: Sequence[str] | None = (), given: Given = NOTHING_GIVEN,
    agreed: Agreed = NOTHING_AGREED,
) -> RunPlan:  # fmt: skip
    """Check the options, the text, the checkpoint and the folders. Raises ValueError.

    arguments: the command line. None: the run is started from Python, and writes only into a folder that is named.
    agreed: with --elastic, what the ranks have agreed on.
    """
    elastic = None
    if config.parallel.elastic:
        config, elastic = divide(config, launch.world_size, agreed)
    _check_given(given, config)
    _check_export(config)
    setup = resolve_options(config, launch, new_folder=arguments is not None)
    check_layers(config.model)
    stages = split(config.model, setup.schedule.num_stages)
    restarted = agreed.resume or (restart.newest_checkpoint(setup.folder) if setup.folder and not elastic else None)
    options = config.checkpoint
    resume = restarted or (_find(options.resume, options.staging) if options.resume else None)
    weights = storage.local_path(options.weights, options.staging) if options.weights else None
    if weights:
        storage.open_folder(weights)
    first_step, differences = 0, []
    if resume:
        first_step = check_model(resume, config.model)
        check_saved(resume, config.optim, config.model)
    elif weights:
        differences = check_weights(weights, config.model, options.weights_partial)
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
    if given.batches:
        text = _given_text(config, setup, given, resume or weights, first_step)
        config = _options_of_given(config, text)
    else:
        text = _load_text(config, resume or weights)
    if config.batch.document_mask and text.tokenizer.end_id < 0:
        raise ValueError("--document-mask: these token ids do not tell where documents end; prepare them again")
    if setup.folder:
        make_folder(setup.folder)
        store_run.prepare(setup.folder, launch, resumed=resume is not None)
        if Path(setup.folder, metrics.FILE).exists():
            metrics.read_records(setup.folder)  # raises ValueError
    return RunPlan(
        config, setup, arguments, stages, text, resume, None if resume else given.weights, differences, first_step,
        profiled_steps, _companions(resume, weights), elastic,
    )  # fmt: skip


def _find(run: str, staging: str | None) -> Path:
    storage.local_path(run, staging)  # copies of files of a URL come here
    return find_checkpoint(run)


def _companions(resume: Path | None, weights: Path | None) -> dict[str, str]:
    if resume:
        return companions_of(resume)
    return read_companions(weights) if weights and is_published(weights) else {}


def _check_export(config: TrainConfig) -> None:
    """Raise ValueError if --export cannot write this model."""
    folder = config.checkpoint.export
    if not folder:
        return
    if is_there(store_run.folder_of(store_run.location(folder), config.checkpoint.staging)):
        raise ValueError(f"--export {printable(folder)} already exists: choose another folder")
    try:
        find_architecture(config.model)
    except ValueError as error:
        raise ValueError(f"--export {printable(folder)}: {error}") from None


def _check_given(given: Given, config: TrainConfig) -> None:
    """Raise ValueError for something given that contradicts an option."""
    for option in ("weights", "resume"):
        if given.weights is not None and getattr(config.checkpoint, option):
            raise ValueError(f"`weights` and CheckpointConfig({option}=...) both say where to start: use one of them")
    if given.validation is not None and given.batches is None:
        raise ValueError("`validation` needs `batches`: without them, the held-out text of the data is used")
    if given.batches is not None and given.validation is None and config.metrics.eval_every:
        raise ValueError(f"eval_every={config.metrics.eval_every} with `batches` needs `validation`")


def _given_text(
    config: TrainConfig, setup: RunSetup, given: Given, start: Path | None, first_step: int
) -> GivenBatches:  # fmt: skip
    assert given.batches is not None
    sequences = setup.schedule.num_micro_batches * config.batch.micro_batch_size * setup.layout.dp
    vocab_size = config.model.vocab_size
    tokenizer = start_tokenizer(start, vocab_size) if start else UnknownTokenizer(vocab_size)
    shape = sequences, config.batch.seq_len
    return GivenBatches(given.batches, shape, vocab_size, tokenizer, given.validation, first_step)


def _options_of_given(config: TrainConfig, text: GivenBatches) -> TrainConfig:
    """The options with those that follow from given batches: validate all sequences, and sample only text."""
    if text.validation is not None:
        config = replace(config, metrics=replace(config.metrics, eval_sequences=len(text.validation[0])))
    if isinstance(text.tokenizer, UnknownTokenizer):
        config = replace(config, sample=replace(config.sample, sample_tokens=0))
    return config


def _load_text(config: TrainConfig, start: Path | None) -> TextData:
    batch, vocab_size = config.batch, config.model.vocab_size
    unknown = start is not None and is_published(start) and not (start / TOKENIZER_FILE).is_file()
    tokenizer = start_tokenizer(start, vocab_size) if start else BYTES
    if isinstance(tokenizer, UnknownTokenizer) and not unknown:
        tokenizer = BYTES  # `check_tokenizer` says that it is another one
    cache = None
    if any(map(storage.is_url, batch.data)):
        cache = storage.block_cache(batch.data_cache, int(batch.data_cache_gb * 1e9), config.checkpoint.staging)
    text = load_data(batch.data, batch.seq_len, vocab_size, batch.data_field, batch.data_dtype, tokenizer, cache)
    if start and not unknown:
        text.check_tokenizer(start)
    if config.sample.sample_tokens:
        largest = max(text.tokenizer.encode(config.sample.prompt or "\n"), default=None)
        if largest is None or largest >= vocab_size:
            what = "has no token" if largest is None else f"has token {largest}, but --model.vocab-size is {vocab_size}"
            raise ValueError(f"--prompt {config.sample.prompt!r} {what}: use another one, or --sample-tokens 0")
    return text
