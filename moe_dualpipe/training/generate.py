"""Sample from a model that is spread over a pipeline: each token is one forward through the stages.

The whole prefix is run again for every token, which is simple and right for a short sample.
"""

from typing import Any

import torch
import torch.distributed as dist

from ..models.inference import sample
from ..runtime import Executor, TensorSpec
from ..schedule import Forward, Placement, Schedule


def wave(placement: Placement) -> Schedule:
    """One micro-batch, forward through every stage along the placement's first route."""
    route = placement.routes[0]
    actions = tuple(
        tuple(Forward(stage, 0) for stage, holder in enumerate(route) if holder == rank)
        for rank in range(placement.num_ranks)
    )
    return Schedule("generate", Placement((route,)), 1, actions)


@torch.no_grad()
def generate(
    executor: Executor,
    placement: Placement,
    group: dist.ProcessGroup | None,
    prompt: list[int],
    num_tokens: int,
    hidden: tuple[int, torch.dtype],
    max_length: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """Return `num_tokens` tokens that follow `prompt`, the same on all ranks of the pipeline `group`. Collective.

    The last stage has a method `logits` (models/transformer.py), which is given what it ends in at the last position.
    hidden: width and dtype of what passes between stages. max_length: the longest prefix the model sees.
    temperature: 0 takes the most likely token.
    """
    schedule = wave(placement)
    last_rank = placement.routes[0][-1]
    random = torch.Generator().manual_seed(seed)
    device = executor.p2p.device
    tokens = list(prompt)
    for _ in range(num_tokens):
        prefix = torch.tensor([tokens[-max_length:]], device=device)
        spec = TensorSpec((1, prefix.shape[1], hidden[0]), hidden[1])
        step = Executor(executor.modules, executor.p2p.with_specs([spec]), executor.weight_grads).step
        outputs = step(schedule, {0: (prefix,)}, return_outputs=True).outputs
        token = torch.zeros(1, dtype=torch.int64, device=device)
        if outputs:
            last: Any = executor.modules[schedule.num_stages - 1]
            token += sample(last.logits(outputs[0][0][:, -1]), temperature, random)
        if group is not None:
            dist.broadcast(token, executor.p2p.global_ranks[last_rank], group=group)
        tokens.append(int(token))
    return tokens[len(prompt) :]
