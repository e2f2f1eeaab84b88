"""Pipelines that start from published weights. Ranks import this file, so it does not import transformers."""

from collections.abc import Mapping
from pathlib import Path

from moe_dualpipe import Pipeline, build_schedule
from moe_dualpipe.checkpoint.huggingface import PublishedModel
from moe_dualpipe.checkpoint.weights import global_weights

MICRO_BATCHES, LENGTH = 4, 12
LAYOUTS = {"dualpipe": ("dualpipe", 2, 1), "dualpipev": ("dualpipev", 2, 1), "1f1b": ("1f1b", 2, 1),
           "ep 2": ("dualpipev", 1, 2)}  # fmt: skip
"""Schedule, pipeline ranks and ep, of 2 ranks."""


def bytes_read_under_each(_: int, folders: Mapping[str, Path]) -> dict[tuple[str, str], tuple[int, list[str]]]:
    """The bytes that this rank reads for its weights, and their names, by layout and folder."""
    found = {}
    for layout, (schedule, pp, ep) in LAYOUTS.items():
        for key, folder in folders.items():
            published = PublishedModel(folder)
            pipeline = Pipeline(published.config, build_schedule(schedule, pp, MICRO_BATCHES), (1, LENGTH), ep=ep)
            weights = {name: view for stage in pipeline.stages.values() for name, view in global_weights(stage).items()}
            published.read(weights)
            found[layout, key] = published.bytes_read, [*weights]
    return found
