"""The result of a check, as a value: facts, measurements and problems."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .facts import Facts
from .links import Exchange, LinkSpeed
from .verdicts import Problem


@dataclass(frozen=True, slots=True)
class Report:
    """world_size: the number of ranks that were expected. device: cpu or cuda. note: what was not measured, and why."""

    world_size: int
    device: str
    facts: Sequence[Facts]
    problems: Sequence[Problem]
    links: Sequence[LinkSpeed] = ()
    exchanges: Sequence[Exchange] = ()
    note: str = ""

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Memory in bytes, speeds in bytes per second, clocks in seconds ahead of rank 0's."""
        return {
            "world_size": self.world_size, "device": self.device, "passed": self.passed, "note": self.note,
            "problems": [asdict(problem) for problem in self.problems],
            "ranks": [facts.to_json() for facts in self.facts],
            "links": [asdict(link) for link in self.links],
            "all_to_all": [asdict(exchange) for exchange in self.exchanges],
        }  # fmt: skip
