"""`moe-dualpipe export`: write the weights of a run as safetensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from ..messages import printable
from .own_layers import NO_OWN_LAYERS, OwnLayers


@dataclass(frozen=True)
class Export:
    """Write the weights of a checkpoint as safetensors, to share or to start another run (train.py --weights)."""

    run_or_checkpoint: Positional[Annotated[str, arg(metavar="RUN")]]
    """Folder of a run (its newest checkpoint is used) or of a checkpoint."""
    out: Path
    """Folder to write; it must not exist."""
    layers: OmitArgPrefixes[OwnLayers] = NO_OWN_LAYERS
    traceback: bool = False
    """Print the whole traceback of an error in your own layer, instead of one line with its file and line number."""

    def run(self) -> None:
        from ..checkpoint import WEIGHTS_FILE, export_weights, find_checkpoint

        found = find_checkpoint(self.run_or_checkpoint)
        count = export_weights(found, self.out, **self.layers.named())
        size = (self.out / WEIGHTS_FILE).stat().st_size
        sizes = f"{count / 1e6:.2f} M parameters in fp32, {size / 1e6:.1f} MB"
        print(f"{printable(found)} -> {printable(self.out)}: {sizes}")
