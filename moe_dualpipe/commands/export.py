"""`moe-dualpipe export`: write the weights of a run as safetensors, for this project or for Hugging Face."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ..checkpoint import WEIGHTS_FILE, export_weights, find_checkpoint
from ..checkpoint.huggingface import DTYPES, plan_checkpoint_export
from ..checkpoint.huggingface import Export as Plan
from ..data.stores import Url, is_url, sizes_of, staged_folder
from ..messages import plural, printable
from .options import OwnLayerOptions

GB = 10**9


@dataclass(frozen=True)
class Export(OwnLayerOptions):
    """Write the weights of a checkpoint as safetensors: to start another run (train.py --weights), or for programs that
    read Hugging Face's format, such as transformers, vLLM and SGLang."""

    run_or_checkpoint: Positional[Annotated[str, arg(metavar="RUN")]]
    """Folder or URL of a run (its newest checkpoint is used) or of a checkpoint."""
    out: Annotated[str, arg(metavar="PATH")]
    """Folder to write, or a URL (docs/storage.md); it must not exist."""
    to: Literal["moe-dualpipe", "huggingface"] = "moe-dualpipe"
    """Format of the folder."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """huggingface: dtype of the weights. None: that of the published model from which the run started, or float32."""
    max_shard_size: Annotated[str, arg(metavar="SIZE")] = "5GB"
    """huggingface: largest size of one file, such as 5GB or 512MiB."""
    architecture: Annotated[str | None, arg(metavar="MODEL_TYPE")] = None
    """huggingface: architecture to write, such as mixtral.
    None: that of the published model from which the run started, or the first that can express the model."""

    def run(self) -> None:
        if self.to == "huggingface":
            self._export_published()
            return
        for name in ("dtype", "max_shard_size", "architecture"):
            if getattr(self, name) != getattr(Export, name):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} needs --to huggingface: without it, export writes one file in fp32")

        found, out = find_checkpoint(self.run_or_checkpoint), self._folder()
        count = export_weights(found, out, **self.own_layers())
        size = sizes_of(out)[WEIGHTS_FILE]
        sizes = f"{count / 1e6:.2f} M parameters in fp32, {size / 1e6:.1f} MB"
        print(f"{printable(found)} -> {printable(self.out)}: {sizes}")

    def _export_published(self) -> None:
        found = find_checkpoint(self.run_or_checkpoint)
        dtype = DTYPES[self.dtype] if self.dtype else None
        plan = plan_checkpoint_export(found, dtype, self.architecture or "")
        print(f"{printable(found)} -> {printable(self.out)}", _described(plan, self.max_shard_size), sep="\n")
        out = self._folder()
        plan.write(out, self.max_shard_size)
        files = sizes_of(out)
        print(f"wrote {plural(len(files), 'file')}, {_size(sum(files.values()))}")

    def _folder(self) -> Path:
        return staged_folder(Url(self.out)) if is_url(self.out) else Path(self.out)


def _described(plan: Plan, max_shard_size: str) -> str:
    architecture = plan.layout.architecture
    return (
        f"{architecture.model_type} ({architecture.class_name}): {plural(len(plan.shapes), 'tensor')}, "
        f"{_size(plan.num_bytes)} in {plural(len(plan.shards(max_shard_size).files), 'safetensors file')}; "
        f"needs {_size(plan.peak_bytes(max_shard_size))} of memory for tensors"
    )


def _size(count: int) -> str:
    return f"{count / GB:,.2f} GB" if count >= GB / 10 else f"{count / 1e6:,.2f} MB"
