"""Choose the values of this launch from the options: ranks, schedule, device, dtype, kernels and folder."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint import list_checkpoints
from ..kernels.backend import Kernels, validate_kernels
from ..kernels.fuse import missing_for_compile
from ..messages import plural
from ..models.auxiliary_losses import loss_factors
from ..runtime.launch import Launch, choose_device, count_gpus
from ..runtime.layout import Layout, check_ep_divides_experts, check_ep_divides_ranks, divisors
from ..schedule import Schedule, build, default_micro_batches, default_schedule
from ..tools.planner.flops import train_flops_per_token
from . import restart, store_run
from .checks import check_options
from .config import CheckpointConfig, ComputeConfig, TrainConfig

WORTH_COMPILING = 1e14
"""FLOPs of a rank in a run on a CPU from which --compile auto compiles: about an hour and a half on one core.

Compiling takes about a minute, unless an earlier run left its graphs on the disk, and saves about 2% of the time.
"""


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The values of a run that depend on the launch."""

    layout: Layout
    schedule: Schedule
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    compiled: bool
    folder: Path | None
    """The run's folder: checkpoints, metrics, profile. None: the run writes nothing."""


def resolve_options(config: TrainConfig, launch: Launch, new_folder: bool = True) -> RunSetup:
    """Check all options and choose the values of this launch. Raises ValueError with the numbers and what to use.

    new_folder: without --out and --resume, choose a new folder; False: write nothing.
    """
    check_options(config)
    device, kernels = choose_kernels(config.compute, launch)
    layout = choose_layout(config, launch)
    name, micro_batches = choose_schedule(config, layout.pp)
    schedule = build(name, layout.pp, micro_batches, config.parallel.num_chunks)
    compiled = _compiled(config, device, layout, micro_batches)
    if config.compute.cuda_graphs:
        check_cuda_graphs(config, device, kernels, launch.world_size)
    options = config.checkpoint
    elastic = config.parallel.elastic is not None
    folder = run_folder(options, config.name, elastic) if new_folder or options.out or options.resume else None
    if folder is None:
        _check_writes_nothing(config)
    dtype = choose_dtype(config.compute, device.type)
    return RunSetup(layout, schedule, device, dtype, kernels, compiled, folder)


def choose_dtype(compute: ComputeConfig, kind: str) -> torch.dtype:
    """The type of weights and activations on a device of this kind, cpu or cuda."""
    auto = "bfloat16" if kind == "cuda" else "float32"
    return getattr(torch, auto if compute.dtype == "auto" else compute.dtype)


def choose_schedule(config: TrainConfig, pp: int) -> tuple[str, int]:
    """The name of the schedule for `pp` pipeline ranks, and the number of micro-batches of a data-parallel rank."""
    name = config.parallel.schedule
    micro_batches = config.batch.micro_batches or default_micro_batches(pp)
    return default_schedule(pp) if name == "auto" else name, micro_batches


def choose_kernels(compute: ComputeConfig, launch: Launch) -> tuple[torch.device, Kernels]:
    """The device of this process, and its kernels."""
    kind = choose_device(compute.device, count_gpus(), launch.local_world_size)
    device = torch.device("cuda", launch.local_rank) if kind == "cuda" else torch.device("cpu")
    kernels = validate_kernels(compute.kernels)
    if kernels == "auto":
        kernels = "triton" if kind == "cuda" else "reference"
    elif kernels == "triton" and kind == "cpu":
        raise ValueError("--kernels triton needs a GPU, and this run is on the CPU: use --kernels reference, or auto")
    return device, kernels


def _compiled(config: TrainConfig, device: torch.device, layout: Layout, micro_batches: int) -> bool:
    """Whether to fuse operators with torch.compile. A run makes the same choice if it is resumed."""
    choice = config.compute.compile
    if choice == "off":
        return False
    missing = missing_for_compile()
    if missing and choice == "on":
        raise ValueError(f"--compile on needs {missing}, or use --compile off")
    if choice == "auto" and device.type == "cpu":
        sequences = config.steps * micro_batches * config.batch.micro_batch_size
        flops = sequences * config.batch.seq_len * train_flops_per_token(config.model, config.batch.seq_len)
        return missing is None and flops / layout.pp >= WORTH_COMPILING
    return missing is None


