"""The options of commands that spread experts over processes."""

from dataclasses import dataclass

from ..expert_parallel.options import EpBackend


@dataclass(frozen=True, kw_only=True)
class SpreadOptions:
    """With torchrun, the experts are spread over the processes."""

    ep_backend: EpBackend = "auto"
    """With torchrun: how the processes exchange tokens. With one that works in the background, such as all_to_all,
    batches of two or more sequences run as two micro-batches, each hiding the other's communication."""

    def check_backend(self, processes: int) -> None:
        """Raise ValueError for a choice that has no meaning for one process."""
        if processes == 1 and self.ep_backend != "auto":
            raise ValueError(f"--ep-backend {self.ep_backend} needs several processes: start them with torchrun")
