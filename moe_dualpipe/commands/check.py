"""`moe-dualpipe check`: your own layer against its contract, and a model in parallel layouts with one process."""

import shlex
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from ..command_line import Inline, Mark, Positional
from ..tools import checks
from ..tools.checks.layers import SMALL
from ..training.config import BatchConfig, TrainConfig
from ..training.options import parse_arguments


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layer. Small ones are checked as thoroughly as large ones, and faster."""

    hidden_size: int = 16
    """Width of the residual stream."""
    expert_size: int = 12
    """Inner width of one expert."""
    num_experts: int = 4
    """Number of experts."""
    experts_per_token: int = 2
    """Number of experts for each token."""
    num_heads: int = 4
    """Number of query heads."""
    num_kv_heads: int = 2
    """Number of key and value heads."""
    head_dim: int = 6
    """Width of one head."""


@dataclass(frozen=True)
class CheckLayer:
    layer: Annotated[Positional[str], Mark("LAYER")]
    """The class or function: FILE.py:NAME, MODULE:NAME, or the name of a built-in one."""
    options: Annotated[tuple[str, ...], Mark("[KEY=VALUE ...]")] = ()
    """The layer's own options."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to run the layer on."""
    traceback: bool = False
    """Stop at the first exception of the layer, and print its traceback."""
    sizes: Inline[Sizes] = field(default_factory=Sizes)

    kind: ClassVar[str]

    def run(self) -> int:
        """Print the table. Returns the exit code: 1 if a check failed. Raises ValueError for invalid options."""
        check: Any = getattr(checks, f"check_{self.kind}")
        config = replace(SMALL, **asdict(self.sizes))  # raises ValueError for sizes that do not fit each other
        report = check(self.layer, shlex.join(self.options), config, self.device, self.traceback)
        print(report)
        return 0 if report.passed else 1


@dataclass(frozen=True)
class CheckExperts(CheckLayer):
    """Check an expert layer: gradients, independent rows, any number of rows, expert parallelism, overlap."""

    kind = "experts"


@dataclass(frozen=True)
class CheckRouter(CheckLayer):
    """Check a router: valid ids, independent tokens, gradients, overlap."""

    kind = "router"


@dataclass(frozen=True)
class CheckAttention(CheckLayer):
    """Check attention: causal, independent sequences, generation with a cache, masks, gradients, overlap."""

    kind = "attention"


@dataclass(frozen=True)
class CheckBlock(CheckLayer):
    """Check a transformer block, with its attention, router and experts: the same checks as for attention."""

    kind = "block"


class CheckParallel:
    """Check that losses, logits and gradients of a model are the same in any parallel layout as in one process.

    Takes the options of train.py, such as --preset small --pp 4 --ep 2 --schedule zbv, and starts --pp x --ep
    processes (--pp 1 by default). Data, optimizer and checkpoints are ignored. `train.py --help` lists the options.
    """

    def __init__(self, options: list[str]):
        self.config = parse_arguments(options, TrainConfig(batch=BatchConfig(seq_len=16)))

    def run(self) -> int:
        """Print the table. Returns the exit code: 1 if a check failed."""
        report = checks.check_parallel(self.config)
        print(report)
        return 0 if report.passed else 1
