"""The environment variables of torchrun, and the choice between CPU and GPU."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..messages import Rule, plural, quoted, refuse

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process, as set by torchrun. Without torchrun, the process is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    restarts: int = 0

    @classmethod
    def from_environment(cls) -> "Launch":
        """Raises ValueError for a variable that is not a number."""
        world_size = _number("WORLD_SIZE", 1)
        local_world_size, restarts = _number("LOCAL_WORLD_SIZE", world_size), _number("TORCHELASTIC_RESTART_COUNT", 0)
        return cls(_number("RANK", 0), _number("LOCAL_RANK", 0), world_size, local_world_size, restarts)


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        what = f"the environment variable {name} must be a number"
        raise ValueError(f"{what}: got {quoted(os.environ[name], 60)}; torchrun sets it") from None


CONNECTIONS = 32
"""The number of hardware queues through which CUDA sends work to a GPU. 32 is the maximum; CUDA's default is 8.

Streams that share a queue wait for each other needlessly, such as a transfer for a product. A rank uses more than 7
streams: one for computation, one for each of the two chunks of a pair, one for experts, one for each neighbor and
direction of the pipeline, and one for replicas.
"""


def count_gpus() -> int:
    """The number of GPUs of this machine. Also sets CUDA's number of queues to `CONNECTIONS` unless the user set it."""
    import torch  # this module is also imported by programs that need no torch

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(CONNECTIONS))
    return torch.cuda.device_count()


def device_of(wanted: str, launch: Launch) -> "torch.device":
    """The device of this process for `wanted`; see `choose_device`."""
    import torch

    kind = choose_device(wanted, count_gpus(), launch.local_world_size)
    return torch.device(kind, launch.local_rank) if kind == "cuda" else torch.device(kind)


def choose_device(wanted: str, gpus: int, processes: int) -> str:
    """Return cpu or cuda for `wanted`: cpu, cuda, or auto (cuda if this machine has a GPU for each process).

    Raises ValueError for another `wanted`, and for cuda with fewer GPUs than processes.
    """
    refuse((
        Rule(wanted not in ("cpu", "cuda", "auto"), f"--device must be cpu, cuda or auto: got {wanted!r}"),
        Rule(
            wanted == "cuda" and not gpus, "--device cuda: torch finds no GPU on this machine; use --device cpu"
        ),
        Rule(
            wanted == "cuda" and gpus < processes,
            f"--device cuda needs a GPU for each process, but there are {plural(processes, 'process', 'es')} and "
            f"{plural(gpus, 'GPU')} here: start at most {plural(gpus, 'process', 'es')}, or use --device cpu",
        ),
    ))  # fmt: skip
    if wanted == "auto":
        return "cuda" if gpus >= processes else "cpu"
    return wanted
