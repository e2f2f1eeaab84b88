"""Turns the options and the facts of this machine into one value: `Run`.

`prepare` finds the facts, and `resolve` decides. The ranks agree on where a restarted run continues, on the free
memory, and on the lock of the folder (restart.py). Everything else is computed on each rank from the same options and
files, without communication. So all ranks reject an invalid option together, and none waits for another.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint import (
    check_model,
    check_weights,
    find_checkpoint,
    find_weights,
    is_published,
    start_companions,
    start_tokenizer,
)
from ..checkpoint.destinations import run_of
from ..checkpoint.huggingface.peft import PeftAdapter
from ..checkpoint.weights import saved_adapters
from ..data import BYTES, TOKENIZER_FILE, GivenBatches, TextData, UnknownTokenizer, load_data, stores
from ..data.chats import ChatOptions, ChatTemplate, template_file
from ..kernels.backend import Kernels, validate_kernels
from ..kernels.fp8 import RECIPES
from ..kernels.fuse import missing_for_compile
from ..kernels.products import choose_products
from ..messages import printable, refuse
from ..models import ModelConfig, StageOptions, split
from ..models.adapters import describe_adapters
from ..models.config import LoRA
from ..pipeline.settings import Numerics, Parallel
from ..runtime.launch import Launch, device_of
from ..runtime.layout import Layout
from ..runtime.learning_rate import OptimizerConfig
from ..runtime.topology import Placed, machine_limit
from ..schedule import FILL, Costs, Schedule, fill
from . import metrics, restart
from .config import CheckpointConfig, ComputeConfig, TrainConfig
from .inputs import changed_inputs
from .layout_choice import Choice, choose, listed_layers
from .memory_check import memory_problem
from .options import OPTIONS_FILE, Request, changes
from .restart import Agreed, agree
from .rules import NOTHING_GIVEN, Given, check_options, compute_rules, new_folder_rules, no_folder_rules

LAYOUT_KEYS = frozenset(
    ("parallel.pp", "parallel.ep", "parallel.cp", "parallel.schedule", "parallel.num_chunks", "batch.micro_batch_size")
)


class StepPrediction(Protocol):
    """The predicted step of a run, on a GPU whose speed is known."""

    def best_layers(self, memory: float) -> tuple[int, ...]:
        """The division of layers over stages with the shortest step; empty if the default division is as fast.

        memory: bytes that each rank may use.
        """
        ...

    def costs(self, layers: tuple[int, ...]) -> Costs:
        """Seconds of each action on each stage. layers: the number of layers of each stage; empty: the default."""
        ...


@dataclass(frozen=True, slots=True)
class Instruments:
    """What the tools add to a run. The app does not import them; commands/train.py passes them.

    first_nonfinite: says where a non-finite loss or gradient comes from, by running batches of a trainer again.
    extensions: further extensions of the trainer (`Build` in extensions/). predict: the prediction for a run; None: its
    GPU is unknown.
    """

    first_nonfinite: Callable[[Any, Iterable[list[Tensor]], bool], str] = lambda *_: "its origin was not looked for"
    extensions: Sequence[Callable[[Any], Any]] = ()
    predict: Callable[[TrainConfig, Choice, torch.dtype, torch.device], StepPrediction | None] = lambda *_: None


NO_INSTRUMENTS = Instruments()


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about this launch, which options cannot change. agreed: what the ranks agreed on before they joined."""

    launch: Launch
    device: torch.device
    agreed: Agreed
    given: Given = NOTHING_GIVEN
    instruments: Instruments = NO_INSTRUMENTS
    from_command: bool = True


