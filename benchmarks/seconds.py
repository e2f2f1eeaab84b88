"""Is a mixture worth it? Train programs side by side on one thread, and compare held-out losses at equal CPU seconds.

    python -m benchmarks.seconds --data shakespeare.txt --figure seconds.svg
    python -m benchmarks.seconds --programs "ours, mixture" "ours, dense" --budgets 120 240

    transformers, dense      Hugging Face's Llama under torch.compile, with torch's fused AdamW
    transformers, mixture    Qwen2-MoE with the sizes of `tiny`, the same
    ours, dense              the trainer of train.py with --compile whole and Muon; dense blocks as wide as what a
                             token of `tiny` passes through
    ours, mixture            `tiny` without query and key norms, the same
    ..., AdamW               ours, with AdamW
    ... of another kind      other models (VARIANTS), most with the same active parameters
    balanced by 0.0, 0.03    `tiny` whose router biases move by this much in a step, instead of 0.003

All are trained by characters on the same sequences in the same order, with the same warm-up, cosine and clipping, and
are scored on the same held-out sequences: the last tenth of the text. The learning rate of each is the best of LRS at
the first budget. A budget is a number of steps: the seconds, divided by the CPU time of a step, its first quartile,
because what else the machine does only adds to it. It is measured first, by all programs in turns, without compilation
and scoring.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from moe_dualpipe.checkpoint import global_weights, load_tensors
from moe_dualpipe.command_line import program_options
from moe_dualpipe.data import load_data
from moe_dualpipe.models import PRESETS, ModelConfig, StageOptions, build_model
from moe_dualpipe.models.layers import seed_of
from moe_dualpipe.runtime.learning_rate import learning_rate
from moe_dualpipe.runtime.world import join_world
from moe_dualpipe.tools.drawing.figures import check_output, new_figure, save_figure
from moe_dualpipe.training import config as training

from .common import full_range, table, take_turns
from .programs import Ours, Transformers

LRS = (0.001, 0.003, 0.01, 0.03)
"""The learning rates to choose from."""
NANOGPT = 116.0, 1.889
"""CPU seconds and published held-out loss of nanoGPT's own setting for CPUs, on Tiny Shakespeare: 4 layers, 128 wide,
2,000 steps of 12 x 64 characters (github.com/karpathy/nanoGPT, README; its seconds were measured on another CPU)."""
TINY = replace(PRESETS["tiny"], qk_norm="none")
"""Without query and key norms, as Llama and Qwen2-MoE are."""
DENSE = replace(TINY, num_dense_layers=TINY.num_layers)
NORMS = "query and key norms"


def _mixture(num_experts: int, expert_size: int, experts_per_token: int, num_shared: int) -> ModelConfig:
    return replace(
        TINY, num_experts=num_experts, expert_size=expert_size, experts_per_token=experts_per_token,
        num_shared_experts=num_shared,
    )  # fmt: skip


VARIANTS = {
    "4 experts, top-1": _mixture(4, 256, 1, 1),
    "8 experts, top-3, none shared": _mixture(8, 128, 3, 0),
    "8 experts of 64, top-6, none shared": _mixture(8, 64, 6, 0),
    "16 experts, top-2": _mixture(16, 128, 2, 1),
    "32 experts, top-2": _mixture(32, 128, 2, 1),
    "16 experts of 64, top-4, 2 shared": _mixture(16, 64, 4, 2),
    "32 experts of 64, top-4, 2 shared": _mixture(32, 64, 4, 2),
    "softmax scores": replace(TINY, router_score="softmax"),
    f"dense, {NORMS}": replace(DENSE, qk_norm="head"),
    f"4 experts in each layer, top-3, {NORMS}": replace(_mixture(4, 128, 3, 0), qk_norm="head", num_dense_layers=0),
}
"""Other models whose tokens pass through as many parameters as those of `tiny`; "4 experts, top-1", a third more."""
BIAS_RATES = (0.0, 0.03)
"""Other rates of balancing than that of `tiny`, 0.003."""


@dataclass(frozen=True)
class Options:
    """Compare held-out losses of programs at equal CPU seconds, on one thread."""

    data: str = "stdlib"
    """Text to train on, as for train.py."""
    programs: tuple[str, ...] = ("transformers, dense", "transformers, mixture", "ours, dense", "ours, mixture")
    """Programs to compare; the docstring of this file lists them."""
    budgets: tuple[float, ...] = (30.0, 60.0, 120.0, 240.0)
    """CPU seconds of a run, in ascending order."""
    seeds: int = 3
    """Number of seeds."""
    batch_size: int = 12
    """Sequences per step."""
    seq_len: int = 64
    """Characters per sequence."""
    held_out: int = 1536
    """Held-out sequences to score, in whole batches."""
    rounds: int = 30
    """Timed steps of each program."""
    compile: bool = True
    """Compile the programs with torch.compile."""
    figure: Path | None = None
    """Draw the losses into this file."""


class Windows:
    """The sequences of each step, and the held-out ones: inputs and labels, each [B, S]."""

    def __init__(self, options: Options):
        (source,) = load_data(options.data, options.seq_len).sources
        tokens_N = torch.from_numpy(
            np.concatenate([part.streams[0][:] for part in (source.train, source.held_out)])
        ).long()
        self.options, cut = options, len(tokens_N) * 9 // 10
        self.train_N, self.held_out_N = tokens_N[:cut], tokens_N[cut:]

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed_of(seed, f"step {step}"))
        starts_B = torch.randint(
            len(self.train_N) - self.options.seq_len, (self.options.batch_size,), generator=generator
        )
        return self._windows(self.train_N, starts_B)

    @property
    def held_out(self) -> tuple[Tensor, Tensor]:
        number = self.options.held_out // self.options.batch_size * self.options.batch_size
        last = len(self.held_out_N) - self.options.seq_len - 1
        return self._windows(self.held_out_N, torch.linspace(0, last, number, dtype=torch.float64))

    def _windows(self, tokens_N: Tensor, starts_B: Tensor) -> tuple[Tensor, Tensor]:
        rows_BS = tokens_N[starts_B.long()[:, None] + torch.arange(self.options.seq_len + 1)]
        return rows_BS[:, :-1].contiguous(), rows_BS[:, 1:].contiguous()


class Own(Ours):
    def __init__(self, text: Windows, model: ModelConfig, optimizer: str, bias_rate: float = 0.003):
        options = text.options
        config = training.TrainConfig(
            model=model, steps=10**9, bias_rate=bias_rate, parallel=training.ParallelConfig(schedule="1f1b"),
            optim=training.OptimizerConfig(name=optimizer, lr=1.0, schedule="wsd", warmup_steps=0),  # type: ignore
            batch=training.BatchConfig(
                batch_size=options.batch_size, micro_batch_size=options.batch_size, seq_len=options.seq_len
            ),
            compute=training.ComputeConfig(device="cpu", compile="whole" if options.compile else "off"),
            metrics=training.MetricsConfig(eval_sequences=options.held_out),
        )  # fmt: skip
        super().__init__(config, text.batch(0, 0)[0], held_out=text.held_out)
        self.initial = {name: tensor.clone() for name, tensor in self.trainer.state().items()}

    def restart(self, seed: int) -> None:
        """Start again from the initial weights of this seed."""
        state = self.trainer.state()
        for name, tensor in self.initial.items():
            state[name].copy_(tensor)
        weights = global_weights(build_model(self.trainer.config.model, None, StageOptions(seed)))
        load_tensors(weights, state)
        self.trainer.optimizer.after_load(0)

    def held_out_loss(self) -> float:
        """In nats per character."""
        return self.trainer.validation_loss()


class HuggingFace(Transformers):
    def __init__(self, text: Windows, kind: str, **sizes: object):
        from transformers import AutoConfig, AutoModelForCausalLM

        self.text = text
        config = AutoConfig.for_model(
            kind, vocab_size=TINY.vocab_size, hidden_size=TINY.hidden_size, num_hidden_layers=TINY.num_layers,
            num_attention_heads=TINY.num_heads, num_key_value_heads=TINY.num_kv_heads, head_dim=TINY.head_dim,
            intermediate_size=TINY.dense_size, **sizes,
        )  # fmt: skip
        self.new_model: Callable[[], nn.Module] = partial(AutoModelForCausalLM.from_config, config)
        super().__init__(self.new_model(), text.options.compile, training.OptimizerConfig(lr=1.0))

    def restart(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model.load_state_dict(self.new_model().state_dict())
        self.adamw.state.clear()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        batches = zip(*(part.split(self.text.options.batch_size) for part in self.text.held_out), strict=True)
        return statistics.fmean(self.loss(*batch).item() for batch in batches)


Program = Own | HuggingFace
QWEN = {
    "num_experts": TINY.num_experts, "num_experts_per_tok": TINY.experts_per_token, "decoder_sparse_step": 1,
    "mlp_only_layers": [0], "moe_intermediate_size": TINY.expert_size, "norm_topk_prob": True,
    "shared_expert_intermediate_size": TINY.expert_size, "experts_implementation": "grouped_mm",
}  # fmt: skip
PROGRAMS: dict[str, Callable[[Windows], Program]] = {
    "transformers, dense": partial(HuggingFace, kind="llama"),
    "transformers, mixture": partial(HuggingFace, kind="qwen2_moe", **QWEN),
    "ours, dense": partial(Own, model=DENSE, optimizer="muon"),
    "ours, mixture": partial(Own, model=TINY, optimizer="muon"),
    "ours, dense, AdamW": partial(Own, model=DENSE, optimizer="adamw"),
    "ours, mixture, AdamW": partial(Own, model=TINY, optimizer="adamw"),
    **{name: partial(Own, model=model, optimizer="muon") for name, model in VARIANTS.items()},
    **{f"balanced by {rate}": partial(Own, model=TINY, optimizer="muon", bias_rate=rate) for rate in BIAS_RATES},
}
"""How to build each program."""


def train(program: Program, text: Windows, lr: float, steps: int, seed: int) -> float:
    """Train from the initial weights of this seed. Returns the held-out loss."""
    optim = training.OptimizerConfig(lr=lr, warmup_steps=max(1, steps // 20))
    program.restart(seed)
    for step in range(steps):
        program.step(*text.batch(seed, step), learning_rate(optim, step, steps))
    return program.held_out_loss()


def step_seconds(programs: Mapping[str, Program], text: Windows, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each program's steps, taken in turns after those that compile it."""

    def timed(program: Program) -> float:
        start = time.process_time()
        program.step(*text.batch(0, 0), 0.0)
        return time.process_time() - start

    return take_turns(rounds, {name: partial(timed, program) for name, program in programs.items()}, warm_up=3)


