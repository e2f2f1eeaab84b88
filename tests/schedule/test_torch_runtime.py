"""Our schedules, as CSV, run in PyTorch's own pipeline runtime and train a model; its CSV is read back here."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from moe_dualpipe.schedule import Schedule, Send, add_comms, build, validate, validate_transfers
from moe_dualpipe.schedule.schedule import steps_from_csv
from tests.support.ranks import cosine_distance, run_ranks

RANKS, MICRO_BATCHES, SIZE, WIDTH = 2, 6, 3, 8
# A stage of torch's lives on one rank, so it cannot run mirrored schedules.
NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev"]


def make_modules(num_stages):
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]


def batch():
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(MICRO_BATCHES * SIZE, WIDTH, generator=generator) for _ in range(2))


def plain(num_stages):
    """The model trained in one process: losses by micro-batch, and parameters with their gradients, by stage."""
    modules = make_modules(num_stages)
    losses = []
    for x, y in zip(*(t.split(SIZE) for t in batch()), strict=True):
        loss = nn.functional.mse_loss(nn.Sequential(*modules)(x), y)
        loss.backward()
        losses.append(loss.item())
    return modules, losses


def torch_runtime(rank, schedule, path, format):
    """torch's runtime over the stages that `schedule` puts on this rank, with its order from the file."""
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


def trains_alike(rank, folder):
    for name in NAMES:
        schedule = build(name, RANKS, MICRO_BATCHES)
        lowered = "\n".join(",".join(map(str, steps)) for steps in add_comms(schedule))
        for format, text in (("compute_only", schedule.to_csv()), ("compute_comms", lowered)):
            path = f"{folder}/{name}-{format}-{rank}.csv"
            with open(path, "w") as file:
                file.write(text)
            runtime, modules = torch_runtime(rank, schedule, path, format)
            x, y = batch()
            own, last = schedule.placement.stages[rank], schedule.num_stages - 1
            losses = []
            runtime.step(*((x,) if 0 in own else ()), target=y if last in own else None, losses=losses)
            expected, expected_losses = plain(schedule.num_stages)
            if last in own:
                assert [loss.item() for loss in losses] == expected_losses, (name, format)
            for stage in own:
                for (key, p), q in zip(modules[stage].named_parameters(), expected[stage].parameters(), strict=True):
                    assert p.grad is not None, (name, format, stage, key)
                    assert cosine_distance(p.grad, q.grad) < 1e-13, (name, format, stage, key)
            if rank == 0 and format == "compute_only":
                reads_back(runtime, schedule, folder)
            dist.barrier()


def reads_back(runtime, schedule, folder):
    """What torch writes, without transfers and with those that it derives."""
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


def test_our_schedules_train_in_torchs_runtime_and_come_back(tmp_path):
    run_ranks(RANKS, trains_alike, str(tmp_path))


def test_a_mirrored_schedule_is_refused_by_torch(tmp_path):
    run_ranks(2, refused, str(tmp_path))


def refused(rank, folder):
    schedule = build("dualpipe", 2, MICRO_BATCHES)
    with open(f"{folder}/{rank}.csv", "w") as file:
        file.write(schedule.to_csv())
    with pytest.raises((ValueError, AssertionError)):
        torch_runtime(rank, schedule, f"{folder}/{rank}.csv", "compute_only")
