"""Build a model from the folder of a published one."""

import os
from pathlib import Path

import torch

from ...expert_parallel import ExpertParallel
from ...messages import plural
from ...models import StageOptions, TransformerStage, build_model
from ..weights import global_weights
from .companions import read_companions
from .published import PublishedModel


def from_pretrained(
    folder: str | os.PathLike[str], dtype: torch.dtype | None = None, expert_parallel: ExpertParallel | None = None,
    options: StageOptions | None = None,
) -> TransformerStage:  # fmt: skip
    """Build the model in `folder`, which has config.json and safetensors files as transformers writes them.

    dtype: of the model; None: that of the stored weights. expert_parallel, options: as in `build_model`.

    Needs memory for the model and one more tensor. The model is on the CPU. `model.companions` has the texts of
    tokenizer.json, tokenizer_config.json and similar files, which `save_pretrained` writes again.

    Raises ValueError, in one line, for an architecture that is not supported, and for files that are invalid or do not
    fit together (docs/checkpoints.md).
    """
    published = PublishedModel(Path(folder))
    companions = read_companions(published.folder, tokenizer=True)
    with torch.device("meta"):  # no memory, and no random numbers
        model = build_model(published.config, expert_parallel, options or StageOptions())
    model = model.to(dtype or published.dtype).to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()  # buffers that are not loaded start from 0
    weights = global_weights(model)
    if missing := sorted(weights.keys() - published.shapes.keys()):
        raise ValueError(f"{folder} lacks {plural(len(missing), 'tensor')} of the model, the first is {missing[0]}")
    published.read(weights)
    model.companions = companions
    return model