@dataclass(frozen=True, slots=True)
class Start:
    """How a run begins."""

    resume: Path | None = None
    """The checkpoint to start from."""
    weights: Mapping[str, Tensor] | Path | None = None
    """The weights to start from: given in memory, or the folder or checkpoint that has them."""
    first_step: int = 0
    """Number of steps that were done before."""
    differences: Sequence[str] = ()
    """With --weights-partial: the options in which the model of the weights differs, one message each."""
    companions: Mapping[str, str] = field(default_factory=dict)
    """The texts of files that came with the weights of a published model, by file name, for an export."""
    changes: Sequence[str] = ()
    """How the options of a resumed run differ from what they were, one text each."""
    restarted: bool = False
    """Whether torchrun restarted this run."""
    from_command: bool = True

    @property
    def folder(self) -> Path | None:
        """The folder of the checkpoint or of the weights."""
        return self.resume or (self.weights if isinstance(self.weights, Path) else None)


@dataclass(frozen=True, slots=True)
class Run:
    """A run with everything decided. config: the options, with the values that were chosen."""

    config: TrainConfig
    choice: Choice
    parallel: Parallel
    numerics: Numerics
    text: TextData | GivenBatches
    start: Start
    folder: Path | None
    """None: the run writes nothing."""
    instruments: Instruments
    store: dist.Store | None = None
    """The rendezvous store, if the ranks have met there."""
    machines: str = ""
    """Where the expert groups are, in one line. Empty on one machine."""

    @property
    def layout(self) -> Layout:
        return self.choice.layout

    @property
    def schedule(self) -> Schedule:
        return self.choice.schedule

    @property
    def device(self) -> torch.device:
        return torch.device(self.numerics.device)

    def placed(self, placed: Placed) -> "Run":
        """This run, for the rank that placement gave this process."""
        choice, model, text = self.choice.at(placed.launch.rank), self.config.model, placed.description
        if placed.span > 1:
            most = machine_limit(placed.span, model.expert_groups, model.top_groups)
            text += f"; a token goes to at most {most} of {placed.span} machines"
        return replace(self, choice=choice, machines=text)


def prepare(
    request: Request, launch: Launch, given: Given = NOTHING_GIVEN, instruments: Instruments = NO_INSTRUMENTS,
    from_command: bool = True, stack: ExitStack | None = None,
) -> Run:  # fmt: skip
    """Find the facts of a run, and resolve it. Collective: the ranks agree on where a restarted run goes on.

    from_command: False for a run from Python, which writes only into a folder that is named. stack: holds the lock of
    the run's folder until it is closed; None: no lock. Raises ValueError.
    """
    request = replace(request, config=with_adapter(request.config))
    config, folder = request.config, None
    check_options(config, given)
    device = device_of(config.compute.device, launch)
    if from_command or config.checkpoint.out or config.checkpoint.resume:
        folder = run_folder(config.checkpoint, config.name)
    else:
        refuse(no_folder_rules(config))
    # The lock comes before the checkpoint is chosen: another run may be writing its last one.
    start = config.checkpoint.resume or config.checkpoint.weights
    agreed = agree(folder, device, launch, config.health.timeout, stack, start)
    return resolve(request, Facts(launch, device, agreed, given, instruments, from_command))


def with_adapter(config: TrainConfig) -> TrainConfig:
    """The options with rank, alpha and targets of lora.adapter. Raises ValueError if it does not fit the weights."""
    lora, weights = config.lora, config.checkpoint.weights
    if not lora.adapter or config.checkpoint.resume:
        return config
    if not weights:
        raise ValueError(f"lora.adapter {printable(lora.adapter)} needs --weights, the model that it adapts")
    found = PeftAdapter(Path(lora.adapter), config.model, start_companions(find_weights(weights))).lora
    found = replace(lora, rank=found.rank, alpha=found.alpha, targets=found.targets)
    asked = {name: value for name in ("rank", "alpha", "targets") if (value := getattr(lora, name))}
    _check_adapters(lora.adapter, config.model, found, replace(found, **asked))
    return replace(config, lora=found)


def _check_adapters(where: str | Path, model: ModelConfig, found: LoRA, asked: LoRA) -> None:
    """Raise ValueError if the options ask for other adapters than those at `where`."""
    has, given = (describe_adapters(model, lora) for lora in (found, asked))
    if has != given:
        raise ValueError(
            f"{printable(where)} has {has}, but the options say {given}: leave out --lora, lora.alpha and lora.targets"
        )


