"""The configuration of a training run, and the command line that makes it."""

import dataclasses
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro

from ..checks import choose_device
from ..kernels.choose import Kernels, checked
from ..models import PRESETS, ModelConfig, preset
from ..models.recompute import Recompute
from ..schedule import build
from .optimizer import OptimizerConfig


@dataclass(frozen=True)
class TrainConfig:
    """Train a Mixture-of-Experts transformer under a pipeline schedule.

    $ python train.py                                  (one process)
    $ torchrun --nproc-per-node 2 train.py             (two pipeline ranks, DualPipe)
    $ torchrun --nproc-per-node 4 train.py --ep 2      (two pipeline ranks, experts spread over two)

    The number of processes is pp x data-parallel ranks; ep spreads the experts over data-parallel ranks.
    """

    preset: str = "tiny"
    """Model size to start from; --model.* changes single choices."""
    model: ModelConfig = field(default_factory=lambda: PRESETS["tiny"])

    pp: int = 0
    """Pipeline ranks. 0: all processes, divided by ep."""
    ep: int = 1
    """Ranks over which the experts of a layer are spread; divides the experts and the data-parallel ranks."""
    overlap: bool = True
    """Hide the communication of one micro-batch behind the computation of another, where the schedule pairs them."""
    recompute: Recompute = "none"
    """What to compute again in the backward instead of keeping it: none, norms, attention or full."""
    kernels: Kernels = "auto"
    """triton, reference (plain torch), or auto: Triton on GPUs."""
    fused_loss: bool = False
    """Compute the head and the loss together, a chunk of tokens at a time, so that the logits never exist whole. Saves
    memory where the vocabulary is large; a vocabulary of bytes gains nothing."""
    max_deferred: int = 0
    """Most chunks whose weight gradients may be put off at a time, which bounds the activations held. 0: no bound."""
    schedule: str = "auto"
    """Pipeline schedule (docs/schedules.md). auto: dualpipe for an even number of ranks, else dualpipev."""
    num_chunks: int = 0
    """Stages on each rank, where the schedule leaves the choice (interleaved_1f1b). 0: as many as it has by default."""

    data: str = "stdlib"
    """Text to train on: a file, a folder, a glob, or "stdlib" for the Python standard library's own source."""
    seq_len: int = 256
    """Tokens in a sequence."""
    micro_batch_size: int = 2
    """Sequences in a micro-batch."""
    micro_batches: int = 0
    """Micro-batches a step, on each data-parallel rank. 0: 8, or more where the schedule needs them."""
    steps: int = 320
    """Optimizer steps in the whole run; the learning rate follows from it."""
    seed: int = 0
    """Fixes the initial weights and the order of the data."""
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)

    device: str = "auto"
    """cpu, cuda, or auto: the GPUs if there is one for each process."""
    dtype: str = "auto"
    """float32, bfloat16, or auto: bfloat16 on GPUs. Master weights and gradients are float32 in any case."""

    out: str = ""
    """Folder for checkpoints and metrics. Default: the resumed run, or a new runs/<preset>[-2, -3 ...]."""
    resume: str = ""
    """A run's folder, or one checkpoint in it, to go on from."""
    save_every: int = 0
    """Steps between checkpoints; one is always saved at the end. 0: only that one."""
    eval_sequences: int = 64
    """Held-out sequences for the validation loss; rounded up to whole batches."""
    sample_tokens: int = 160
    """Length of the sample that is generated at the end; 0: none."""
    prompt: str = "class "
    """What the sample starts with."""
    check_replicas_every: int = 100
    """Steps between checks that replicas are bit-equal; they are checked at the end, too. 0: only then."""
    profile: Annotated[int, tyro.conf.arg(metavar="STEPS")] = 0
    """Record so many steps on every rank, after two, and say at the end where their time went (docs/profiling.md)."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 600.0
    """How long a rank waits for another before it gives up."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun tells a process; a process on its own is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> "Launch":
        get = os.environ.get
        world_size = get("WORLD_SIZE", "1")
        local_world_size = get("LOCAL_WORLD_SIZE", world_size)
        return cls(int(get("RANK", "0")), int(get("LOCAL_RANK", "0")), int(world_size), int(local_world_size))


