"""`moe-dualpipe export`: the weights of a run, without what only training needs."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Export:
    """Write the weights of a checkpoint as safetensors: to start other runs from (train.py --weights), to give away."""

    run_or_checkpoint: Positional[str]
    """A run's folder, for its newest checkpoint, or one checkpoint in it."""
    out: Path
    """Folder to write; it must not exist."""
    experts: str = "swiglu"
    """Expert layer of your own, "module:Class": a checkpoint that has one cannot choose what is imported."""

    def run(self) -> None:
        from ..checkpoint import WEIGHTS_FILE, export_weights, find_checkpoint

        found = find_checkpoint(self.run_or_checkpoint)
        count = export_weights(found, self.out, self.experts)
        size = (self.out / WEIGHTS_FILE).stat().st_size
        print(f"{found} -> {self.out}: {count / 1e6:.2f} M numbers in fp32, {size / 1e6:.1f} MB")
