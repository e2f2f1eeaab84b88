"""Time the experts of Hugging Face transformers with this project's `experts_implementation` and two of their own.

    python -m benchmarks.transformers_experts
    python -m benchmarks.transformers_experts --sizes 4096,2048,768,128,8 --dtype bfloat16       (on a GPU)

One layer's experts, forward and backward with all gradients, from hidden states, expert ids and routing weights. All
implementations must agree before they are timed. They take turns. On a CPU, times are CPU seconds of the process, which
other programs on the machine disturb little; on a GPU they are wall times.
"""

import importlib.metadata
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from moe_dualpipe.command_line import program_options
from moe_dualpipe.integrations.transformers import register

from .common import quartiles, ratios, table, take_turns


@dataclass(frozen=True)
class Options:
    """Time the experts of Hugging Face transformers with its own implementations and with this project's."""

    sizes: tuple[str, ...] = ("64,512,256,32,4", "512,512,256,32,4", "2048,512,256,32,4")
    """Sizes of a layer: tokens,hidden size,expert hidden size,experts,experts per token."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the hidden states and weights."""
    rounds: int = 11
    """Number of timed runs of each implementation."""
    threads: int = 1
    """Number of threads on a CPU."""


@dataclass(frozen=True)
class HuggingFaceExperts:
    """The experts of one layer and their inputs."""

    experts: nn.Module
    x_ND: Tensor
    ids_NK: Tensor
    weights_NK: Tensor
    dy_ND: Tensor

    @classmethod
    def random(cls, sizes: str, dtype: torch.dtype, device: str) -> "HuggingFaceExperts":
        from transformers import Qwen3MoeConfig, models

        tokens, hidden, inner, num_experts, k = map(int, sizes.split(","))
        config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=num_experts)
        experts = models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts(config).to(device, dtype)
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=parameter.shape[2] ** -0.5)
        top_NK, ids_NK = torch.randn(tokens, num_experts, device=device).topk(k)
        x_ND, dy_ND = (torch.randn(tokens, hidden, device=device, dtype=dtype) for _ in range(2))
        return cls(experts, x_ND.requires_grad_(), ids_NK, top_NK.softmax(-1).to(dtype).requires_grad_(), dy_ND)

    def run(self, implementation: str) -> tuple[Tensor, ...]:
        """The output, and the gradients of x, the routing weights, gate_up and down."""
        self.experts.config._experts_implementation = implementation  # type: ignore[union-attr]
        y_ND = self.experts(self.x_ND, self.ids_NK, self.weights_NK)
        leaves = [self.x_ND, self.weights_NK, *self.experts.parameters()]
        gradients = torch.autograd.grad(y_ND, leaves, self.dy_ND)
        return y_ND.detach(), *gradients

    def seconds(self, implementation: str) -> float:
        """The time of one run."""
        clock = time.perf_counter if self.x_ND.is_cuda else time.process_time
        start = clock()
        y_ND, *_ = self.run(implementation)
        y_ND[0, 0].item()  # waits for a GPU
        return clock() - start


def check_agreement(problem: HuggingFaceExperts, names: list[str]) -> None:
    """Raise AssertionError unless all implementations agree with "eager", up to rounding."""
    expected = problem.run("eager")
    allowed = 1e-5 if problem.x_ND.dtype == torch.float32 else 3e-2
    for name in names:
        for ours, other in zip(problem.run(name), expected, strict=True):
            error = float((ours.double() - other.double()).norm() / other.double().norm())
            assert error <= allowed, f"{name} differs from eager by {error:.1e}, more than {allowed:.0e}"


def rows(sizes: str, seconds: dict[str, list[float]]) -> list[list[str]]:
    """Medians and quartiles over the rounds. Each ratio compares two runs of the same round."""
    ours, *_ = seconds
    found = []
    for name, values in seconds.items():
        cells = quartiles([1e3 * value for value in values], ".4g")
        ratio = quartiles(ratios(seconds[ours], values), ".2f") if name != ours else ("1", "")
        found.append([sizes.replace(",", ", "), name, *cells, *ratio])
    return found


def main() -> None:
    options = program_options(Options, "benchmarks.transformers_experts")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {options.threads} thread(s)"
    versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
    print(f"{where}; {options.dtype}; {versions}; {options.rounds} rounds")
    names = [register(), "eager", "grouped_mm"]
    columns = "tokens, D, F, E, K | implementation | ms | quartiles | ours / this | quartiles"
    for sizes in options.sizes:
        problem = HuggingFaceExperts.random(sizes, getattr(torch, options.dtype), device)
        check_agreement(problem, names)
        cases = {name: partial(problem.seconds, name) for name in names}
        print(table(columns, rows(sizes, take_turns(options.rounds, cases, warm_up=1))), flush=True)


if __name__ == "__main__":
    main()
