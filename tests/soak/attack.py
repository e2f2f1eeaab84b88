"""An attack: something that goes wrong at random, and what the project promises for that case."""

import random
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


class UnableError(Exception):
    """This machine cannot run an attack, for example because it needs root."""


@dataclass(frozen=True, slots=True)
class Attack:
    """Each of `runs` attacks once: `run(rng, folder)`. It raises AssertionError if the promise does not hold.

    folder: an empty folder of this try. All random choices come from `rng`, so a seed repeats a try. tries: how often
    to attack, with the runs in turn.
    """

    name: str
    promise: str
    tries: int
    runs: tuple[Callable[[random.Random, Path], None], ...]


@dataclass(slots=True)
class Outcome:
    """The result of one attack, over all its tries."""

    attack: Attack
    tried: int = 0
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    """The number of each try that failed, with the error."""
    unable: str = ""

    @property
    def held(self) -> int:
        return self.tried - len(self.failures)


def repeat(attack: Attack, seed: int, tries: range, report: Callable[[str], object] = print) -> Outcome:
    """Run `attack` for every number in `tries`. A try does not depend on the others."""
    outcome, start = Outcome(attack), time.monotonic()
    for number in tries:
        rng = random.Random(f"{seed}/{attack.name}/{number}")
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                attack.runs[number % len(attack.runs)](rng, Path(folder))
        except UnableError as error:
            outcome.unable = str(error)
            break
        except Exception as error:
            outcome.failures[number] = f"{type(error).__name__}: {error}"
            report(f"{attack.name}, try {number} failed:\n{''.join(traceback.format_exception(error))}")
        outcome.tried += 1
    outcome.seconds = time.monotonic() - start
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """One row for each attack, in markdown."""
    lines = ["| attack | promise | tried | held | failed | minutes |", "|---|---|---|---|---|---|"]
    for one in outcomes:
        attack = one.attack
        counts = f"{one.tried} | {one.held} | {len(one.failures)}" if not one.unable else f"not run: {one.unable} | |"
        lines.append(f"| {attack.name} | {attack.promise} | {counts} | {one.seconds / 60:.1f} |")
    return "\n".join(lines)