def check_cuda_graphs(config: TrainConfig, device: torch.device, kernels: Kernels, processes: int) -> None:
    """Raise ValueError for a run that --cuda-graphs cannot capture, or that keeps state in Python."""
    model, losses = config.model, [*loss_factors(config.model)]
    refused = (
        (device.type != "cuda", "needs a GPU, and this run is on the CPU: use --no-cuda-graphs"),
        (processes > 1, f"is for one process: got {processes}; use --no-cuda-graphs"),
        (kernels != "triton", f"needs kernels without host syncs: got --kernels {kernels}; use --kernels triton"),
        (model.own_layers, f"cannot capture your own {', '.join(model.own_layers)}: use --no-cuda-graphs"),
        (losses, f"cannot count {' and '.join(losses)}: use factors of 0, or --no-cuda-graphs"),
        (model.mtp_layers, "cannot count the MTP loss: use --model.mtp-layers 0, or --no-cuda-graphs"),
        (config.metrics.profile, "runs no schedule to profile: use --profile 0, or --no-cuda-graphs"),
    )
    for applies, reason in refused:
        if applies:
            raise ValueError(f"--cuda-graphs {reason}")


def choose_layout(config: TrainConfig, launch: Launch) -> Layout:
    """The numbers of pipeline and data-parallel ranks. Raises ValueError for options that do not fit the processes."""
    world_size, ep, experts = launch.world_size, config.parallel.ep, config.model.num_experts
    check_ep_divides_experts(ep, experts)
    pp = config.parallel.pp
    if pp is None:
        if world_size % ep:
            raise ValueError(
                f"--ep {ep} does not divide the {plural(world_size, 'process', 'es')}: "
                f"start a multiple of {ep} processes"
            )
        pp = world_size // ep
    if world_size % pp:
        raise ValueError(
            f"--pp {pp} does not divide the number of processes, {world_size}: "
            f"use --pp {', '.join(map(str, divisors(world_size)))}, or start a multiple of {pp} processes"
        )
    dp = world_size // pp
    ranks = f" ({plural(world_size, 'process', 'es')} / {plural(pp, 'pipeline rank')})"
    check_ep_divides_ranks(ep, experts, dp, ranks)
    return Layout(pp, dp, ep, launch.rank)


def _check_writes_nothing(config: TrainConfig) -> None:
    """Raise ValueError for an option that writes files: a run from Python has a folder only if it is named."""
    wanted = (
        ("save_every", config.checkpoint.save_every), ("tensorboard", config.metrics.tensorboard),
        ("profile", config.metrics.profile), ("wandb", config.metrics.wandb), ("export", config.checkpoint.export),
    )  # fmt: skip
    for option, value in wanted:
        if value:
            raise ValueError(f"{option}={value!r} writes files: name a folder, CheckpointConfig(out=...)")


def run_folder(options: CheckpointConfig, preset: str, elastic: bool = False) -> Path:
    """The run's folder, or the one that stands for its URL. A new run never uses the folder of an old one.

    elastic: the run goes on in its folder.
    """
    out = store_run.location(options.out) if options.out else None
    if options.resume:
        run = store_run.location(options.resume)
        run = run.parent if run.name.startswith("step-") else run
        run = run.parent if run.name == "checkpoints" else run
        if out is None or store_run.same(out, run):
            return store_run.folder_of(out or run, options.staging)
    if out is None:
        folders = (Path(f"runs/{preset}" + (f"-{i}" if i > 1 else "")) for i in itertools.count(1))
        return next(path for path in folders if restart.is_own_folder(path) or not Path(path, "checkpoints").exists())
    folder = store_run.folder_of(out, options.staging)
    if not elastic and list_checkpoints(folder / "checkpoints") and not restart.is_own_folder(folder):
        raise ValueError(f"--out {out} already holds a run: continue it with --resume {out}, or use another --out")
    return folder