@dataclass
class Curve:
    """The held-out losses of a program: one list of seeds for each budget."""

    ms: list[float]
    lr: float = 0.0
    tried: dict[float, float] = field(default_factory=dict)
    losses: list[list[float]] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        return statistics.quantiles(self.ms, method="inclusive")[0]

    def steps(self, seconds: float) -> int:
        return max(1, round(1e3 * seconds / self.step_ms))

    def cells(self) -> list[str]:
        tried = ", ".join(f"{lr}: {loss:.3f}" for lr, loss in self.tried.items())
        losses = [f"{statistics.median(seeds):.3f} ({full_range(seeds, '.3f')})" for seeds in self.losses]
        return [f"{self.step_ms:.1f} ({full_range(self.ms, '.1f')})", f"**{self.lr}** of {tried}", *losses]


def compare(programs: Mapping[str, Program], text: Windows, options: Options) -> dict[str, Curve]:
    seconds = step_seconds(programs, text, options.rounds)
    curves = {name: Curve([1e3 * second for second in own]) for name, own in seconds.items()}
    for name, curve in curves.items():
        run = partial(train, programs[name], text)
        curve.tried = {lr: run(lr, curve.steps(options.budgets[0]), 0) for lr in LRS}
        curve.lr = min(curve.tried, key=curve.tried.__getitem__)
        print(table("program | ms a step | learning rate", [[name, *curve.cells()]]).splitlines()[-1], flush=True)
    for budget in options.budgets:
        for name, curve in curves.items():
            run = partial(train, programs[name], text, curve.lr, curve.steps(budget))
            curve.losses.append([run(seed) for seed in range(options.seeds)])
            print(f"{budget:g} s, {name}: {', '.join(f'{loss:.4f}' for loss in curve.losses[-1])}", flush=True)
    return curves


