"""PyTorch's own pipeline runtime trains a model with our CSV, and we read its CSV."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from moe_dualpipe.schedule import Schedule, Send, add_comms, build, validate, validate_transfers
from moe_dualpipe.schedule.schedule import steps_from_csv
from tests.support.ranks import cosine_distance, run_ranks

RANKS, MICRO_BATCHES, SIZE, WIDTH = 2, 4, 3, 8
# torch holds each stage on one rank, so it cannot run mirrored schedules.
NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev"]


def make_modules(num_stages):
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]


def batch():
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(MICRO_BATCHES * SIZE, WIDTH, generator=generator) for _ in range(2))


def train_in_one_process(num_stages):
    """Train in one process. Returns the modules with their gradients, and the loss of each micro-batch."""
    modules = make_modules(num_stages)
    losses = []
    for x, y in zip(*(t.split(SIZE) for t in batch()), strict=True):
        loss = nn.functional.mse_loss(nn.Sequential(*modules)(x), y)
        loss.backward()
        losses.append(loss.item())
    return modules, losses


def torch_runtime(rank, schedule, path, format):
    """Return torch's runtime, with the stages of this rank and the actions in the file, and the modules."""
    modules = make_modules(schedule.num_stages)
    example = torch.zeros(SIZE, WIDTH)
    stages = [
        PipelineStage(
            modules[s], s, schedule.num_stages, torch.device("cpu"), input_args=example.clone().requires_grad_(s > 0),
            output_args=example.clone().requires_grad_(),
        )
        for s in schedule.placement.stages[rank]
    ]  # fmt: skip
    runtime = _PipelineScheduleRuntime(stages, MICRO_BATCHES, nn.functional.mse_loss, scale_grads=False)
    runtime._load_csv(path, format=format)
    return runtime, modules


def check_training(rank, folder):
    for name in NAMES:
        schedule = build(name, RANKS, MICRO_BATCHES)
        with_transfers = "\n".join(",".join(map(str, steps)) for steps in add_comms(schedule))
        for format, text in (("compute_only", schedule.to_csv()), ("compute_comms", with_transfers)):
            path = f"{folder}/{name}-{format}-{rank}.csv"
            with open(path, "w") as file:
                file.write(text)
            runtime, modules = torch_runtime(rank, schedule, path, format)
            x, y = batch()
            own, last = schedule.placement.stages[rank], schedule.num_stages - 1
            losses = []
            runtime.step(*((x,) if 0 in own else ()), target=y if last in own else None, losses=losses)
            expected, expected_losses = train_in_one_process(schedule.num_stages)
            if last in own:
                assert [loss.item() for loss in losses] == expected_losses, (name, format)
            for stage in own:
                for (key, p), q in zip(modules[stage].named_parameters(), expected[stage].parameters(), strict=True):
                    assert p.grad is not None, (name, format, stage, key)
                    assert cosine_distance(p.grad, q.grad) < 1e-13, (name, format, stage, key)
            if rank == 0 and format == "compute_only":
                check_csv_of_torch(runtime, schedule, folder)
            dist.barrier()


def check_csv_of_torch(runtime, schedule, folder):
    """Read the CSV of torch, with and without the transfers that torch derives."""
    for format in ("compute_only", "compute_comms"):
        path = f"{folder}/dumped.csv"
        runtime._dump_csv(path, format=format)
        with open(path) as file:
            text = file.read()
        assert validate(Schedule.from_csv(text)) == schedule, format
    steps = steps_from_csv(text)
    assert sum(isinstance(step, Send) for row in steps for step in row) == sum(
        isinstance(step, Send) for row in add_comms(schedule) for step in row
    )
    validate_transfers(schedule, steps)


def test_torchs_runtime_trains_with_our_schedules(tmp_path):
    run_ranks(RANKS, check_training, str(tmp_path))
