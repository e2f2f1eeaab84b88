"""Checks of the options: types, valid ranges, and rules for combinations that cannot run.

A rule is a row: whether it applies, and what to say then. Rules are grouped by the facts that they need. The first one
that applies raises ValueError, before the run writes anything but its lock file. A command prints it as one line, and
exits with code 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint import list_checkpoints
from ..checkpoint.destinations import STEP_FOLDER, is_there, run_of
from ..checkpoint.huggingface import find_architecture
from ..checkpoint.manifest import RUN_FILE
from ..command_line import OptionError
from ..data import Batches, stores
from ..integrations.trackers import check_installed
from ..kernels.fp8 import RECIPES
from ..messages import LARGEST, Rule, check_range, printable, quoted, refuse
from ..models import check_layers
from ..models.adapters import chosen_targets
from ..models.auxiliary_losses import loss_factors
from ..models.context_parallel import check_context
from ..pipeline.settings import Numerics
from ..runtime.learning_rate import decay_steps
from .config import CheckpointConfig, ComputeConfig, TrainConfig
from .options import all_keys, option_name, value_of

# Options, with their smallest and largest valid values. None is always valid where the type allows it.
RANGES: tuple[tuple[str, float, float], ...] = (
    ("steps parallel.ep parallel.cp parallel.pp parallel.nodes_per_domain parallel.num_chunks parallel.max_deferred "
     "parallel.move_experts_every "
     "batch.seq_len batch.micro_batch_size batch.batch_size checkpoint.save_every checkpoint.keep "
     "metrics.eval_sequences metrics.log_every metrics.eval_every health.max_skipped health.check_replicas_every "
     "optim.decay_steps", 1, LARGEST),
    ("metrics.profile optim.warmup_steps", 0, LARGEST),
    ("sample.sample_tokens", 0, 1_000_000),
    ("lora.rank", 0, 65_536),
    ("lora.alpha", 1e-6, 1e6),
    ("lora.dropout", 0, 0.999999),
    ("seed", -(2**63), 2**63 - 1),
    ("bias_rate optim.final_lr parallel.move_experts_gain", 0, 1),
    ("health.timeout", 1, 1_000_000),
    ("metrics.peak_tflops optim.clip", 1e-6, 1e6),
    ("optim.lr", 1e-12, 100.0),
    ("optim.weight_decay", 0, 1000),
    ("optim.beta1 optim.beta2 optim.momentum", 0, 0.999999),  # with 1, the moving average never changes
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Given:
    """What a program passes to `train` in memory, in place of files."""

    weights: Mapping[str, Tensor] | None = None
    batches: Batches | None = None
    validation: tuple[Tensor, Tensor] | None = None


NOTHING_GIVEN = Given()


def check_options(config: TrainConfig, given: Given = NOTHING_GIVEN) -> None:
    """Raise ValueError for the first invalid option or combination."""
    check_types(config)
    if config.checkpoint.out is not None:
        refuse(out_rules(config.checkpoint.out))
    for options, low, high in RANGES:
        for option in options.split():
            if (value := value_of(config, option)) is not None:
                check_range(option_name(option), value, low, high)
    check_context(config.parallel.cp, config.batch.seq_len)
    config.sample.sampling()  # raises ValueError
    refuse([*option_rules(config), *given_rules(config, given)])
    if config.metrics.tensorboard:
        check_installed("metrics.tensorboard", "tensorboard")
    if config.metrics.wandb:
        check_installed("--wandb", "wandb")
    _check_export(config)
    check_layers(config.model)
    if config.lora.rank:
        chosen_targets(config.model, config.lora)  # raises ValueError


def check_types(config: TrainConfig) -> None:
    """Raise OptionError for a value of the wrong type.

    Values from files and command lines are converted already; those from Python are not.
    """
    default = TrainConfig(preset="tiny")
    for name, kind in ((name, type(getattr(default, name))) for name in TrainConfig.__dataclass_fields__):
        value = getattr(config, name)
        if is_dataclass(kind) and not isinstance(value, kind):
            raise OptionError(f"{name} must be a {kind.__name__}: got {quoted(value, 60)}")
    for key in all_keys().values():
        if not key.name.startswith("model."):  # ModelConfig checks its own
            key.convert(value_of(config, key.name), strict=True)


def option_rules(config: TrainConfig) -> list[Rule]:
    """Options that contradict each other."""
    optim, mtp_layers, batch, start, lora = (
        config.optim, config.model.mtp_layers, config.batch, config.checkpoint, config.lora
    )  # fmt: skip
    decay, wsd = decay_steps(optim, config.steps), optim.schedule == "wsd"
    given = [name for name in ("alpha", "dropout", "targets") if getattr(lora, name)]
    record, replay = batch.record_routes, batch.replay_routes
    return [
        Rule(
            config.parallel.move_experts_every and config.parallel.ep == 1,
            "parallel.move_experts_every needs --ep 2 or more: with --ep 1, each rank has all experts",
        ),
        Rule(
            start.weights and start.resume,
            "--weights starts a new run and --resume continues an old one: use one of them",
        ),
        Rule(start.weights_partial and not start.weights, "--weights-partial needs --weights, the folder to load from"),
        Rule(
            optim.schedule == "cosine" and optim.decay_steps,
            f"optim.decay_steps {optim.decay_steps} is for --lr-schedule wsd: cosine decays in all steps",
        ),
        Rule(
            wsd and optim.warmup_steps + decay > config.steps,
            f"{optim.warmup_steps} warm-up and {decay} decay steps do not fit into --steps {config.steps}: "
            "use fewer --warmup-steps or optim.decay_steps",
        ),
        Rule(
            batch.seq_len <= mtp_layers,
            f"model.mtp_layers {mtp_layers} needs --seq-len {mtp_layers + 1} or more: got {batch.seq_len}",
        ),
        Rule(
            batch.document_mask and batch.special_tokens,
            "--document-mask divides text at end tokens, which batch.special_tokens allows in a document: "
            "use one of them",
        ),
        Rule(given and not lora.rank, f"lora.{min(given, default='')} needs --lora RANK, which trains adapters"),
        Rule(lora.export == "adapter" and not lora.rank, "lora.export=adapter needs --lora RANK"),
        *(
            Rule(folder and stores.is_url(folder), f"{name} {printable(folder)} must be a local folder")
            for name, folder in (("record_routes", record), ("replay_routes", replay))
        ),
    ]


def given_rules(config: TrainConfig, given: Given) -> list[Rule]:
    """What a program gives, against the options."""
    start, lora, eval_every = config.checkpoint, config.lora, config.metrics.eval_every
    return [
        Rule(
            lora.rank and not (start.weights or start.resume or given.weights),
            f"--lora {lora.rank} adapts a trained model: name one with --weights",
        ),
        *(
            Rule(
                given.weights is not None and value,
                f"`weights` and CheckpointConfig({option}=...) both say where to start: use one of them",
            )
            for option, value in (("weights", start.weights), ("resume", start.resume))
        ),
        Rule(
            given.validation is not None and given.batches is None,
            "`validation` needs `batches`: without them, the held-out text of the data is used",
        ),
        Rule(
            given.batches is not None and given.validation is None and eval_every,
            f"eval_every={eval_every} with `batches` needs `validation`",
        ),
    ]


def no_folder_rules(config: TrainConfig) -> list[Rule]:
    """A run from Python has a folder only if it is named. Without one, nothing may be written."""
    start, metrics = config.checkpoint, config.metrics
    return [
        Rule(value, f"{option}={value!r} writes files: name a folder, CheckpointConfig(out=...)")
        for option, value in (
            ("save_every", start.save_every), ("tensorboard", metrics.tensorboard), ("profile", metrics.profile),
            ("wandb", metrics.wandb), ("export", start.export),
        )
    ]  # fmt: skip


def out_rules(out: str) -> list[Rule]:
    """Refuse a folder for a run that cannot be made, or from which no run could be resumed."""
    shown, folder, local = f"--out {printable(out)}", Path(out.removeprefix("file://")), not stores.is_url(out)
    inside = [parent for parent in folder.absolute().parents if local and (parent / RUN_FILE).is_file()]
    return [
        Rule(
            folder.name == "checkpoints" or STEP_FOLDER.fullmatch(folder.name),
            f"{shown} is named like the checkpoints of a run: use another name, such as "
            f"{printable(out.rstrip('/'))}-run",
        ),
        Rule(any("\udc80" <= c <= "\udcff" for c in out), f"{shown} is not UTF-8: use another name"),
        Rule(local and is_there(folder) and not folder.is_dir(), f"{shown} is not a folder: use another --out"),
        Rule(inside, f"{shown} is inside the checkpoint {printable(min(inside, default=''))}: use a folder elsewhere"),
    ]


def new_folder_rules(folder: Path, options: CheckpointConfig) -> list[Rule]:
    """Refuse a folder that has a run, unless --resume continues that run from its newest checkpoint."""
    resume, out, found = options.resume or "", options.out or folder, list_checkpoints(folder / "checkpoints")
    same = bool(resume) and stores.output_folder(run_of(resume), options.staging).resolve() == folder.resolve()
    return [
        Rule(
            same and Path(resume).name in [path.name for path in found[1:]],
            f"--resume {printable(resume)}: the run has later checkpoints, up to {found[0].name if found else ''}; "
            "use --out to continue in another folder",
        ),
        Rule(
            found and not same,
            f"--out {out} already holds a run: continue it with --resume {out}, or use another --out",
        ),
    ]


def compute_rules(config: TrainConfig, numerics: Numerics, processes: int) -> list[Rule]:
    """Options that the device, the kernels or FP8 do not support."""
    kind, kernels = torch.device(numerics.device).type, numerics.options.kernels
    fp8 = _fp8_rules(config, torch.device(numerics.device), kernels) if config.compute.fp8 != "off" else []
    if numerics.whole == "compiled":
        return [
            *fp8, *_compiled_rules(config.compute, kind, kernels),
            *_whole_rules(config, "--compile whole", "--compile on", processes),
        ]  # fmt: skip
    if numerics.whole:
        return [
            *fp8,
            Rule(kind != "cuda", "cuda_graphs needs a GPU, and this run is on the CPU: use compute.cuda_graphs=false"),
            Rule(
                kernels != "triton",
                f"cuda_graphs needs kernels without host syncs: got --kernels {kernels}; use --kernels triton",
            ),
            *_whole_rules(config, "cuda_graphs", "compute.cuda_graphs=false", processes),
        ]
    return fp8


def _compiled_rules(compute: ComputeConfig, kind: str, kernels: str) -> list[Rule]:
    """Options that --compile whole cannot trace or be combined with."""
    instead = "--compile on"
    return [
        Rule(applies, f"--compile whole {reason}")
        for applies, reason in (
            (compute.cuda_graphs, "and cuda_graphs exclude each other: use compute.cuda_graphs=false"),
            (kind != "cpu", f"needs a CPU, and this run is on a GPU: use {instead}"),
            (kernels == "triton", f"cannot trace Triton kernels: use --kernels reference, or {instead}"),
            (compute.recompute != "none", f"saves what torch.compile chooses: use --recompute none, or {instead}"),
            (compute.fp8 != "off", f"cannot trace products in FP8: use compute.fp8=off, or {instead}"),
            (compute.fused_loss, f"cannot trace the loss in blocks: use compute.fused_loss=false, or {instead}"),
        )
    ]


def _whole_rules(config: TrainConfig, whole: str, instead: str, processes: int) -> list[Rule]:
    """Options that need the schedule, or state in Python, which --compile whole and cuda_graphs bypass."""
    model, losses = config.model, [*loss_factors(config.model)]
    routes = config.batch.record_routes or config.batch.replay_routes
    return [
        Rule(applies, f"{whole} {reason}")
        for applies, reason in (
            (processes > 1, f"is for one process: got {processes}; use {instead}"),
            (model.own_layers, f"cannot contain your own {', '.join(model.own_layers)}: use {instead}"),
            (losses, f"cannot count {' and '.join(losses)}: use factors of 0, or {instead}"),
            (model.mtp_layers, f"cannot count the MTP loss: use model.mtp_layers=0, or {instead}"),
            (routes, f"cannot look up routes: leave out record_routes and replay_routes, or use {instead}"),
            (config.metrics.profile, f"runs no schedule to profile: use --profile 0, or {instead}"),
        )
    ]


def _fp8_rules(config: TrainConfig, device: torch.device, kernels: str) -> list[Rule]:
    compute, dispatch = config.compute, config.compute.fp8 == "experts+dispatch"
    fault = RECIPES[compute.fp8_recipe].kernels_fault(device) if kernels == "triton" else ""
    return [
        Rule(fault, f"compute.fp8={compute.fp8} {fault}, or --kernels reference"),
        Rule(
            dispatch and compute.fp8_recipe == "fp32",
            "compute.fp8=experts+dispatch sends scales that are powers of two: use compute.fp8_recipe=ue8m0",
        ),
        Rule(
            dispatch and config.parallel.ep_backend == "deepep",
            "compute.fp8=experts+dispatch sends rows that deepep does not: use --ep-backend auto, or "
            "compute.fp8=experts",
        ),
    ]


def _check_export(config: TrainConfig) -> None:
    """Raise ValueError if --export cannot write this model."""
    if not (folder := config.checkpoint.export):
        return
    if is_there(stores.output_folder(folder, config.checkpoint.staging)):
        raise ValueError(f"--export {printable(folder)} already exists: choose another folder")
    try:
        find_architecture(config.model)
    except ValueError as error:
        raise ValueError(f"--export {printable(folder)}: {error}") from None