def resolve(request: Request, facts: Facts) -> Run:
    """Decide everything that the options leave open. Raises ValueError for options that cannot run."""
    folder, launch, device = facts.agreed.folder, facts.launch, facts.device
    if folder and not facts.agreed.resume:
        refuse(new_folder_rules(folder, request.config.checkpoint))
    config, optim = request.config, chosen_optimizer(request, facts.given)
    request = replace(request, config=replace(config, optim=optim, compute=chosen_compute(config.compute, device)))
    numerics = numerics_of(request.config, device)
    config, choice = choose_layout(request, facts, numerics)
    refuse(compute_rules(config, numerics, launch.world_size))
    layers = _layers(config, choice, numerics, facts)
    split(config.model, choice.schedule.num_stages, layers)  # raises ValueError
    start = find_start(request, config, facts)
    if facts.given.batches is None:
        config, text = _load_text(config, start, request)
    else:
        config, text = _given_text(config, facts.given, start)
    if config.batch.document_mask and text.tokenizer.end_id < 0:
        raise ValueError("--document-mask: these token ids do not tell where documents end; prepare them again")
    if start.resume:
        start = replace(start, changes=[*start.changes, *changed_inputs(start.resume, config, text)])
    if folder:
        restart.prepare_staged(folder, launch, resumed=start.resume is not None)
        if Path(folder, metrics.FILE).exists():
            metrics.read_records(folder)  # raises ValueError
    parallel = config.parallel
    return Run(
        config, _filled(config, choice, layers, numerics, facts).at(launch.rank),
        Parallel(
            choice.layout.ep, parallel.ep_backend, parallel.expert_sums, layers, parallel.overlap, parallel.wgrad,
            parallel.max_deferred, config.health.timeout, choice.layout.cp,
        ),
        numerics, text, start, folder, facts.instruments, facts.agreed.store,
    )  # fmt: skip


# ---- Device, kernels, precision and optimizer ----


def chosen_compute(compute: ComputeConfig, device: torch.device) -> ComputeConfig:
    """The options with the chosen compile and dtype. run.toml stores them, so a resumed run uses the same."""
    dtype = ("bfloat16" if device.type == "cuda" else "float32") if compute.dtype == "auto" else compute.dtype
    return replace(compute, compile=choose_compiled(compute.compile, device.type), dtype=dtype)


def chosen_optimizer(request: Request, given: Given) -> OptimizerConfig:
    """The options with the chosen optimizer: by default that of the resumed run, AdamW for trained weights, or Muon."""
    config, optim = request.config, request.config.optim
    if optim.name == "auto" and request.saved:
        optim = replace(optim, name=request.saved.get("optim.name", "auto"))
    return optim.chosen(new_model=not (given.weights or config.checkpoint.weights or config.lora.rank))


def numerics_of(config: TrainConfig, device: torch.device) -> Numerics:
    """How this machine computes with these options, which name compile and dtype."""
    compute = config.compute
    recipe = RECIPES[compute.fp8_recipe] if compute.fp8 != "off" else None
    return Numerics(
        device, getattr(torch, compute.dtype),
        StageOptions(
            config.seed, compute.recompute, choose_kernels(compute, device), compute.fused_loss,
            compiled=compute.compile == "on", lora=config.lora if config.lora.rank else None, fp8=recipe,
        ),
        "compiled" if compute.compile == "whole" else "cuda_graph" if compute.cuda_graphs else "",
        choose_products(compute.products, device.type), compute.fp8 == "experts+dispatch",
    )  # fmt: skip


def choose_kernels(compute: ComputeConfig, device: torch.device) -> Kernels:
    kernels = validate_kernels(compute.kernels)
    if kernels == "auto":
        return "triton" if device.type == "cuda" else "reference"
    if kernels == "triton" and device.type == "cpu":
        raise ValueError("--kernels triton needs a GPU, and this run is on the CPU: use --kernels reference, or auto")
    return kernels


