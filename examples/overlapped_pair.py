"""Run two chunks in sequence and overlapped, over a modeled link, and compare the times.

python examples/overlapped_pair.py
python examples/overlapped_pair.py --gb-per-s 0.02 --ranks 8

One process acts as one of many expert-parallel ranks. A transfer takes time, but no processor.
"""

import sys
import time
from dataclasses import dataclass

import torch

from moe_dualpipe.command_line import program_options
from moe_dualpipe.expert_parallel import Link, Loopback
from moe_dualpipe.models import ModelConfig, TransformerStage, build_model, next_token_loss
from moe_dualpipe.overlap import Engine

MODEL = ModelConfig(
    hidden_size=256, num_layers=2, num_dense_layers=0, num_heads=8, num_kv_heads=8, head_dim=32, expert_size=192,
    num_experts=32, num_shared_experts=0,
)  # fmt: skip


@dataclass
class Options:
    """The modeled link."""

    gb_per_s: float = 0.05
    """Bandwidth of the link in GB/s."""
    ranks: int = 16
    """Number of ranks that share the 32 experts; must divide 32."""


def main() -> None:
    options = program_options(Options, "overlapped_pair.py")
    torch.set_num_threads(1)
    backend = Loopback(MODEL.num_experts, options.ranks, Link(options.gb_per_s))
    model = build_model(MODEL, backend)
    x0, x1 = torch.randint(MODEL.vocab_size, (2, 2, 512))

    def sequential() -> None:
        next_token_loss(model(x0), x0)
        loss.backward()

    def overlapped(engine: Engine | None = None) -> None:
        TransformerStage.overlapped_forward_backward(
            model, [x0], next_token_loss, [x0], model, loss, None, None, engine=engine
        )

    for run in (sequential, overlapped) * 2:  # the first round warms up
        loss = next_token_loss(model(x1), x1)
        busy, start = backend.timer.busy_seconds, time.perf_counter()
        run()
        seconds, link = time.perf_counter() - start, backend.timer.busy_seconds - busy
        print(f"{run.__name__:>10}: {1e3 * seconds:4.0f} ms, of which the link was busy {1e3 * link:4.0f} ms")

    for queued, where in ((False, "on a CPU"), (True, "on a GPU")):
        loss = next_token_loss(model(x1), x1)
        log: list[str] = []
        overlapped(Engine(torch.device("cpu"), queued, log))
        print(f"the order {where}:", *log)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"overlapped_pair.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
