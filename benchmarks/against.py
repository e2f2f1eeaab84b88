"""Time a training step of this project against other programs of the same model on this CPU.

    python -m benchmarks.against                                        all sizes, 1 and 2 threads
    python -m benchmarks.against --sizes tiny --only ours "hf grouped_mm, compiled" --threads 1 --rounds 15

A step is forward and backward of one micro-batch, the norm of the gradients, clipping, and AdamW. `small` and
`olmoe-layer` are measured without the update, whose state would not fit into the memory of a small machine. The
programs:

    ours, compiled       the trainer of train.py, in one process, with --compile whole
    ours, compiled, ...  the same with products in the library that compute.products=auto does not choose, if there
    ours, parts compiled with --compile on
    ours                 without torch.compile
    hf grouped_mm        Hugging Face transformers with its fastest experts: Qwen2-MoE; OLMoE for olmoe-layer
    hf our experts       the same with experts_implementation="moe_dualpipe"
    hf ..., compiled     the same under torch.compile

All start with the same weights and get the same batches. Their losses must agree in every step. They take turns, and a
ratio compares two steps of one round: above 1, "ours, compiled" is faster. Sizes without the update are measured in
pairs, because all programs at once would not fit into memory; the first row is that of the first pair.

On one thread, times are CPU seconds of the process, which other programs on the machine disturb little; on more
threads, they are wall times.
"""

import dataclasses
import gc
import importlib.metadata
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moe_dualpipe.checkpoint import global_weights
from moe_dualpipe.checkpoint.huggingface import save_pretrained
from moe_dualpipe.command_line import program_options
from moe_dualpipe.integrations.transformers import NAME, register
from moe_dualpipe.kernels.products import Library, choose_products, use_products
from moe_dualpipe.models import PRESETS, ModelConfig, build_model
from moe_dualpipe.runtime.world import join_world
from moe_dualpipe.training import config as training

from .common import full_range, ratios, table, take_turns
from .programs import Ours, Transformers

AUTO = choose_products("auto", "cpu")
OTHER: Library = "mkl" if AUTO == "onednn" else "onednn"
OURS = "ours, compiled"
OPTIM = training.OptimizerConfig("adamw", lr=1e-3, schedule="wsd", warmup_steps=0)  # the learning rate is constant
COLUMNS = f"size | threads | program | ms | range | tokens/s | time / {OURS} | range"


@dataclass(frozen=True, slots=True)
class Size:
    """A model, its micro-batch of token ids [B, S], and whether a step updates the weights."""

    model: ModelConfig
    batch: tuple[int, int]
    update: bool = False


# The shared experts of Qwen2-MoE have a gate, its router has no bias, and its queries and keys no norms.
_QWEN: dict[str, Any] = {"shared_gate": True, "router_score": "softmax", "router_bias": False, "qk_norm": "none"}
SIZES = {
    "tiny": Size(dataclasses.replace(PRESETS["tiny"], **_QWEN), (2, 256), update=True),
    "small": Size(dataclasses.replace(PRESETS["small"], **_QWEN), (1, 256)),
    "olmoe-layer": Size(dataclasses.replace(PRESETS["olmoe-1b-7b"], num_layers=1, vocab_size=256), (2, 256)),
}


@dataclass(frozen=True)
class Options:
    """Time a training step of this project against other programs of the same model on this CPU."""

    sizes: tuple[str, ...] = tuple(SIZES)
    """Names of sizes."""
    only: tuple[str, ...] = ()
    """Programs to run, besides ours, compiled. (): all."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of threads."""
    rounds: int = 7
    """Timed steps of each program."""


Step = Callable[[Tensor, Tensor], float]
"""Trains on inputs and labels [B, S], and returns the loss."""


@dataclass(frozen=True, slots=True)
class Start:
    """A size, its initial weights by their names in checkpoints, and a folder with them in Hugging Face's format."""

    size: Size
    weights: dict[str, Tensor]
    folder: Path


def ours(start: Start, compile: Literal["whole", "on", "off"], products: Library = AUTO) -> Ours:
    size = start.size
    config = training.TrainConfig(
        model=size.model, steps=10**9, optim=OPTIM, parallel=training.ParallelConfig(schedule="1f1b"),
        batch=training.BatchConfig(batch_size=size.batch[0], micro_batch_size=size.batch[0], seq_len=size.batch[1]),
        compute=training.ComputeConfig(device="cpu", compile=compile, products=products),
        checkpoint=training.CheckpointConfig(save_async=False),  # none is saved: no memory for a copy is needed
    )  # fmt: skip
    return Ours(config, torch.zeros(size.batch, dtype=torch.long), start.weights)


