"""`moe-dualpipe model`: the sizes of models."""

from dataclasses import dataclass
from typing import Annotated

from ..command_line import Mark, Positional
from ..models import PRESETS
from ..models.costs import shape_of
from ..tools.planner.published_shapes import read_shape
from ..tools.planner.table import size_summary, sizes_table
from .options import JsonOption, check_ranges


@dataclass(frozen=True)
class ShowModel(JsonOption):
    """Show the parameters and the FLOPs of a model. `plan estimate` predicts the memory of each pipeline rank."""

    model: Positional[Annotated[str, Mark("MODEL")]]
    """A preset, the name of a published model, or a config.json of Hugging Face."""
    seq_len: int = 4096
    """Tokens in a sequence."""

    def run(self) -> None:
        """Raises ValueError for invalid options."""
        shape = read_shape(self.model)
        check_ranges(self, 1, "seq_len")
        report = {
            "parameters": shape.parameters, "active_parameters": shape.active_parameters,
            "embedding_parameters": shape.embedding, "forward_flops": shape.forward_flops(self.seq_len),
            "train_flops": shape.train_flops(self.seq_len),
        }  # fmt: skip
        self.show(report, size_summary(shape, self.seq_len))


@dataclass(frozen=True)
class ListModels:
    """List the named models and their sizes."""

    def run(self) -> None:
        print(sizes_table([shape_of(config, name) for name, config in PRESETS.items()]))
