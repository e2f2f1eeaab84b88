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
    """`run(rng, folder)` attacks once, in an empty folder. It raises AssertionError if the promise does not hold.

    All random choices come from `rng`, so a seed repeats a try. tries: how often to attack.
    """

    name: str
    promise: str
    tries: int
    run: Callable[[random.Random, Path], None]


@dataclass(slots=True)
class Outcome:
    """The result of one attack, over all its tries. failures: the error of each try that failed, by its number."""

    attack: Attack
    tried: int = 0
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    unable: str = ""

    def __str__(self) -> str:
        """A row of a table, in markdown."""
        counts = f"{self.tried} | {self.tried - len(self.failures)} | {len(self.failures)}"
        shown = f"not run: {self.unable} | |" if self.unable else counts
        return f"| {self.attack.name} | {self.attack.promise} | {shown} | {self.seconds / 60:.1f} |"


def repeat(attack: Attack, seed: int, tries: range) -> Outcome:
    """Run `attack` for every number in `tries`. A try does not depend on the others."""
    outcome, start = Outcome(attack), time.monotonic()
    for number in tries:
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                attack.run(random.Random(f"{seed}/{attack.name}/{number}"), Path(folder))
        except UnableError as error:
            outcome.unable = str(error)
            break
        except Exception as error:
            outcome.failures[number] = f"{type(error).__name__}: {error}"
            print(f"{attack.name}, try {number} failed:\n{''.join(traceback.format_exception(error))}")
        outcome.tried += 1
    outcome.seconds = time.monotonic() - start
    return outcome
