"""Optional work of a training step. Each file has one extension, with up to four hooks.

`Trainer.step` is forward and backward, the norm of the gradients, and the update. Around it, each extension is called
in the order of `Trainer.extensions`; all calls but `state` are collective. `Instruments` (resolve.py) adds further
ones, such as the profiler of `--profile`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ...health.heartbeat import Progress
from ...pipeline import Pipeline
from ...runtime.buffers import Buffers
from ...runtime.optimizer import Optimizer
from ..config import TrainConfig
from ..resolve import Run


@dataclass(slots=True)
class Update:
    """What extensions see of a step. loss, norm: of the whole batch, before clipping, the same on all ranks.

    step: the number of steps before it. finite: False skips the update. loads_LE: tokens per layer and expert, summed
    over all ranks. record: the metrics of the step; `after_update` may add to it. notes: lines to print.
    """

    step: int
    loss: float
    norm: float
    loads_LE: Tensor
    finite: bool = True
    record: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Extension:
    """The hooks, which do nothing by default.

    exclusive: delay validation and saves until after the next step, because only training may run meanwhile.
    """

    exclusive = False

    def before_step(self, step: int) -> None:
        """Before the forward of a step."""

    def before_update(self, update: Update) -> None:
        """Gradients are summed over replicas; weights are not updated yet."""

    def after_update(self, update: Update) -> None:
        """After the update, or after it was skipped."""

    def state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a checkpoint by global name, with those of this extension. Loading them restores it."""
        return state


class Trained(Protocol):
    """The part of the trainer that extensions may use.

    run: what was decided before. `run.start.resume` is already loaded. own_sequences: the sequences of a step that this
    data-parallel rank runs.
    """

    run: Run
    config: TrainConfig
    pipeline: Pipeline
    buffers: Buffers
    optimizer: Optimizer
    progress: Progress
    remote_bytes: int

    @property
    def own_sequences(self) -> range: ...


Build = Callable[[Trained], "Extension | None"]
"""Called with the trainer; returns None for a run that does not need the extension."""
