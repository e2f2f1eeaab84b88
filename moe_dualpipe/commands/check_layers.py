"""`moe-dualpipe check experts|router|attention|block`: check your own layer against its contract."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional

if TYPE_CHECKING:
    from ..models.config import ModelConfig

Kind = Literal["experts", "router", "attention", "block"]


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

    def config(self) -> "ModelConfig":
        """Raises ValueError for sizes that do not fit each other."""
        from dataclasses import asdict, replace

        from ..tools.checks.layers import SMALL

        return replace(SMALL, **asdict(self))


@dataclass(frozen=True)
class CheckLayer:
    layer: Annotated[Positional[str], tyro.conf.arg(metavar="LAYER")]
    """The class or function: FILE.py:NAME, MODULE:NAME, or the name of a built-in one."""
    options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[KEY=VALUE ...]")] = ()
    """The layer's own options."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to run the layer on."""
    traceback: bool = False
    """Stop at the first exception of the layer, and print its traceback."""
    sizes: OmitArgPrefixes[Sizes] = field(default_factory=Sizes)

    kind: ClassVar[Kind]

    def run(self) -> int:
        """Print the table. Returns the exit code: 1 if a check failed. Raises ValueError for invalid options."""
        import shlex

        from ..tools import checks as testing

        check: Any = getattr(testing, f"check_{self.kind}")
        report = check(self.layer, shlex.join(self.options), self.sizes.config(), self.device, self.traceback)
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