def hugging_face(start: Start, experts: str, compiled: bool) -> Transformers:
    from transformers import AutoModelForCausalLM

    register()
    model = AutoModelForCausalLM.from_pretrained(start.folder, experts_implementation=experts).train()
    return Transformers(model, compiled, OPTIM)


PROGRAMS: dict[str, Callable[[Start], Ours | Transformers]] = {
    OURS: partial(ours, compile="whole"),
    f"{OURS}, {OTHER}": partial(ours, compile="whole", products=OTHER),
    "ours, parts compiled": partial(ours, compile="on"),
    "ours": partial(ours, compile="off"),
    "hf grouped_mm": partial(hugging_face, experts="grouped_mm", compiled=False),
    "hf grouped_mm, compiled": partial(hugging_face, experts="grouped_mm", compiled=True),
    "hf our experts": partial(hugging_face, experts=NAME, compiled=False),
    "hf our experts, compiled": partial(hugging_face, experts=NAME, compiled=True),
}
"""How to build each program."""


def groups(size: Size, only: tuple[str, ...] = ()) -> list[list[str]]:
    """The programs to build at a time. Each group starts with ours, compiled."""
    others = [name for name in PROGRAMS if name != OURS and (not only or name in only)]
    return [[OURS, *others]] if size.update else [[OURS, name] for name in others]


@contextmanager
def built(size: Size, names: Sequence[str]) -> Iterator[dict[str, Step]]:
    """The programs that run here, by name. Those that do not are printed with the reason."""
    steps = {}
    with tempfile.TemporaryDirectory() as folder, join_world("cpu"):
        model = build_model(size.model)
        start = Start(size, global_weights(model), Path(folder, "hf"))
        save_pretrained(model, start.folder)
        tokens_BS = torch.zeros(size.batch, dtype=torch.long)
        for name in names:
            try:
                if "compiled" in name:
                    PROGRAMS[name](start).step(tokens_BS, tokens_BS, update=size.update)
                    gc.collect()  # frees the weights of this first build
                steps[name] = partial(PROGRAMS[name](start).step, update=size.update)
            except Exception as error:  # any error of another library, or of a compiler
                print(f"without {name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        yield steps


def measure(size: Size, steps: dict[str, Step], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each program by round, without two warm-up rounds. Raises AssertionError if losses differ."""
    generator, losses, first = torch.Generator().manual_seed(0), {}, next(iter(steps))
    batch: list[Tensor] = []

    def timed(name: str) -> float:
        if name == first:
            tokens = torch.randint(size.model.vocab_size, (size.batch[0], size.batch[1] + 1), generator=generator)
            batch[:] = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        use_products(OTHER if name.endswith(OTHER) else AUTO)
        start = clock()
        losses[name] = steps[name](*batch)
        seconds = clock() - start
        assert abs(losses[name] / losses[first] - 1) < 1e-4, losses
        return seconds

    return take_turns(rounds, {name: partial(timed, name) for name in steps}, warm_up=2)


def rows(name: str, threads: int, size: Size, seconds: dict[str, list[float]]) -> list[list[str]]:
    """One row per program."""
    tokens, first, found = size.batch[0] * size.batch[1], next(iter(seconds.values())), []
    for program, values in seconds.items():
        ms, relative = [1e3 * value for value in values], ratios(values, first)
        cells = f"{statistics.median(ms):.4g}", full_range(ms, ".4g"), f"{tokens / statistics.median(values):,.0f}"
        found.append([name, str(threads), program, *cells, f"{statistics.median(relative):.2f}", full_range(relative)])
    return found


def compare(name: str, threads: int, options: Options) -> Iterator[list[str]]:
    """The rows of a size. Its groups are built and measured one after the other."""
    size, clock = SIZES[name], time.process_time if threads == 1 else time.perf_counter
    for number, names in enumerate(groups(size, options.only)):
        torch.compiler.reset()  # compiled code has a fixed number of threads
        torch.manual_seed(0)
        with built(size, names) as steps:
            found = rows(name, threads, size, measure(size, steps, options.rounds, clock)) if OURS in steps else []
        yield from found[number > 0 :]  # ours, compiled, only once
        del steps
        gc.collect()  # frees the memory for the next group


def main() -> None:
    options = program_options(Options, "benchmarks.against")
    for name in options.only:
        if name not in PROGRAMS:
            raise SystemExit(f"unknown program {name!r}; choose from: {'; '.join(PROGRAMS)}")
    versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
    print(f"{os.cpu_count()} cores; fp32; {versions}; products in {AUTO}; {options.rounds} rounds")
    for name in options.sizes:
        for threads in options.threads:
            torch.set_num_threads(threads)
            print(table(COLUMNS, []), flush=True)
            for row in compare(name, threads, options):
                print(table(COLUMNS, [row]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
