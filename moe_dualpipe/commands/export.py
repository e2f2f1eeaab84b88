"""`moe-dualpipe export`: write the weights of a run in Hugging Face's format."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ..checkpoint import find_checkpoint
from ..checkpoint.huggingface import DTYPES, AdapterPlan, ExportPlan, plan_adapter_export, plan_checkpoint_export
from ..command_line import Mark, Positional
from ..data.stores import output_folder
from ..messages import plural, printable

GB = 10**9


@dataclass(frozen=True)
class Export:
    """Write the weights of a checkpoint in Hugging Face's format, for transformers, vLLM, SGLang and other programs.
    To start another run from them, give train.py --weights the run itself."""

    run_or_checkpoint: Positional[Annotated[str, Mark("RUN")]]
    """Folder or URL of a run (its newest checkpoint is used) or of a checkpoint."""
    out: Annotated[str, Mark("PATH")]
    """Folder to write, or a URL (docs/checkpoints.md); it must not exist."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the weights. None: that of the published model from which the run started, or float32;
    for a run with experts in FP8, these in FP8, and the rest in bfloat16."""
    adapter: bool = False
    """Write only the adapters of a run with --lora, for PEFT. Otherwise they are merged into the weights."""
    max_shard_size: Annotated[str, Mark("SIZE")] = "5GB"
    """Largest size of one file, such as 5GB or 512MiB."""

    def run(self) -> None:
        if self.adapter and self.dtype:
            raise ValueError(f"--dtype {self.dtype}: adapters are written in float32; leave it out")
        found = find_checkpoint(self.run_or_checkpoint)
        dtype = DTYPES[self.dtype] if self.dtype else None
        plan = plan_adapter_export(found) if self.adapter else plan_checkpoint_export(found, dtype)
        print(f"{printable(found)} -> {printable(self.out)}", _described(plan, self.max_shard_size), sep="\n")
        plan.write(output_folder(self.out), self.max_shard_size)
        if lost := plan.describe_loss():
            print(lost)


def _described(plan: ExportPlan, max_shard_size: str) -> str:
    architecture = plan.layout.architecture
    if isinstance(plan, AdapterPlan):
        size = _size(sum(plan.sizes.values()))
        return f"an adapter for {architecture.model_type} ({architecture.class_name}): {size}"
    return (
        f"{architecture.model_type} ({architecture.class_name}): {plural(len(plan.shapes), 'tensor')}, "
        f"{_size(sum(plan.sizes.values()))} in {plural(len(plan.shards(max_shard_size)), 'safetensors file')}"
    )


def _size(count: int) -> str:
    return f"{count / GB:,.2f} GB" if count >= GB / 10 else f"{count / 1e6:,.2f} MB"
