"""Training on simulated GPUs: overlapped pairs on one, and pipelines."""

import dataclasses
from collections import deque
from typing import Any

import torch

from moe_dualpipe.expert_parallel import AllToAll, Loopback
from moe_dualpipe.models import StageOptions, TransformerStage, next_token_loss, split
from moe_dualpipe.runtime import P2P, Executor, TensorSpec
from moe_dualpipe.schedule import build
from tests.machines.simulated_gpu import SimulatedGpu
from tests.support.pairs import CONFIG, OVERLAPPED, gradients, tokens
from tests.support.simulated_ranks import LinkGroup, Mailboxes, MirrorGroup, run_threads

EXPERT_RANKS, MICRO_BATCHES = 4, 6


def all_to_all() -> AllToAll:
    return AllToAll(CONFIG.num_experts, MirrorGroup(EXPERT_RANKS))  # type: ignore[arg-type]


def loopback() -> Loopback:
    """Gives the same numbers as `all_to_all`, without a GPU."""
    return Loopback(CONFIG.num_experts, EXPERT_RANKS)


def run_actions(model: Any, actions: list[str], length: int) -> list[torch.Tensor]:
    """Run forwards and backwards of one model, alone and in pairs. Returns losses and gradients."""
    waiting, losses = deque(), []

    def forward(outputs: Any, seed: int) -> None:
        waiting.append(next_token_loss(outputs, tokens(seed + 100, 2, length)))

    for seed, action in enumerate(actions):
        x = tokens(seed, 2, length)
        match action if waiting else "forwards":
            case "forward":
                forward(model(x), seed)
            case "forwards":
                for outputs in model.interleaved_forward(model, [x], model, [x.flip(0)]):
                    forward(outputs, seed)
            case "pair":
                labels = [tokens(seed + 100, 2, length)]
                waiting.append(OVERLAPPED(model, [x], next_token_loss, labels, model, waiting[0], None, None)[1])
                losses.append(waiting.popleft().detach())
            case "backward":
                waiting[0].backward()
                losses.append(waiting.popleft().detach())
            case "split":
                with model.weight_grads.defer_to(seed):
                    waiting[0].backward()
                model.weight_grads.run_deferred(seed)
                losses.append(waiting.popleft().detach())
    return losses + gradients(model)


Results = tuple[dict[int, torch.Tensor], list[list[Any]]]


def pipeline(name: str = "dualpipe", train: bool = True) -> Results:
    """A step on two ranks. Returns losses by micro-batch, and gradients of each stage, summed over ranks."""
    mailboxes, schedule = Mailboxes(), build(name, 2, MICRO_BATCHES)
    last = schedule.num_stages - 1
    stages = [
        {s: all_stages[s] for s in held}
        for held in schedule.placement.stages
        for all_stages in [_stages(all_to_all(), schedule.num_stages)]
    ]

    def run(rank: int, gpu: SimulatedGpu) -> dict[int, torch.Tensor]:
        groups: Any = [LinkGroup(gpu, rank, direction, mailboxes) for direction in ("up", "down")]
        spec = TensorSpec((*tokens(0).shape, CONFIG.hidden_size), torch.float32)
        executor = Executor(stages[rank], P2P((spec,), gpu.device, rank, 2, (0, 1), *groups))
        inputs = {m: (tokens(m),) for m in range(MICRO_BATCHES) if schedule.rank_of(0, m) == rank}
        labels = {m: (tokens(m + 10),) for m in range(MICRO_BATCHES) if schedule.rank_of(last, m) == rank}
        with torch.set_grad_enabled(train):
            return executor.step(schedule, inputs, labels, next_token_loss).losses

    losses = {m: loss for part in run_threads(2, mailboxes, run) for m, loss in part.items()}
    grads = [[gradients(held[s]) for held in stages if s in held] for s in range(last + 1)]
    return losses, [[sum(parts) if train else parts[0] for parts in zip(*copies, strict=True)] for copies in grads]


def single_process(num_stages: int = 2) -> Results:
    """The same without a pipeline and without a GPU."""
    stages, losses = _stages(loopback(), num_stages), {}
    for m in range(MICRO_BATCHES):
        x: Any = tokens(m)
        for one in stages:
            x = one(x)
        loss = next_token_loss(x, tokens(m + 10))
        loss.backward()
        losses[m] = loss.detach()
    return losses, [gradients(one) for one in stages]


def _stages(ep: Any, num_stages: int) -> list[TransformerStage]:
    """Stages of one layer."""
    config = dataclasses.replace(CONFIG, num_layers=num_stages, num_dense_layers=0)
    return [TransformerStage(config, spec, ep, StageOptions(0)) for spec in split(config, num_stages)]
