"""The configuration of a training run, and the command line that makes it."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..inference.sampling import Sampling
from ..kernels.backend import Kernels
from ..models import PRESETS, ModelConfig, preset
from ..models.recompute import Recompute
from ..runtime.launch import Launch
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

    data: tuple[str, ...] = ("stdlib",)
    """What to train on, each a SOURCE or SOURCE=WEIGHT: text (a file, a folder, a glob; "stdlib" is the Python standard
    library's own source), .jsonl, token ids (.bin), or a folder of `moe-dualpipe data prepare` (docs/training.md)."""
    data_field: str = "text"
    """The field of a .jsonl line that holds the text."""
    data_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """Width of the little-endian token ids in a .bin file that nothing describes."""
    seq_len: int = 256
    """Tokens in a sequence."""
    document_mask: bool = False
    """Attend within documents only: a sequence may hold the end of one and the start of others."""
    micro_batch_size: int = 2
    """Sequences in a micro-batch."""
    micro_batches: int = 0
    """Micro-batches a step, on each data-parallel rank. 0: 8, or more where the schedule needs them."""
    steps: int = 320
    """Optimizer steps in the whole run; the learning rate follows from it."""
    seed: int = 0
    """Fixes the initial weights and the order of the data."""
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    bias_rate: float = 3e-3
    """How far a step moves each bias of a router (--model.router-bias); a long run needs less. 0: they stay."""
    zero: bool = True
    """Divide the optimizer's state among the ranks that hold the same weights (ZeRO-1); changes no bit of a run."""

    device: str = "auto"
    """cpu, cuda, or auto: the GPUs if there is one for each process."""
    dtype: str = "auto"
    """float32, bfloat16, or auto: bfloat16 on GPUs. Master weights and gradients are float32 in any case."""

    out: str = ""
    """Folder for checkpoints and metrics. Default: the resumed run, or a new runs/<preset>[-2, -3 ...]."""
    resume: str = ""
    """A run's folder, or one checkpoint in it, to go on from."""
    weights: str = ""
    """Folder of `moe-dualpipe export` whose weights a new run starts from."""
    save_every: int = 0
    """Steps between checkpoints; one is always saved at the end. 0: only that one."""
    keep: int = 3
    """Checkpoints to keep; older ones are removed when a newer one is complete. 0: all."""
    save_async: bool = True
    """Train on while a checkpoint is written; needs main memory for a copy of weights and moments."""
    eval_sequences: int = 64
    """Held-out sequences for the validation loss; rounded up to whole batches."""
    sample_tokens: int = 160
    """Length of the sample that is generated at the end; 0: none."""
    prompt: str = "class "
    """What the sample starts with."""
    temperature: float = 0.8
    """Of the sample: less is more of the same, 0 takes the likeliest token each time."""
    top_k: int = 0
    """Choose each token of the sample among so many, the likeliest. 0: among all."""
    top_p: float = 1.0
    """Choose each token of the sample among the likeliest that have this probability together. 1: among all."""
    check_replicas_every: int = 100
    """Steps between checks that replicas are bit-equal; they are checked at the end, too. 0: only then."""
    max_skipped: int = 10
    """Steps in a row whose loss or gradient is not finite, which are skipped, until the run stops."""
    profile: Annotated[int, tyro.conf.arg(metavar="STEPS")] = 0
    """Record so many steps on every rank, after two, and say at the end where their time went (docs/profiling.md)."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard as well."""
    peak_tflops: float = 0.0
    """What one device can do at best, in 10^12 FLOPs a second, for the utilisation in the metrics (mfu). 0: known for
    common GPUs by their names."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 600.0
    """How long a rank waits for another before it gives up. One that dies is noticed sooner."""

    def sampling(self) -> Sampling:
        """How the sample is drawn. Raises ValueError for choices that mean nothing."""
        return Sampling(self.temperature, self.top_k, self.top_p)


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


def resume_command(arguments: Sequence[str], run: str, steps: int) -> str:
    """The command that goes on with the run that was started with `arguments`, up to `steps`."""
    launch = Launch.from_environment()
    program = [_program("python")]
    if launch.world_size > 1:
        program = [_program("torchrun"), "--nproc-per-node", str(launch.local_world_size)]
    script = os.path.relpath(sys.argv[0])
    kept = list(arguments)
    for flag in ("--steps", "--resume", "--profile", "--weights"):
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
