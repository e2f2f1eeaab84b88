"""What the options leave open: device, kernels, dtype, compilation, and the folder of the run."""

import itertools
import warnings
from pathlib import Path
from typing import Literal

import torch

from ..checkpoint import list_checkpoints
from ..checkpoint.destinations import run_of
from ..data import stores
from ..kernels.backend import Kernels, validate_kernels
from ..kernels.fp8 import RECIPES
from ..kernels.fuse import missing_for_compile
from ..kernels.options import RoutingOptions
from ..messages import printable
from ..models.auxiliary_losses import loss_factors
from ..runtime.launch import Launch, device_of
from . import restart
from .config import CheckpointConfig, ComputeConfig, TrainConfig

Compiled = Literal["on", "off", "whole"]


def choose_dtype(compute: ComputeConfig, kind: str) -> torch.dtype:
    """The type of weights and activations on a device of this kind, cpu or cuda."""
    auto = "bfloat16" if kind == "cuda" else "float32"
    return getattr(torch, auto if compute.dtype == "auto" else compute.dtype)


def choose_kernels(compute: ComputeConfig, launch: Launch) -> tuple[torch.device, Kernels]:
    """The device of this process, and its kernels."""
    device = device_of(compute.device, launch)
    kernels = validate_kernels(compute.kernels)
    if kernels == "auto":
        kernels = "triton" if device.type == "cuda" else "reference"
    elif kernels == "triton" and device.type == "cpu":
        raise ValueError("--kernels triton needs a GPU, and this run is on the CPU: use --kernels reference, or auto")
    return device, kernels


