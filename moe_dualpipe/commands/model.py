"""`moe-dualpipe model`: the sizes of models, and the memory of each rank that trains one."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ..messages import plural
from ..models import PRESETS, ModelConfig, preset
from ..models.config import Recompute
from ..models.partition import check_stages
from ..runtime.layout import check_ep
from ..schedule import NAMES, Schedule, build, default_micro_batches, default_schedule
from ..tools.planner import MicroBatch, peak_memory, shape_of
from ..tools.planner.model_tables import RankMemory, memory_table, size_summary, sizes_table
from .options import JsonOption, check_ranges, check_together, one_of


@dataclass(frozen=True)
class ShowModel(JsonOption):
    """Show the size of a model, and the memory of each pipeline rank during training."""

    preset: Positional[Annotated[str, arg(metavar="PRESET", help=f"Name of the model: {', '.join(PRESETS)}.")]]
    pp: int = 1
    """Number of pipeline ranks."""
    ep: int = 1
    """Number of ranks that share the experts of a layer."""
    dp: int | None = None
    """Number of data-parallel ranks, a multiple of ep. None: ep."""
    seq_len: int = 4096
    """Tokens in a sequence."""
    micro_batch_size: int = 1
    """Sequences in a micro-batch."""
    micro_batches: int | None = None
    """Micro-batches per step on each data-parallel rank. None: 8, or more if the schedule needs more."""
    schedule: Annotated[str, one_of("auto", *NAMES)] = "auto"
    """Pipeline schedule. auto: dualpipe for an even number of pipeline ranks, else dualpipev."""
    recompute: Recompute = "none"
    """What to recompute in backward instead of saving."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and activations. Gradients and optimizer state are float32."""
    fused_loss: bool = False
    """Compute head and loss together in blocks of tokens, without storing all logits."""

    def run(self) -> None:
        """Raises ValueError for invalid or conflicting options."""
        config = preset(self.preset)
        check_ranges(self, 1, "pp", "seq_len", "micro_batch_size")
        check_ranges(self, 1, "ep", "dp", "micro_batches", high=1_000_000)
        precision = "bf16" if self.dtype == "bfloat16" else "fp32"
        batch = MicroBatch(
            self.micro_batch_size, self.seq_len, ep=self.ep, recompute=self.recompute, fused_loss=self.fused_loss
        )
        schedule = check_together(self, ("pp", "ep", "dp", "micro_batches"), lambda shown: shown._build(config))
        dp = self.dp or self.ep
        shape = shape_of(config, self.preset)
        whole, shared = (peak_memory(config, schedule, batch, dp, precision, zero) for zero in (False, True))
        ranks = [RankMemory(*each) for each in zip(schedule.placement.stages, whole, shared, strict=True)]
        report = {
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
            "embedding_parameters": shape.embedding,
            "forward_flops": shape.forward_flops(self.seq_len),
            "train_flops": shape.train_flops(self.seq_len),
            "ranks": [{"rank": number, **rank.as_dict()} for number, rank in enumerate(ranks)],
        }
        self.show(
            report,
            f"{size_summary(shape, self.seq_len)}\n\n"
            f"{schedule.name} over {self.pp} pipeline x {dp} data-parallel ranks, experts over {self.ep}, "
            f"in {self.dtype}\n"
            f"{plural(schedule.num_micro_batches, 'micro-batch', 'es')} of {plural(batch.tokens, 'token')}, "
            f"recompute {self.recompute}\n\n{memory_table(ranks)}",
        )

    def _build(self, config: ModelConfig) -> Schedule:
        name = self.schedule if self.schedule != "auto" else default_schedule(self.pp)
        schedule = build(name, self.pp, self.micro_batches or default_micro_batches(self.pp))
        check_stages(schedule.num_stages, config.num_layers)
        check_ep(self.ep, config.num_experts, self.dp)
        return schedule


@dataclass(frozen=True)
class ListModels:
    """List the named models and their sizes."""

    def run(self) -> None:
        print(sizes_table([shape_of(config, name) for name, config in PRESETS.items()]))