def parse(arguments: Sequence[str], quiet: bool = False) -> TrainConfig:
    """Read the command line; `--preset` chooses the defaults of `--model.*`.

    quiet: print no help and no usage errors (for all but one process of many). Raises ValueError for an unknown preset.
    """
    name = _value_of("--preset", arguments) or TrainConfig.preset
    default = TrainConfig(preset=name, model=preset(name))
    return tyro.cli(
        TrainConfig,
        args=arguments,
        default=default,
        prog="train.py",
        console_outputs=not quiet,
    )


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(flag + "="):
            return argument[len(flag) + 1 :]
    return None


def resolve(config: TrainConfig, launch: Launch) -> TrainConfig:
    """Fill in what was left to be chosen, and check that all numbers fit together.

    Raises ValueError with the numbers and the way out. The result has no 0, "auto" or "" where those mean a choice.
    """
    preset(config.preset)  # its error names the nearest one
    device = choose_device(config.device, torch.cuda.device_count(), launch.local_world_size)
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype must be float32, bfloat16 or auto: got {dtype!r}")
    kernels = checked(config.kernels)
    if kernels == "auto":
        kernels = "triton" if device == "cuda" else "reference"
    elif kernels == "triton" and device == "cpu":
        raise ValueError("--kernels triton needs a GPU, and this run is on the CPU: use --kernels reference, or auto")
    for name in ("seq_len", "micro_batch_size", "steps", "ep", "eval_sequences"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {getattr(config, name)}")
    for name in (
        "pp",
        "num_chunks",
        "micro_batches",
        "max_deferred",
        "save_every",
        "sample_tokens",
        "check_replicas_every",
        "profile",
    ):
        if getattr(config, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} cannot be negative: got {getattr(config, name)}")
    _check_optimizer(config.optim)
    if not config.timeout > 0:
        raise ValueError(f"--timeout must be positive: got {config.timeout}")

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


def _check_optimizer(optim: OptimizerConfig) -> None:
    if optim.lr <= 0:
        raise ValueError(f"--optim.lr must be positive: got {optim.lr}")
    for name in ("warmup_steps", "weight_decay", "clip"):
        if getattr(optim, name) < 0:
            raise ValueError(f"--optim.{name.replace('_', '-')} cannot be negative: got {getattr(optim, name)}")
    for name, largest in (("final_lr", 1.0), ("beta1", 0.9999999), ("beta2", 0.9999999)):
        if not 0 <= getattr(optim, name) <= largest:
            raise ValueError(f"--optim.{name.replace('_', '-')} must be from 0 to 1: got {getattr(optim, name)}")


def _out(config: TrainConfig) -> str:
    """The run's folder. A new run never mixes with one that is there already."""
    resumed = Path(config.resume)
    if config.resume and not config.out:
        run = resumed.parent if resumed.name.startswith("step-") else resumed
        return str(run.parent if run.name == "checkpoints" else run)
    if config.resume:
        return config.out
    if not config.out:
        names = (f"runs/{config.preset}" + (f"-{i}" if i > 1 else "") for i in itertools.count(1))
        return next(name for name in names if not Path(name, "checkpoints").exists())
    if Path(config.out, "checkpoints").exists():
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


def resume_command(arguments: Sequence[str], run: str, steps: int) -> str:
    """The command that goes on with the run that was started with `arguments`, up to `steps`."""
    launch = Launch.from_environment()
    program = [_program("python")]
    if launch.world_size > 1:
        program = [_program("torchrun"), "--nproc-per-node", str(launch.local_world_size)]
    script = os.path.relpath(sys.argv[0])
    kept = list(arguments)
    for flag in ("--steps", "--resume", "--profile"):
        kept = _without(flag, kept)
    return shlex.join([*program, script, *kept, "--resume", run, "--steps", str(steps)])


def _program(name: str) -> str:
    """`name` if the shell would find the one beside this interpreter, otherwise its path."""
    beside = Path(sys.executable).with_name(name)
    if not beside.exists() or shutil.which(name) == str(beside):
        return name
    return os.path.relpath(beside)


def _without(flag: str, arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if not (skip or argument == flag or argument.startswith(flag + "=")):
            kept.append(argument)
        skip = argument == flag
    return kept