def choose_compiled(choice: str, kind: str) -> Literal["on", "off", "whole"]:
    """What to compile with torch.compile."""
    if choice == "off" or (choice == "auto" and kind == "cpu"):
        return "off"
    missing = missing_for_compile()
    if missing and choice != "auto":
        raise ValueError(f"--compile {choice} needs {missing}, or use --compile off")
    return "off" if missing else "whole" if choice == "whole" else "on"


# ---- Layout ----


def choose_layout(request: Request, facts: Facts, numerics: Numerics) -> tuple[TrainConfig, Choice]:
    """The layout, and the options with it.

    A new run without a file, or any layout option on the command line, must fit exactly. A restarted run, and one whose
    layout comes from a file alone, may get the nearest layout that fits.
    """
    config, free = request.config, facts.agreed.free

    def problem(choice: Choice) -> str:
        if not config.health.check_memory or free is None:
            return ""
        return memory_problem(config, choice, numerics.dtype, facts.device, free)

    typed = bool(request.typed & LAYOUT_KEYS)
    strict = not facts.agreed.resume and (typed or not request.from_file)
    choice = choose(config, facts.launch.world_size, strict, problem)
    if choice.changed:  # run.toml keeps what was asked for: the next launch may have the ranks for it
        return config, choice
    layout = choice.layout
    parallel = replace(config.parallel, pp=layout.pp, ep=layout.ep, cp=layout.cp, schedule=choice.name)
    batch = replace(config.batch, micro_batch_size=choice.micro_batch_size)
    return replace(config, parallel=parallel, batch=batch), choice


def _layers(config: TrainConfig, choice: Choice, numerics: Numerics, facts: Facts) -> tuple[int, ...]:
    """The number of layers of each stage: as listed, or predicted for `auto`. Empty: the default division."""
    if config.parallel.layers != "auto":
        return () if choice.changed else listed_layers(config)
    predicted, free = facts.instruments.predict(config, choice, numerics.dtype, facts.device), facts.agreed.free
    return predicted.best_layers(float("inf") if free is None else free) if predicted else ()


def _filled(
    config: TrainConfig, choice: Choice, layers: tuple[int, ...], numerics: Numerics, facts: Facts
) -> Choice:  # fmt: skip
    """For NAME+fill: the choice with weight gradients moved into idle time. Otherwise unchanged."""
    if not choice.name.endswith(FILL):
        return choice
    predicted = facts.instruments.predict(config, choice, numerics.dtype, facts.device)
    costs = predicted.costs(layers) if predicted else costs_by_flops(config, choice.schedule.num_stages, layers)
    return replace(choice, schedule=fill(choice.schedule, costs))


def costs_by_flops(config: TrainConfig, num_stages: int, layers: tuple[int, ...]) -> Costs:
    """The costs of the actions on each stage, in proportion to FLOPs."""
    shares = tuple(spec.share for spec in split(config.model, num_stages, layers))
    return Costs(F=shares, B=tuple(2 * share for share in shares))


# ---- Where it starts and writes, and what it reads ----


def run_folder(options: CheckpointConfig, name: str) -> Path:
    """The run's folder, or the one that stands for its URL: that of --out or --resume, or a new one for `name`.

    Raises ValueError for something that is not a folder.
    """
    if options.out or options.resume:
        return stores.output_folder(options.out or run_of(options.resume or ""), options.staging)
    folders = (Path(f"runs/{name}" + (f"-{i}" if i > 1 else "")) for i in itertools.count(1))
    return next(one for one in folders if restart.is_own_folder(one) or not Path(one, "checkpoints").exists())


