"""Your own modules in a pipeline, under any schedule.

torchrun --nproc-per-node 2 examples/own_stages.py dualpipe
torchrun --nproc-per-node 2 examples/own_stages.py zbv
torchrun --nproc-per-node 2 examples/own_stages.py order.csv
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from moe_dualpipe.messages import describe
from moe_dualpipe.runtime import P2P, Executor, TensorSpec
from moe_dualpipe.runtime.replicas import ReplicaSet
from moe_dualpipe.runtime.stage_sums import sum_gradients
from moe_dualpipe.schedule import Schedule, build

WIDTH, SIZE = 32, 4


def main(name: str) -> None:
    if "RANK" not in os.environ:
        raise ValueError("each rank is a process: start them with torchrun --nproc-per-node 2 examples/own_stages.py")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = Schedule.from_csv(Path(name).read_text()) if name.endswith(".csv") else build(name, ranks, 8)
    micro_batches, last = schedule.num_micro_batches, schedule.num_stages - 1

    # Every rank creates all weights, so that replicas start equal, and keeps the stages that it is assigned.
    torch.manual_seed(0)
    every = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(schedule.num_stages)]
    stages = {stage: every[stage] for stage in schedule.placement.stages[rank]}
    links = P2P.connect(dist.group.WORLD, [TensorSpec((SIZE, WIDTH), torch.float32)], torch.device("cpu"))
    executor = Executor(stages, links)

    x, y = torch.randn(2, micro_batches, SIZE, WIDTH)
    inputs = {m: (x[m],) for m in range(micro_batches) if schedule.rank_of(0, m) == rank}
    labels = {m: (y[m],) for m in range(micro_batches) if schedule.rank_of(last, m) == rank}
    result = executor.step(schedule, inputs, labels, nn.functional.mse_loss)

    # DualPipe holds each stage on two ranks, and each rank ran half of its micro-batches: sum their gradients.
    if len(schedule.placement.holders(0)) > 1:
        named = {f"{s}.{key}": p for s, stage in stages.items() for key, p in stage.named_parameters()}
        pair = [dist.new_group([r, ranks - 1 - r]) for r in range(ranks // 2)][min(rank, ranks - 1 - rank)]
        sum_gradients(ReplicaSet(named, pair))  # type: ignore[arg-type]
    for stage, module in stages.items():
        norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        print(f"rank {rank}: stage {stage} has a gradient of norm {norm:.4f}", flush=True)
    for micro_batch, loss in result.losses.items():
        print(f"rank {rank}: micro-batch {micro_batch} has a loss of {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "dualpipe")
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":  # every rank has the same error
            print(f"own_stages.py: error: {describe(error)}", file=sys.stderr)
        raise SystemExit(2) from None