def trusted_kernels(config: TrainConfig, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> Kernels:
    """`kernels`, or "reference" if the Triton kernels compute wrong results on the current GPU.

    Raises ValueError instead if triton was typed, or if CUDA graphs need it.
    """
    if kernels != "triton" or not config.compute.self_test:
        return kernels
    from ..kernels.self_test import SelfTest  # imports triton

    model = config.model
    routing = RoutingOptions(
        model.experts_per_token, model.router_score, model.expert_groups, model.top_groups, model.normalize_weights,
        model.routed_scale, model.group_score,
    )  # fmt: skip
    test = SelfTest(model.hidden_size, model.expert_size, model.num_experts, routing, device, dtype)
    if (problem := test.first_difference()) is None:
        return kernels
    if config.compute.kernels == "triton" or config.compute.cuda_graphs:
        raise ValueError(f"--kernels triton: {problem}: use --kernels reference, or --set compute.self_test=false")
    warnings.warn(f"{problem}: this run uses plain torch", stacklevel=2)
    return "reference"


def choose_compiled(choice: str, kind: str) -> Compiled:
    """What to compile with torch.compile. run.toml has the answer, so a resumed run does the same."""
    if choice == "off" or (choice == "auto" and kind == "cpu"):
        return "off"
    missing = missing_for_compile()
    if missing and choice != "auto":
        raise ValueError(f"--compile {choice} needs {missing}, or use --compile off")
    return "off" if missing else "whole" if choice == "whole" else "on"


def check_whole(config: TrainConfig, device: torch.device, kernels: Kernels, processes: int) -> None:
    """Raise ValueError for a run whose micro-batches cannot be one CUDA graph or compiled function.

    These run no schedule, and keep no state in Python.
    """
    compute, model, losses = config.compute, config.model, [*loss_factors(config.model)]
    if compute.compile == "whole":
        whole, instead = "--compile whole", "--compile on"
        own = (
            (compute.cuda_graphs, "and cuda_graphs exclude each other: use compute.cuda_graphs=false"),
            (device.type != "cpu", f"needs a CPU, and this run is on a GPU: use {instead}"),
            (kernels == "triton", f"cannot trace Triton kernels: use --kernels reference, or {instead}"),
            (compute.recompute != "none", f"saves what torch.compile chooses: use --recompute none, or {instead}"),
            (compute.fp8 != "off", f"cannot trace products in FP8: use compute.fp8=off, or {instead}"),
            (compute.fused_loss, f"cannot trace the loss in blocks: use compute.fused_loss=false, or {instead}"),
        )
    elif compute.cuda_graphs:
        whole, instead = "cuda_graphs", "compute.cuda_graphs=false"
        own = (
            (device.type != "cuda", f"needs a GPU, and this run is on the CPU: use {instead}"),
            (kernels != "triton", f"needs kernels without host syncs: got --kernels {kernels}; use --kernels triton"),
        )
    else:
        return
    refused = (
        *own,
        (processes > 1, f"is for one process: got {processes}; use {instead}"),
        (model.own_layers, f"cannot contain your own {', '.join(model.own_layers)}: use {instead}"),
        (losses, f"cannot count {' and '.join(losses)}: use factors of 0, or {instead}"),
        (model.mtp_layers, f"cannot count the MTP loss: use model.mtp_layers=0, or {instead}"),
        (
            config.batch.record_routes or config.batch.replay_routes,
            f"cannot look up routes: leave out record_routes and replay_routes, or use {instead}",
        ),
        (config.metrics.profile, f"runs no schedule to profile: use --profile 0, or {instead}"),
    )
    for applies, reason in refused:
        if applies:
            raise ValueError(f"{whole} {reason}")


def check_fp8(config: TrainConfig, device: torch.device, kernels: Kernels) -> None:
    """Raise ValueError if compute.fp8 cannot be used with the other options."""
    compute = config.compute
    if compute.fp8 == "off":
        return
    fault = RECIPES[compute.fp8_recipe].kernels_fault(device) if kernels == "triton" else ""
    refused = (
        (fault, f"{fault}, or --kernels reference"),
        (compute.fp8 == "experts+dispatch" and compute.fp8_recipe == "fp32",
         "sends scales that are powers of two: use compute.fp8_recipe=ue8m0"),
        (compute.fp8 == "experts+dispatch" and config.parallel.ep_backend == "deepep",
         "sends rows that deepep does not: use --ep-backend auto, or compute.fp8=experts"),
    )  # fmt: skip
    for applies, reason in refused:
        if applies:
            raise ValueError(f"compute.fp8={compute.fp8} {reason}")


def check_writes_nothing(config: TrainConfig) -> None:
    """Raise ValueError for an option that writes files: a run from Python has a folder only if it is named."""
    wanted = (
        ("save_every", config.checkpoint.save_every), ("tensorboard", config.metrics.tensorboard),
        ("profile", config.metrics.profile), ("wandb", config.metrics.wandb), ("export", config.checkpoint.export),
    )  # fmt: skip
    for option, value in wanted:
        if value:
            raise ValueError(f"{option}={value!r} writes files: name a folder, CheckpointConfig(out=...)")


def run_folder(options: CheckpointConfig, name: str) -> Path:
    """The run's folder, or the one that stands for its URL: that of --out or --resume, or a new one for `name`.

    Raises ValueError for something that is not a folder.
    """
    if options.out or options.resume:
        folder = stores.output_folder(options.out or run_of(options.resume or ""), options.staging)
    else:
        folders = (Path(f"runs/{name}" + (f"-{i}" if i > 1 else "")) for i in itertools.count(1))
        folder = next(one for one in folders if restart.is_own_folder(one) or not Path(one, "checkpoints").exists())
    return folder


def check_new(folder: Path, options: CheckpointConfig) -> None:
    """Raise ValueError unless the folder is free, or its newest checkpoint is that of the run that goes on there."""
    resume, out, found = options.resume or "", options.out or folder, list_checkpoints(folder / "checkpoints")
    if resume and stores.output_folder(run_of(resume), options.staging).resolve() == folder.resolve():
        if Path(resume).name in [path.name for path in found[1:]]:
            later = f"--resume {printable(resume)}: the run has later checkpoints, up to {found[0].name}"
            raise ValueError(f"{later}; use --out to continue in another folder")
    elif found:
        raise ValueError(f"--out {out} already holds a run: continue it with --resume {out}, or use another --out")
