"""Generation with a model that is divided over a pipeline: each token takes one forward through all stages.

Every stage caches keys and values of its layers, so stages send one position of each sequence. There is one micro-batch
at a time, and ranks wait for each other. This is suitable for samples, not for serving.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..models import KVCache
from ..models.context_parallel import without_context
from ..pipeline import Pipeline
from ..runtime import Executor, TensorSpec
from ..schedule import Forward, Placement, Schedule
from .generation import ALONE, Batch, decoding, eval_mode, run_batches
from .sampling import Sampling, generators


def forward_schedule(placement: Placement) -> Schedule:
    """The forward of one micro-batch along each route of `placement`.

    One would be enough. But a layer may communicate with its replicas, which hold it for the other route.
    """
    forwards: list[list[Forward]] = [[] for _ in range(placement.num_ranks)]
    for stage in range(placement.num_stages):
        for micro_batch, route in enumerate(placement.routes):
            forwards[route[stage]].append(Forward(stage, micro_batch))
    return Schedule("generate", placement, len(placement.routes), tuple(map(tuple, forwards)))


class _CachedStage(nn.Module):
    """A stage and its key/value cache."""

    def __init__(self, stage: nn.Module):
        super().__init__()
        self.stage, self.cache = stage, KVCache()

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x, cache=self.cache)


@torch.no_grad()
def generate_through_pipeline(
    model: Pipeline,
    prompts: Tensor | Sequence[Tensor],
    num_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Tensor:
    """Return the `num_tokens` tokens that follow each prompt, [B, N], on all ranks. Collective.

    Stages run in evaluation mode. They are called as `stage(x, cache=cache)`; the last one needs a method `logits`
    (models/transformer.py), which gets its output at the last position. prompts: [B, S], or B tensors [S], the same on
    all ranks. The model attends to at most as many positions as a micro-batch has. Raises ValueError for prompts that
    are empty or have invalid token ids.
    """
    sampling = sampling or Sampling()
    executor, placement, group = model.executor, model.schedule.placement, model.groups.pipeline
    schedule, last_rank = forward_schedule(placement), placement.routes[0][-1]
    cached = {index: _CachedStage(stage) for index, stage in executor.modules.items()}
    pipeline = Executor(cached, executor.p2p, executor.weight_grads)

    def next_tokens(running: list[Batch]) -> list[Tensor]:
        (batch,) = running
        for stage in cached.values():
            stage.cache.length = batch.past
        shape = *batch.new_BS.shape, model.model.hidden_size
        pipeline.p2p = executor.p2p.with_specs([TensorSpec(shape, model.dtype)])
        inputs = dict.fromkeys(range(schedule.num_micro_batches), (batch.new_BS,))
        outputs = pipeline.step(schedule, inputs, return_outputs=True).outputs
        next_B = batch.new_BS.new_empty(len(batch.new_BS))
        if 0 in outputs:
            last: Any = executor.modules[schedule.num_stages - 1]
            next_B = sampling.draw(last.logits(outputs[0][0][:, -1]), batch.random, batch.wanted)
        if group is not None:
            dist.broadcast(next_B, executor.p2p.global_ranks[last_rank], group=group)
        return [next_B]

    prompts = [prompt.to(executor.p2p.device) for prompt in prompts]
    steps = decoding(prompts, num_tokens, model.micro_batch[1], model.model.vocab_size)
    batch = Batch(range(len(prompts)), steps, generators(seed, len(prompts)))
    stages = executor.modules.values()
    with eval_mode(stages), without_context(stages):
        run_batches([batch], 1, next_tokens, ALONE)
    return batch.result
