"""The variants of `check parallel`: ways to run the same sequences, and how much each may differ from the reference.

The reference is the whole model in one process, one micro-batch after the other, with a plain forward and backward.
"""

from dataclasses import dataclass
from math import lcm

from ...models.config import Recompute
from ...schedule import NAMES
from ...training.config import ParallelConfig
from .first_difference import Tolerance

# A relative difference r is a cosine distance 1 - 2xy/(xx+yy) of about r^2 / 2.
SAME_ORDER = Tolerance(0, 0, 0)  # the same operations in the same order
OTHER_ORDER = Tolerance(0, 0, 4.5e-7)  # a token's operations are the same, but gradients are added in another order
OTHER_ROWS = Tolerance(1e-6, 1e-5, 4.5e-6)  # a matrix product may round a row differently if it has other rows


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the sequences.

    schedule: None runs one micro-batch after the other without a pipeline. neighbors: the seed of a random order of
    the sequences; None: as in the reference. size: sequences per micro-batch; None: as in the reference.
    """

    name: str
    tolerance: Tolerance
    pp: int = 1
    dp: int = 1
    ep: int = 1
    schedule: str | None = None
    num_chunks: int | None = None
    overlap: bool = True
    recompute: Recompute = "none"
    size: int | None = None
    neighbors: int | None = None

    @property
    def processes(self) -> int:
        return self.pp * self.dp


_RECOMPUTE: tuple[Recompute, ...] = ("norms", "attention", "full")
REFERENCE = Variant("one process", SAME_ORDER)


def default_variants(size: int) -> list[Variant]:
    """The default variants, on 1, 2 and 4 processes. size: sequences per micro-batch of the reference."""
    one = [
        Variant("repeated", SAME_ORDER),
        *(Variant(f"recompute {name}", SAME_ORDER, recompute=name) for name in _RECOMPUTE),
        Variant("dualpipev, overlapped", OTHER_ORDER, schedule="dualpipev"),
        Variant("each sequence alone" if size > 1 else "two sequences together", OTHER_ROWS, size=1 if size > 1 else 2),
        Variant("shuffled sequences", OTHER_ROWS, neighbors=1),
    ]
    two = [
        *(Variant(f"pp=2, {name}", OTHER_ORDER, pp=2, schedule=name) for name in NAMES),
        Variant("pp=2, dualpipe, no overlap", OTHER_ORDER, pp=2, schedule="dualpipe", overlap=False),
        Variant("dp=2", OTHER_ORDER, dp=2, schedule="1f1b"),
        Variant("ep=2", OTHER_ROWS, dp=2, ep=2, schedule="dualpipev"),
        Variant("ep=2, no overlap", OTHER_ROWS, dp=2, ep=2, schedule="1f1b", overlap=False),
        Variant("ep=2, shuffled sequences", OTHER_ROWS, dp=2, ep=2, schedule="dualpipev", neighbors=2),
        Variant("ep=2, recompute full", OTHER_ROWS, dp=2, ep=2, schedule="dualpipev", recompute="full"),
    ]
    four = [
        Variant("pp=4, dualpipe", OTHER_ORDER, pp=4, schedule="dualpipe"),
        Variant("pp=2 x ep=2, dualpipe", OTHER_ROWS, pp=2, dp=2, ep=2, schedule="dualpipe"),
        Variant("ep=4", OTHER_ROWS, dp=4, ep=4, schedule="dualpipev"),
    ]
    return one + two + four


def requested_variant(options: ParallelConfig, recompute: Recompute) -> Variant | None:
    """The layout that the options of train.py ask for; None if they ask for none."""
    if options == ParallelConfig() and recompute == "none":
        return None
    pp, ep = options.pp or 1, options.ep
    schedule = options.schedule if options.schedule != "auto" else ("dualpipev" if pp % 2 else "dualpipe")
    name = [f"pp={pp} x ep={ep}, {schedule}", *(["no overlap"] if not options.overlap else [])]
    name += [f"recompute {recompute}"] if recompute != "none" else []
    return Variant(
        ", ".join(name), OTHER_ROWS if ep > 1 else OTHER_ORDER, pp, ep, ep, schedule, options.num_chunks,
        options.overlap, recompute,
    )  # fmt: skip


def micro_batches_for(variants: list[Variant]) -> int:
    """A number of micro-batches of the reference's size that all variants can run."""
    multiple = lcm(*(2 * variant.dp for variant in variants))
    least = max(2 * variant.processes for variant in variants)
    return -(-least // multiple) * multiple