def draw(curves: Mapping[str, Curve], options: Options) -> None:
    """Held-out loss against CPU seconds: medians, with the range of the seeds as bands."""
    assert options.figure is not None
    figure = new_figure(6.4, 4)
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(options.budgets, [statistics.median(seeds) for seeds in curve.losses], marker="o", label=name)
        axes.fill_between(options.budgets, [*map(min, curve.losses)], [*map(max, curve.losses)], alpha=0.2)
    if "shakespeare" in Path(options.data).name:
        axes.plot(*NANOGPT, "k*", label="nanoGPT, as published")
    axes.set(xscale="log", xlabel="CPU seconds of training, one thread", ylabel="held-out loss, nats per character")
    axes.set_xticks(options.budgets, [f"{budget:g}" for budget in options.budgets], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=8)
    save_figure(figure, options.figure)


def main() -> None:
    options = program_options(Options, "benchmarks.seconds")
    for name in options.programs:
        if name not in PROGRAMS:
            raise SystemExit(f"unknown program {name!r}; choose from: {'; '.join(PROGRAMS)}")
    try:
        if options.figure:
            check_output(options.figure, (".png", ".svg"))
        if options.held_out < options.batch_size:
            raise ValueError(f"--held-out must be at least --batch-size {options.batch_size}: got {options.held_out}")
        text = Windows(options)
    except ValueError as error:
        raise SystemExit(f"benchmarks.seconds: error: {error}") from None
    torch.set_num_threads(1)
    with join_world("cpu"):
        programs = {name: PROGRAMS[name](text) for name in options.programs}
        curves = compare(programs, text, options)
    columns = " | ".join(["program", "ms a step", "learning rate", *(f"{budget:g} s" for budget in options.budgets)])
    print(table(columns, [[name, *curve.cells()] for name, curve in curves.items()]))
    if options.figure:
        draw(curves, options)


if __name__ == "__main__":
    main()