def find_start(request: Request, config: TrainConfig, facts: Facts) -> Start:
    """The checkpoint or the weights, which must fit the options. Raises ValueError."""
    options, given, newest = config.checkpoint, facts.given, facts.agreed.newest
    restarted = facts.agreed.resume is not None
    resume = facts.agreed.resume or (find_checkpoint(options.resume, newest=newest) if options.resume else None)
    weights = find_weights(options.weights, newest) if options.weights and not resume else None
    first_step, differences = 0, []
    if resume:
        if request.saved is None and "checkpoint.resume" in request.typed and "batch.data" not in request.typed:
            raise ValueError(
                f"--resume {printable(options.resume)}: {OPTIONS_FILE} with the options of this run is missing: "
                "give --data, and every other option that differs from its default"
            )
        first_step = check_model(resume, config.model)
        saved = saved_adapters(resume)
        _check_adapters(resume, config.model, saved.lora if saved else LoRA(), config.lora)
        trained_by = (request.saved or {}).get("optim.name", config.optim.name)
        if trained_by != config.optim.name:
            what = f"{resume} holds the state of {trained_by}, which {config.optim.name} cannot use"
            raise ValueError(f"{what}: use --optimizer {trained_by}")
    elif weights:
        differences = check_weights(weights, config.model, options.weights_partial)
    if first_step >= config.steps and not restarted:
        raise ValueError(f"{resume} is already at step {first_step}: use a larger --steps")
    companions = start_companions(folder) if (folder := resume or weights) else {}
    template = config.batch.chat_template
    companions = {**companions, **template_file(None if template is None else Path(template))}
    first_weights = None if resume else weights or given.weights
    changed = changes(request.saved, config) if resume and request.saved else ()
    return Start(
        resume, first_weights, first_step, differences, companions, changed, restarted, facts.from_command
    )  # fmt: skip


def _given_text(config: TrainConfig, given: Given, start: Start) -> tuple[TrainConfig, TextData | GivenBatches]:
    """The given batches, and the options that follow from them: validate all sequences, and sample only text."""
    assert given.batches is not None
    vocab_size, shape = config.model.vocab_size, (config.batch.batch_size, config.batch.seq_len)
    tokenizer = start_tokenizer(start.folder, vocab_size) if start.folder else UnknownTokenizer(vocab_size)
    text = GivenBatches(
        given.batches, shape, vocab_size, tokenizer, given.validation, start.first_step, config.batch.document_mask
    )  # fmt: skip
    if text.validation is not None:
        config = replace(config, metrics=replace(config.metrics, eval_sequences=len(text.validation[0])))
    if isinstance(tokenizer, UnknownTokenizer):
        config = replace(config, sample=replace(config.sample, sample_tokens=0))
    return config, text


def _load_text(config: TrainConfig, begin: Start, request: Request) -> tuple[TrainConfig, TextData | GivenBatches]:
    """The text, and the options with a prompt for it: token ids without a tokenizer have no default prompt."""
    batch, vocab_size, start = config.batch, config.model.vocab_size, begin.folder
    unknown = start is not None and is_published(start) and not (start / TOKENIZER_FILE).is_file()
    tokenizer = start_tokenizer(start, vocab_size) if start else BYTES
    if isinstance(tokenizer, UnknownTokenizer) and not unknown:
        tokenizer = BYTES  # `check_tokenizer` says that it is another one
    template = ChatTemplate.find(begin.companions, tokenizer)
    try:
        text = load_data(
            batch.data, batch.seq_len, vocab_size, batch.data_field, batch.data_dtype, tokenizer, batch.special_tokens,
            ChatOptions(template, batch.train_on, batch.packing, batch.too_long),
        )  # fmt: skip
    except ValueError as error:
        if request.saved is None or "batch.data" in request.typed:
            raise
        where = f"this --data is that of {OPTIONS_FILE}, and the current folder is {printable(Path.cwd())}"
        raise ValueError(f"{error}; {where}") from None
    text = replace(text, document_mask=batch.document_mask)
    if start and not unknown:
        text.check_tokenizer(start)
    if isinstance(text.tokenizer, UnknownTokenizer) and config.sample.prompt == TrainConfig().sample.prompt:
        config = replace(config, sample=replace(config.sample, prompt="0"))
    if config.sample.sample_tokens:
        largest = max(text.tokenizer.encode(config.sample.prompt or "\n"), default=None)
        if largest is None or largest >= vocab_size:
            what = "has no token" if largest is None else f"has token {largest}, but model.vocab_size is {vocab_size}"
            raise ValueError(f"--prompt {config.sample.prompt!r} {what}: use another one, or --sample-tokens 0")
    return config, text
