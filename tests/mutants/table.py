"""Bugs to plant: one TOML file a room, each row a text in one source file and what a tired engineer writes instead.

    tests = ["tests/tools/planner"]            the tests of the room, which must notice

    [[mutant]]
    file = "moe_dualpipe/pipeline/peak_memory.py"
    old = "summing = max(sums)"                occurs once in the file
    new = "summing = 0"
    breaks = "the peak counts the buffer in which replicas sum gradients"
    first = "tests/pipeline/test_peak_memory.py"     optional: these tests run first; a bug they find ends the run early
    equivalent = "no input reaches it: ..."        optional: why no test can notice

A row that no longer fits its file is an error, never a skip: whoever changes the code changes the row.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug. `tests` are paths from the root of the repository, in the order in which they run."""

    room: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    equivalent: str | None = None

    def planted(self, root: Path = ROOT) -> str:
        """Return the file with the bug. Raises ValueError unless `old` occurs once, SyntaxError for invalid Python."""
        text = (root / self.file).read_text()
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"{self.room}.toml: {self.old!r} occurs {times} times in {self.file}, not once")
        changed = text.replace(self.old, self.new)
        compile(changed, self.file, "exec")
        return changed


def mutants(folder: Path = Path(__file__).parent) -> list[Mutant]:
    """The rows of all tables, in the order of their files' names."""
    return [mutant for path in sorted(folder.glob("*.toml")) for mutant in _room(path)]


def _room(path: Path) -> list[Mutant]:
    table = tomllib.loads(path.read_text())
    rows = []
    for row in table["mutant"]:
        first = [row.pop("first")] if "first" in row else []
        rows.append(Mutant(path.stem, tests=(*first, *table["tests"]), **row))
    return rows
