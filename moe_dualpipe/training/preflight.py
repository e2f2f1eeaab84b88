"""What a run will do, checked before the process groups exist: layout, stages, text, and the checkpoint to resume.

The ranks agree on where a restarted run continues, on the free memory, and on the lock of the folder (restart.py).
Everything else follows from the options, so all ranks come to the same result: an invalid option ends the run with one
line and exit code 2, and never hangs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint import (
    check_model,
    check_weights,
    find_checkpoint,
    find_weights,
    is_published,
    start_tokenizer,
)
from ..checkpoint.atomic_folder import is_there
from ..checkpoint.huggingface import companions_of, find_architecture, read_companions
from ..data import BYTES, TOKENIZER_FILE, Batches, GivenBatches, TextData, UnknownTokenizer, load_data, stores
from ..kernels.backend import Kernels
from ..kernels.products import Library, choose_products
from ..messages import printable
from ..models import StageSpec, check_layers, split
from ..runtime.known_gpus import peak_flops
from ..runtime.launch import Launch
from ..runtime.layout import Layout
from ..runtime.topology import Placed, machine_limit
from ..schedule import FILL, Costs, Schedule, fill
from . import metrics, restart, setup
from .checks import check_options
from .config import TrainConfig
from .extensions import Build
from .layout_choice import Choice, choose, listed_layers
from .memory_check import memory_problem
from .options import OPTIONS_FILE, Request, changes
from .restart import Agreed, agree

LAYOUT_KEYS = frozenset(
    ("parallel.pp", "parallel.ep", "parallel.schedule", "parallel.num_chunks", "batch.micro_batch_size")
)


@dataclass(frozen=True, slots=True)
class Given:
    """What a program passes to `train` in memory, in place of files."""

    weights: Mapping[str, Tensor] | None = None
    batches: Batches | None = None
    validation: tuple[Tensor, Tensor] | None = None


class StepPrediction(Protocol):
    """The predicted step of a run, on a GPU whose speed is known."""

    def best_layers(self, memory: float) -> tuple[int, ...]:
        """The number of layers of each stage with the shortest step. memory: bytes that each rank may use.

        Empty if the usual numbers are as good.
        """
        ...

    def costs(self, layers: tuple[int, ...]) -> Costs:
        """Seconds of the actions on each stage, with these numbers of layers; empty: the usual ones."""
        ...


@dataclass(frozen=True, slots=True)
class Instruments:
    """What the tools add to a run. The app does not import them; commands/train.py passes them.

    first_nonfinite: says where a non-finite loss or gradient comes from, by running batches of a trainer again.
    extensions: further extensions of the trainer. predict: the prediction for a run; None: its GPU is unknown.
    """

    first_nonfinite: Callable[[Any, Iterable[list[Tensor]], bool], str] = lambda *_: "its origin was not looked for"
    extensions: Sequence[Build] = ()
    predict: Callable[[TrainConfig, Choice, torch.dtype, torch.device], StepPrediction | None] = lambda *_: None


@dataclass(frozen=True, slots=True)
class Run:
    """A checked run. config: the options, with the values that were chosen. folder: None: the run writes nothing."""

    config: TrainConfig
    changes: Sequence[str]
    """How the options of a resumed run differ from what they were, one text each."""
    choice: Choice
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    products: Library
    compiled: setup.Compiled
    folder: Path | None
    layers: tuple[int, ...]
    """The number of layers of each stage; empty: about the same FLOPs in each."""
    stages: Sequence[StageSpec]
    text: TextData | GivenBatches
    resume: Path | None
    """The checkpoint to start from."""
    weights: Mapping[str, Tensor] | Path | None
    """The weights to start from: given in memory, or the folder or checkpoint that has them."""
    differences: Sequence[str]
    """With --weights-partial: the options in which the model of the weights differs, one message each."""
    first_step: int
    """Number of steps that were done before."""
    restarted: bool
    """Whether this launcher has begun the run before."""
    companions: Mapping[str, str]
    """The texts of files that came with the weights of a published model, by file name, for an export."""
    from_command: bool
    instruments: Instruments
    store: dist.Store | None = None
    """Where the ranks have met."""
    filled: Schedule | None = None
    """The schedule, if its weight gradients were moved to where ranks wait."""
    machines: str = ""
    """Where the expert groups are, in one line. Empty on one machine."""
    peak_flops: float | None = None
    """Of one device; None: unknown."""

    @property
    def schedule(self) -> Schedule:
        return self.filled or self.choice.schedule

    def placed(self, placed: Placed) -> "Run":
        """The run of the rank that this process has become."""
        layout, model, text = replace(self.layout, rank=placed.launch.rank), self.config.model, placed.description
        if placed.span > 1:
            most = machine_limit(placed.span, model.expert_groups, model.top_groups)
            text += f"; a token goes to at most {most} of {placed.span} machines"
        return replace(self, layout=layout, machines=text)


NOTHING_GIVEN, NO_INSTRUMENTS = Given(), Instruments()


def prepare(
    request: Request, launch: Launch, given: Given = NOTHING_GIVEN, instruments: Instruments = NO_INSTRUMENTS,
    from_command: bool = True, stack: ExitStack | None = None,
) -> Run:  # fmt: skip
    """Check everything about a run. Collective: the ranks agree on where a restarted run goes on. Raises ValueError.

    from_command: False for a run from Python, which writes only into a folder that is named. stack: holds the lock of
    the run's folder until it is closed; None: no lock.
    """
    config = request.config
    check_options(config)
    _check_given(given, config)
    _check_export(config)
    check_layers(config.model)
    device, kernels = setup.choose_kernels(config.compute, launch)
    options, folder = config.checkpoint, None
    if from_command or options.out or options.resume:
        folder = setup.run_folder(options, config.name)
    else:
        setup.check_writes_nothing(config)
    # The lock comes before the checkpoint is chosen: another run may be writing its last one.
    agreed = agree(folder, device, launch, config.health.timeout, stack)
    folder, restarted = agreed.folder, agreed.resume is not None
    if folder and not restarted:
        setup.check_new(folder, options)
    dtype = setup.choose_dtype(config.compute, device.type)
    config, choice = _choose(request, launch, agreed, device, dtype)
    compiled = setup.choose_compiled(config.compute.compile, device.type)
    setup.check_whole(config, device, kernels, launch.world_size)
    setup.check_fp8(config, device, kernels)
    products = choose_products(config.compute.products, device.type)
    chosen = {"compile": compiled, "dtype": str(dtype).removeprefix("torch.")}
    config = replace(config, compute=replace(config.compute, **chosen))
    layers = _layers(config, choice, agreed.free, dtype, device, instruments)
    resume = agreed.resume or (find_checkpoint(options.resume) if options.resume else None)
    weights = find_weights(options.weights) if options.weights and not resume else None
    first_step, differences = 0, []
    if resume:
        if request.saved is None and "checkpoint.resume" in request.typed and "batch.data" not in request.typed:
            raise ValueError(
                f"--resume {printable(options.resume)}: {OPTIONS_FILE} with the options of this run is missing: "
                "give --data, and every other option that differs from its default"
            )
        first_step = check_model(resume, config.model)
        trained_by = (request.saved or {}).get("optim.name", config.optim.name)
        if trained_by != config.optim.name:
            what = f"{resume} holds the state of {trained_by}, which {config.optim.name} cannot use"
            raise ValueError(f"{what}: use --optimizer {trained_by}")
    elif weights:
        differences = check_weights(weights, config.model, options.weights_partial)
    if first_step >= config.steps and not restarted:
        raise ValueError(f"{resume} is already at step {first_step}: use a larger --steps")
    if given.batches:
        config, text = _given_text(config, given, resume or weights, first_step)
    else:
        text = _load_text(config, resume or weights, request)
    if config.batch.document_mask and text.tokenizer.end_id < 0:
        raise ValueError("--document-mask: these token ids do not tell where documents end; prepare them again")
    if folder:
        restart.prepare_staged(folder, launch, resumed=resume is not None)
        if Path(folder, metrics.FILE).exists():
            metrics.read_records(folder)  # raises ValueError
    changed = changes(request.saved, config) if resume and request.saved else []
    return Run(
        config, changed, choice, replace(choice.layout, rank=launch.rank), device, dtype, kernels, products,
        compiled, folder, layers, split(config.model, choice.schedule.num_stages, layers), text, resume,
        None if resume else weights or given.weights, differences, first_step, restarted,
        _companions(resume or weights), from_command, instruments, agreed.store,
        _filled(config, choice, layers, dtype, device, instruments),
        peak_flops=_peak_flops(config, device, dtype),
    )  # fmt: skip


def _choose(
    request: Request, launch: Launch, agreed: Agreed, device: torch.device, dtype: torch.dtype
) -> tuple[TrainConfig, Choice]:
    """The layout, and the options with it. What was typed for a new run, or for --resume, must fit as it is."""
    config = request.config

    def problem(choice: Choice) -> str:
        if not config.health.check_memory or agreed.free is None:
            return ""
        return memory_problem(config, choice, dtype, device, agreed.free)

    typed = bool(request.typed & LAYOUT_KEYS)
    strict = agreed.resume is None and (typed or not request.from_file)
    choice = choose(config, launch.world_size, strict, problem)
    if choice.changed:  # run.toml keeps what was asked for: the next launch may have the ranks for it
        return config, choice
    parallel = replace(config.parallel, pp=choice.layout.pp, ep=choice.layout.ep, schedule=choice.name)
    batch = replace(config.batch, micro_batch_size=choice.micro_batch_size)
    return replace(config, parallel=parallel, batch=batch), choice


def _layers(
    config: TrainConfig, choice: Choice, free: int | None, dtype: torch.dtype, device: torch.device,
    instruments: Instruments,
) -> tuple[int, ...]:  # fmt: skip
    """The number of layers of each stage, if `parallel.layers` says so for this layout."""
    if config.parallel.layers != "auto":
        return () if choice.changed else listed_layers(config)
    predicted = instruments.predict(config, choice, dtype, device)
    return predicted.best_layers(float("inf") if free is None else free) if predicted else ()


def _filled(
    config: TrainConfig, choice: Choice, layers: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    instruments: Instruments,
) -> Schedule | None:  # fmt: skip
    if not choice.name.endswith(FILL):
        return None
    if predicted := instruments.predict(config, choice, dtype, device):
        return fill(choice.schedule, predicted.costs(layers))
    return fill(choice.schedule, costs_by_flops(config, choice.schedule.num_stages, layers))


def costs_by_flops(config: TrainConfig, num_stages: int, layers: tuple[int, ...]) -> Costs:
    """The costs of the actions on each stage, in proportion to FLOPs."""
    shares = tuple(spec.share for spec in split(config.model, num_stages, layers))
    return Costs(F=shares, B=tuple(2 * share for share in shares))


def _peak_flops(config: TrainConfig, device: torch.device, dtype: torch.dtype) -> float | None:
    if config.metrics.peak_tflops:
        return config.metrics.peak_tflops * 1e12
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def _companions(start: Path | None) -> dict[str, str]:
    if start is None:
        return {}
    return read_companions(start) if is_published(start) else companions_of(start)


def _check_export(config: TrainConfig) -> None:
    """Raise ValueError if --export cannot write this model."""
    folder = config.checkpoint.export
    if not folder:
        return
    if is_there(stores.output_folder(folder, config.checkpoint.staging)):
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
    config: TrainConfig, given: Given, start: Path | None, first_step: int
) -> tuple[TrainConfig, GivenBatches]:
    """The given batches, and the options that follow from them: validate all sequences, and sample only text."""
    assert given.batches is not None
    vocab_size, shape = config.model.vocab_size, (config.batch.batch_size, config.batch.seq_len)
    tokenizer = start_tokenizer(start, vocab_size) if start else UnknownTokenizer(vocab_size)
    text = GivenBatches(given.batches, shape, vocab_size, tokenizer, given.validation, first_step)
    if text.validation is not None:
        config = replace(config, metrics=replace(config.metrics, eval_sequences=len(text.validation[0])))
    if isinstance(tokenizer, UnknownTokenizer):
        config = replace(config, sample=replace(config.sample, sample_tokens=0))
    return config, text


def _load_text(config: TrainConfig, start: Path | None, request: Request) -> TextData:
    batch, vocab_size = config.batch, config.model.vocab_size
    unknown = start is not None and is_published(start) and not (start / TOKENIZER_FILE).is_file()
    tokenizer = start_tokenizer(start, vocab_size) if start else BYTES
    if isinstance(tokenizer, UnknownTokenizer) and not unknown:
        tokenizer = BYTES  # `check_tokenizer` says that it is another one
    try:
        text = load_data(batch.data, batch.seq_len, vocab_size, batch.data_field, batch.data_dtype, tokenizer)
    except ValueError as error:
        if request.saved is None or "batch.data" in request.typed:
            raise
        where = f"this --data is that of {OPTIONS_FILE}, and the current folder is {printable(Path.cwd())}"
        raise ValueError(f"{error}; {where}") from None
    if start and not unknown:
        text.check_tokenizer(start)
    if config.sample.sample_tokens:
        largest = max(text.tokenizer.encode(config.sample.prompt or "\n"), default=None)
        if largest is None or largest >= vocab_size:
            what = "has no token" if largest is None else f"has token {largest}, but model.vocab_size is {vocab_size}"
            raise ValueError(f"--prompt {config.sample.prompt!r} {what}: use another one, or --sample-tokens 0")
    return text
