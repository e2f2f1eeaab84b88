"""A cause of lost time in a trace, with its evidence, and what to change."""

from dataclasses import dataclass

KINDS = (
    "host-bound", "host-sync", "few-queues", "shared-stream", "imbalance", "slow-transfer", "starved-transfer",
    "starved-computation", "late-launch", "nothing-to-overlap", "exposed-pipeline",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause on one device. Texts may hold names from the trace: escape them. Times are in microseconds."""

    kind: str
    """One of KINDS."""
    title: str
    """A sentence: what happens."""
    evidence: tuple[str, ...]
    """Sentences with the numbers that show it."""
    remedy: str
    """A sentence: what to change."""
    place: str
    """The phase, module or kernel where it costs most."""
    start_us: float
    """The worst occurrence, from the start of the device's first event."""
    end_us: float
    cost_us: float
    """Time of the window that shows the cause."""
    gain_us: float | None = None
    """How much shorter the window would be without it, by a replay of the recorded dependencies. None: unknown."""
    gain_fraction: float | None = None
    """`gain_us` as a share of the window."""
    device: str = ""
