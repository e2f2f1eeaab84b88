"""Compare two recordings: how the time of a step changed, and which work explains the difference.

All work of a step and its idle time add up to the step, so the differences of the categories add up to the difference
of the steps. If a recording has no steps, whole recordings are compared.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .recordings import Recording, Sums, Work, transfers_of


@dataclass(frozen=True, slots=True)
class Difference:
    """Work of one category, kind or kernel in both recordings."""

    name: str
    a: Work
    b: Work

    @property
    def us(self) -> float:
        """How much more of the step it takes in B."""
        return self.b.step_us - self.a.step_us

    def as_object(self) -> dict[str, Any]:
        return {"name": self.name, "a": asdict(self.a), "b": asdict(self.b), "difference_us": self.us}


@dataclass(frozen=True)
class Comparison:
    """Two recordings. Numbers are per step if `by_step`, otherwise of the whole recordings."""

    a: Recording
    b: Recording

    @property
    def by_step(self) -> bool:
        return self.a.per_step is not None and self.b.per_step is not None

    @property
    def sums(self) -> tuple[Sums, Sums]:
        if self.a.per_step is not None and self.b.per_step is not None:
            return self.a.per_step, self.b.per_step
        return self.a.whole, self.b.whole

    @property
    def difference_us(self) -> float:
        """How much longer the step of B is."""
        a, b = self.sums
        return b.step_us - a.step_us

    @property
    def parts(self) -> list[Difference]:
        """The categories, with exposed communication, copies and idle times: the largest difference first."""
        a, b = (sums.by_category() for sums in self.sums)
        return _differences(a, b)

    @property
    def transfers(self) -> list[Difference]:
        """The kinds of transfers."""
        a, b = (transfers_of(sums) for sums in self.sums)
        return sorted(_differences(a, b), key=lambda one: -max(one.a.total_us, one.b.total_us))

    def kernels(self, category: str) -> list[Difference]:
        """The kernels of a category, the largest difference first."""
        a, b = ({name: work for (own, name), work in sums.work.items() if own == category} for sums in self.sums)
        return _differences(a, b)

    @property
    def unlike(self) -> list[str]:
        """Sentences about what was not recorded alike."""
        a, b = self.a, self.b
        found = []
        if a.gpus and b.gpus and a.gpus != b.gpus:
            found.append(f"Different GPUs: {', '.join(a.gpus)} in A, {', '.join(b.gpus)} in B.")
        if a.devices != b.devices:
            found.append(f"A has {a.devices} and B has {b.devices} devices: all numbers are means over devices.")
        if a.world_size and b.world_size and a.world_size != b.world_size:
            found.append(f"The job of A has {a.world_size:,} ranks, that of B {b.world_size:,}.")
        return found

    def as_object(self) -> dict[str, Any]:
        """A JSON object."""
        sides = {}
        for key, recording, sums in zip("ab", (self.a, self.b), self.sums, strict=True):
            sides[key] = {
                "name": recording.name, "devices": recording.devices, "gpus": list(recording.gpus),
                "world_size": recording.world_size, "steps": recording.steps, "step_us": sums.step_us,
                "comm_us": sums.comm_us, "hidden_kernels_us": sums.hidden_us,
            }  # fmt: skip
        return {
            "by_step": self.by_step, **sides, "difference_us": self.difference_us, "unlike": self.unlike,
            "parts": [{**part.as_object(), "kernels": [one.as_object() for one in self.kernels(part.name)]}
                      for part in self.parts],
            "transfers": [kind.as_object() for kind in self.transfers],
        }  # fmt: skip


def _differences(a: Mapping[str, Work], b: Mapping[str, Work]) -> list[Difference]:
    found = [Difference(name, a.get(name, Work()), b.get(name, Work())) for name in {**a, **b}]
    found = [one for one in found if (one.a, one.b) != (Work(), Work())]
    return sorted(found, key=lambda one: (-abs(one.us), one.name))
