"""`moe-dualpipe model`: how large the models are, and what each rank of a division of one holds."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, subcommand


@dataclass(frozen=True)
class ShowModel:
    """How large a model is, and what each pipeline rank holds of it while it trains."""

    preset: Positional[str]
    """Name of the model, such as tiny or deepseek-v3."""
    pp: int = 1
    """Pipeline ranks."""
    ep: int = 1
    """Ranks over which the experts of a layer are spread."""
    dp: int = 0
    """Data-parallel ranks, of which ep share the experts. 0: as many as ep."""
    seq: int = 4096
    """Tokens in a sequence."""
    micro_batch_size: int = 1
    """Sequences in a micro-batch."""
    micro_batches: int = 0
    """Micro-batches a step, on each data-parallel rank. 0: 8, or more where the schedule needs them."""
    schedule: str = "auto"
    """Pipeline schedule. auto: dualpipe, or 1f1b on a single rank."""
    recompute: Literal["none", "norms", "attention", "full"] = "none"
    """What to compute again in the backward instead of keeping it: none, norms, attention or full."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and activations; gradients and the optimizer's state are float32."""
    fused_loss: bool = False
    """The head and the loss as one, without logits as a whole."""
    json: bool = False
    """Print JSON: bytes, for each rank."""

    def run(self) -> None:
        from ..planner.report import show  # torch, which the other commands start without

        print(show(self))


@dataclass(frozen=True)
class ListModels:
    """The named models and their sizes."""

    def run(self) -> None:
        from ..planner.report import presets

        print(presets())


@dataclass(frozen=True)
class ModelCommands:
    """Models: their size, and the memory that training them takes."""

    command: Annotated[
        Annotated[ListModels, subcommand("list")] | Annotated[ShowModel, subcommand("show")],
        tyro.conf.arg(name=""),
    ]
