"""`moe-dualpipe model`: the sizes of models, and the memory of each rank that trains one."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg, subcommand

from ..data import strict_json
from ..messages import LARGEST, check_range, plural
from ..models import PRESETS
from ..models.config import Recompute
from ..option_types import ScheduleName
from .balance import Balance


@dataclass(frozen=True)
class ShowModel:
    """Show the size of a model, and the memory of each pipeline rank during training."""

    preset: Positional[Annotated[str, arg(metavar="PRESET", help=f"Name of the model: {', '.join(PRESETS)}.")]]
    pp: int = 1
    """Number of pipeline ranks."""
    ep: int = 1
    """Number of ranks that share the experts of a layer."""
    dp: int | None = None
    """Number of data-parallel ranks, a multiple of ep. None: ep."""
    seq: int = 4096
    """Tokens in a sequence."""
    micro_batch_size: int = 1
    """Sequences in a micro-batch."""
    micro_batches: int | None = None
    """Micro-batches per step on each data-parallel rank. None: 8, or more if the schedule needs more."""
    schedule: ScheduleName = "auto"
    """Pipeline schedule. auto: dualpipe for an even number of pipeline ranks, else dualpipev."""
    recompute: Recompute = "none"
    """What to recompute in backward instead of saving."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and activations. Gradients and optimizer state are float32."""
    fused_loss: bool = False
    """Compute head and loss together in blocks of tokens, without storing all logits."""
    json: bool = False
    """Print JSON instead, with the bytes of each rank."""

    def run(self) -> None:
        """Raises ValueError for invalid or conflicting options."""
        from ..models import preset
        from ..schedule import build, default_micro_batches, default_schedule
        from ..tools.planner import MicroBatch, peak_memory, shape_of
        from ..tools.planner.model_tables import RankMemory, memory_table, size_summary

        config = preset(self.preset)
        for name in ("pp", "ep", "seq", "micro_batch_size", "dp", "micro_batches"):
            least = int(name not in ("dp", "micro_batches"))  # 0 means None
            most = 1_000_000 if name in ("ep", "dp") else LARGEST
            check_range(f"--{name.replace('_', '-')}", getattr(self, name) or 0, least, most)
        precision = "bf16" if self.dtype == "bfloat16" else "fp32"
        batch = MicroBatch(
            self.micro_batch_size, self.seq, ep=self.ep, recompute=self.recompute, fused_loss=self.fused_loss
        )
        name = self.schedule if self.schedule != "auto" else default_schedule(self.pp)
        schedule = build(name, self.pp, self.micro_batches or default_micro_batches(self.pp))
        dp = self.dp or self.ep
        shape = shape_of(config, self.preset)
        whole, shared = (peak_memory(config, schedule, batch, dp, precision, zero) for zero in (False, True))
        ranks = [RankMemory(*each) for each in zip(schedule.placement.stages, whole, shared, strict=True)]
        if self.json:
            report = {
                "parameters": shape.parameters,
                "active_parameters": shape.active_parameters,
                "embedding_parameters": shape.embedding,
                "forward_flops": shape.forward_flops(self.seq),
                "train_flops": shape.train_flops(self.seq),
                "ranks": [{"rank": number, **rank.as_dict()} for number, rank in enumerate(ranks)],
            }
            print(strict_json.write(report, indent=1))
            return
        micro_batches = plural(schedule.num_micro_batches, "micro-batch", "es")
        print(
            f"{size_summary(shape, self.seq)}\n\n"
            f"{name} over {self.pp} pipeline x {dp} data-parallel ranks, experts over {self.ep}, in {self.dtype}\n"
            f"{micro_batches} of {plural(batch.tokens, 'token')}, recompute {self.recompute}\n\n"
            f"{memory_table(ranks)}"
        )


@dataclass(frozen=True)
class ListModels:
    """List the named models and their sizes."""

    def run(self) -> None:
        from ..tools.planner import shape_of
        from ..tools.planner.model_tables import sizes_table

        print(sizes_table([shape_of(config, name) for name, config in PRESETS.items()]))


@dataclass(frozen=True)
class ModelCommands:
    """Sizes of models, and the memory that training needs."""

    command: Annotated[
        Annotated[ListModels, subcommand("list")]
        | Annotated[ShowModel, subcommand("show")]
        | Annotated[Balance, subcommand("balance")],
        tyro.conf.arg(name=""),
    ]
