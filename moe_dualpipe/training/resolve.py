"""From what was asked for to what will be done: defaults that depend on others, and checks that all numbers fit."""

import dataclasses
import itertools
from pathlib import Path

import torch

from ..kernels.backend import validate_kernels
from ..models import preset
from ..runtime.launch import Launch, choose_device
from ..schedule import build
from . import restart
from .config import TrainConfig
from .learning_rate import decay_steps
from .metrics import check_tensorboard
from .optimizer import OptimizerConfig


def resolve(config: TrainConfig, launch: Launch) -> TrainConfig:
    """Fill in what was left to be chosen, and check that all numbers fit together.

    Raises ValueError with the numbers and the way out. The result has no 0, "auto" or "" where those mean a choice.
    """
    preset(config.preset)  # its error names the nearest one
    device = choose_device(config.device, torch.cuda.device_count(), launch.local_world_size)
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype must be float32, bfloat16 or auto: got {dtype!r}")
    kernels = validate_kernels(config.kernels)
    if kernels == "auto":
        kernels = "triton" if device == "cuda" else "reference"
    elif kernels == "triton" and device == "cpu":
        raise ValueError("--kernels triton needs a GPU, and this run is on the CPU: use --kernels reference, or auto")
    for name in ("seq_len", "micro_batch_size", "steps", "ep", "eval_sequences", "max_skipped"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {getattr(config, name)}")
    for name in (
        "pp",
        "num_chunks",
        "micro_batches",
        "max_deferred",
        "save_every",
        "keep",
        "sample_tokens",
        "check_replicas_every",
        "profile",
        "bias_rate",
    ):
        if not 0 <= getattr(config, name) < float("inf"):
            problem = "cannot be negative" if getattr(config, name) < 0 else "must be finite"
            raise ValueError(f"--{name.replace('_', '-')} {problem}: got {getattr(config, name)}")
    _check_optimizer(config.optim, config.steps)
    if config.weights and config.resume:
        raise ValueError("--weights are what a new run starts from, and --resume goes on with an old one: give one")
    if config.tensorboard:
        check_tensorboard()
    if not (0 <= config.peak_tflops < float("inf")):
        raise ValueError(f"--peak-tflops must be a number from 0 on: got {config.peak_tflops}")
    config.sampling()  # for its errors
    if not 0 < config.timeout < float("inf"):
        raise ValueError(f"--timeout must be positive and finite: got {config.timeout}")

    if config.model.num_experts % config.ep:
        fitting = [str(e) for e in range(1, config.model.num_experts + 1) if config.model.num_experts % e == 0]
        raise ValueError(
            f"--ep {config.ep} does not divide the {config.model.num_experts} experts: use --ep {' or '.join(fitting)}"
        )
    pp = config.pp or _default_pp(config, launch.world_size)
    if launch.world_size % pp:
        fitting = [str(p) for p in range(1, launch.world_size + 1) if launch.world_size % p == 0]
        raise ValueError(
            f"{launch.world_size} processes cannot be divided into pipelines of {pp} ranks: "
            f"use --pp {', '.join(fitting)}, or start a multiple of {pp} processes"
        )
    dp, experts = launch.world_size // pp, config.model.num_experts
    if dp % config.ep:
        fitting = [str(e) for e in range(1, dp + 1) if dp % e == 0 and experts % e == 0]
        raise ValueError(
            f"--ep {config.ep} does not divide the {dp} data-parallel ranks ({launch.world_size} processes / "
            f"{pp} pipeline ranks): use --ep {' or '.join(fitting)}"
        )
    schedule = config.schedule if config.schedule != "auto" else ("dualpipev" if pp % 2 else "dualpipe")
    micro_batches = config.micro_batches or default_micro_batches(pp)
    build(schedule, pp, micro_batches, config.num_chunks or None)
    return dataclasses.replace(
        config, device=device, dtype=dtype, pp=pp, schedule=schedule, micro_batches=micro_batches, kernels=kernels,
        out=_out(config),
    )  # fmt: skip


def default_micro_batches(pp: int) -> int:
    """At least 8, and as many as any schedule runs with: two for each rank, in groups of as many as there are ranks."""
    return -(-max(8, 2 * pp) // pp) * pp


def _check_optimizer(optim: OptimizerConfig, steps: int) -> None:
    if not optim.lr > 0:
        raise ValueError(f"--optim.lr must be positive: got {optim.lr}")
    for name, choices in (("name", ("adamw", "muon")), ("schedule", ("cosine", "wsd"))):
        if getattr(optim, name) not in choices:
            raise ValueError(f"--optim.{name} must be {' or '.join(choices)}: got {getattr(optim, name)!r}")
    for name in ("warmup_steps", "decay_steps", "weight_decay", "clip"):
        if not getattr(optim, name) >= 0:
            raise ValueError(f"--optim.{name.replace('_', '-')} cannot be negative: got {getattr(optim, name)}")
    for name, largest in (("final_lr", 1.0), ("beta1", 0.9999999), ("beta2", 0.9999999), ("momentum", 0.9999999)):
        if not 0 <= getattr(optim, name) <= largest:
            raise ValueError(f"--optim.{name.replace('_', '-')} must be from 0 to 1: got {getattr(optim, name)}")
    if optim.schedule == "cosine" and optim.decay_steps:
        raise ValueError(
            f"--optim.decay-steps {optim.decay_steps} is for --optim.schedule wsd: a cosine decays in all steps"
        )
    decay = decay_steps(optim, steps)
    if optim.schedule == "wsd" and optim.warmup_steps + decay > steps:
        raise ValueError(
            f"{optim.warmup_steps} steps of warm-up and {decay} of decay do not fit into --steps {steps}: "
            "use fewer --optim.warmup-steps or --optim.decay-steps"
        )


def _out(config: TrainConfig) -> str:
    """The run's folder. A new run never mixes with one that is there already."""
    resumed = Path(config.resume)
    run = resumed.parent if resumed.name.startswith("step-") else resumed
    run = run.parent if run.name == "checkpoints" else run
    if config.resume and (not config.out or Path(config.out).resolve() == run.resolve()):
        return config.out or str(run)
    if not config.out:
        names = (f"runs/{config.preset}" + (f"-{i}" if i > 1 else "") for i in itertools.count(1))
        return next(name for name in names if restart.is_ours(name) or not Path(name, "checkpoints").exists())
    if any(Path(config.out, "checkpoints").glob("step-*")) and not restart.is_ours(config.out):
        raise ValueError(
            f"--out {config.out} holds a run already: go on with --resume {config.out}, or use another --out"
        )
    return config.out


def _default_pp(config: TrainConfig, world_size: int) -> int:
    if world_size % config.ep:
        raise ValueError(
            f"--ep {config.ep} does not divide the {world_size} processes: start a multiple of {config.ep} processes"
        )
    return world_size // config.ep
