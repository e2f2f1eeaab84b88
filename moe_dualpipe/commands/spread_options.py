"""The options of commands that open a model, whose experts may be spread over processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..expert_parallel.options import EpBackend
from ..health.watch import PATIENCE, watch_ranks
from ..messages import check_range
from ..runtime.groups import leave_world
from ..runtime.world import World, current_launch, join_world
from .options import DeviceOption


@dataclass(frozen=True, kw_only=True)
class SpreadOptions(DeviceOption):
    """With torchrun, the experts are spread over the processes.

    A checkpoint cannot choose which of its own layers are imported, because importing a file runs its code.
    """

    experts: str | None = None
    """The model's own expert layer, FILE.py:CLASS or MODULE:CLASS."""
    router: str | None = None
    """The model's own router."""
    attention: str | None = None
    """The model's own attention."""
    block: str | None = None
    """The model's own transformer block."""
    traceback: bool = False
    """Print the whole traceback of an error in your own layer, instead of one line with its file and line number."""
    ep_backend: EpBackend = "auto"
    """With torchrun: how the processes exchange tokens. With one that works in the background, such as all_to_all,
    batches of two or more sequences run as two micro-batches, each hiding the other's communication."""
    timeout: float = 600.0
    """With torchrun: seconds to wait for another process. One that dies or is stopped is detected sooner."""

    def own_layers(self) -> dict[str, str | None]:
        return {kind: getattr(self, kind) for kind in ("experts", "router", "attention", "block")}

    def check_spread(self) -> None:
        """Raise ValueError for a choice that has no meaning for one process, or is out of range."""
        check_range("--timeout", self.timeout, 1, 1_000_000)
        if current_launch().world_size == 1 and self.ep_backend != "auto":
            raise ValueError(f"--ep-backend {self.ep_backend} needs several processes: start them with torchrun")

    @contextmanager
    def joined(self) -> Iterator[World]:
        """The processes of this command. Several are watched: if one fails or stops, all end and name it."""
        with join_world(self.device, self.timeout) as world:  # also of one process: a layer may communicate
            if world.size == 1:
                yield world
                return
            invalid: Exception | None = None
            with watch_ranks(self.timeout, full_traceback=self.traceback):
                try:
                    yield world
                except (ValueError, OSError) as error:  # in general on all ranks
                    invalid = error
            leave_world(min(PATIENCE, self.timeout / 2))
            if invalid is not None:
                raise invalid
