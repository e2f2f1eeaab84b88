"""What several benchmarks share: cases that take turns, and tables."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")


def take_turns(rounds: int, cases: dict[Case, Callable[[], Result]], warm_up: int = 0) -> dict[Case, list[Result]]:
    """Run each case once per round. Returns the results of each case by round, without those of the warm-up rounds."""
    results: dict[Case, list[Result]] = {name: [] for name in cases}
    for i in range(warm_up + rounds):
        for name, case in cases.items():
            result = case()
            if i >= warm_up:
                results[name].append(result)
    return results


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def quartiles(values: list[float], form: str) -> tuple[str, str]:
    """Format the median, and the range from the first quartile to the third: ("5", "4 to 7")."""
    low, middle, high = statistics.quantiles(values, method="inclusive")
    return f"{middle:{form}}", f"{low:{form}} to {high:{form}}"


def full_range(values: Sequence[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table. columns: their names, separated by " | "."""
    rule = f"|{'---|' * (columns.count(' | ') + 1)}"
    return "\n".join([f"| {columns} |", rule, *(f"| {' | '.join(cells)} |" for cells in rows)])
