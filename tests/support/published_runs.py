"""Pipelines that start from published weights. Ranks import this file, so it does not import transformers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moe_dualpipe import Pipeline, build_schedule
from moe_dualpipe.checkpoint.huggingface import PublishedModel
from moe_dualpipe.expert_parallel.parameters import expert_ids, global_tensors
from moe_dualpipe.training.config import OptimizerConfig

STEPS, MICRO_BATCHES, LENGTH, VOCABULARY = 20, 4, 12, 37
CONFIG, CLIP = OptimizerConfig(lr=1e-3, beta1=0.8, beta2=0.9, weight_decay=0.3), 5.6
LAYOUTS = {"dualpipe": ("dualpipe", 2, 1), "dualpipev": ("dualpipev", 2, 1), "1f1b": ("1f1b", 2, 1),
           "ep 2": ("dualpipev", 1, 2)}  # fmt: skip
"""Schedule, pipeline ranks and ep, of 2 ranks."""


def batches() -> torch.Tensor:
    """Five batches, again and again."""
    random = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (5, MICRO_BATCHES, LENGTH + 1), generator=random).repeat(STEPS // 5, 1, 1)


def weights_by_global_name(stages: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Views of the weights of all stages of a rank."""
    return {
        global_name: view
        for stage in stages
        for name, tensor in stage.state_dict().items()
        for global_name, view in global_tensors(name, tensor, expert_ids(stage).get(name))
    }


def read_stages(published: PublishedModel, stages: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Read the weights of the stages of a rank, and nothing else. Returns views of them by global name."""
    weights = weights_by_global_name(stages)
    published.read(weights)
    return weights


def train_under(name: str, folder: Path) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """The losses, the norms of the gradients, and this rank's weights after the last step."""
    schedule, pp, ep = LAYOUTS[name]
    published = PublishedModel(folder)
    pipeline = Pipeline(published.config, build_schedule(schedule, pp, MICRO_BATCHES // ep), (1, LENGTH), ep=ep)
    read_stages(published, pipeline.stages.values())
    optimizer = pipeline.optimizer(CONFIG)
    losses, norms = [], []
    first = pipeline.layout.dp_rank * pipeline.num_sequences
    for batch in batches()[:, first : first + pipeline.num_sequences]:
        losses.append(pipeline.mean_loss(pipeline.step(batch[:, :-1], batch[:, 1:])))
        norm = pipeline.sum_gradients() / pipeline.num_micro_batches
        optimizer.step(CONFIG.lr, (CLIP / norm.clamp(min=CLIP)) / pipeline.num_micro_batches)
        norms.append(norm.item())
    weights = weights_by_global_name(pipeline.stages.values())
    return losses, norms, {name: tensor.numpy() for name, tensor in weights.items()}


def train_under_each(_: int, names: Sequence[str], folder: Path) -> dict[str, Any]:
    return {name: train_under(name, folder) for name in names}


def bytes_read_under_each(_: int, folders: Mapping[str, Path]) -> dict[tuple[str, str], tuple[int, list[str]]]:
    """The bytes that this rank reads for its weights, and their names, by layout and folder."""
    found = {}
    for name, (schedule, pp, ep) in LAYOUTS.items():
        for key, folder in folders.items():
            published = PublishedModel(folder)
            pipeline = Pipeline(published.config, build_schedule(schedule, pp, MICRO_BATCHES), (1, LENGTH), ep=ep)
            weights = read_stages(published, pipeline.stages.values())
            found[name, key] = published.bytes_read, [*weights]
    return found
