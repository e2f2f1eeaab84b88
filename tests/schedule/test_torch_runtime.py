"""PyTorch's own pipeline runtime trains a model with our CSV, and we read its CSV."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from moe_dualpipe.schedule import Schedule, add_comms, build, validate, validate_transfers
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
        expected, expected_losses = train_in_one_process(schedule.num_stages)
        for format, text in (("compute_only", schedule.to_csv()), ("compute_comms", with_transfers)):
            path = f"{folder}/{name}-{format}-{rank}.csv"
            Path(path).write_text(text)
            runtime, modules = torch_runtime(rank, schedule, path, format)
            x, y = batch()
            own, last, losses = schedule.placement.stages[rank], schedule.num_stages - 1, []
            runtime.step(*((x,) if 0 in own else ()), target=y if last in own else None, losses=losses)
            assert [loss.item() for loss in losses] == (expected_losses if last in own else []), (name, format)
            for stage in own:
                for p, q in zip(modules[stage].parameters(), expected[stage].parameters(), strict=True):
                    assert cosine_distance(p.grad, q.grad) < 1e-13, (name, format, stage)
            if format == "compute_comms":  # torch's CSV has the transfers that we derive
                runtime._dump_csv(path, format=format)
                text = Path(path).read_text()
                assert validate(Schedule.from_csv(text)) == schedule
                validate_transfers(schedule, steps_from_csv(text))


def test_torchs_runtime_trains_with_our_schedules(tmp_path):
    run_ranks(RANKS, check_training, str(tmp_path))
