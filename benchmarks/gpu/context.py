"""What the sections of the GPU suite share: the device, the options, a deadline, and the rows of results.

Time on a rented GPU can end at any moment. Therefore results are written after each comparison, each section has a
deadline, and work that no longer fits is skipped and reported as skipped.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..common import table
from .measure import Case, Clock, Quartiles, error_summary, time_interleaved


@dataclass(frozen=True, slots=True)
class Operation:
    """One of the operations that `Context.compare` checks and times.

    run: does the work, and calls its argument at the end of each phase. work: the amount of each phase, by name.
    unit: of the rate, which is work per second; "us" for the time itself. fault: what is wrong with the result, ""
    if it is right; raises ImportError if a library is missing.
    """

    run: Case
    work: Mapping[str, float]
    unit: str
    fault: Callable[[], str] = str  # returns ""


def rates(operation: Operation, seconds: list[list[float]]) -> dict[str, Quartiles]:
    """The rate of each phase and, if there are several, of all together. seconds: by phase and repeat."""
    phases = dict(zip(operation.work, zip(operation.work.values(), seconds, strict=True), strict=True))
    if len(phases) > 1:
        phases["all phases"] = sum(operation.work.values()), [sum(call) for call in zip(*seconds, strict=True)]
    if operation.unit == "us":
        return {phase: Quartiles.of([1e6 * s for s in each]) for phase, (_, each) in phases.items()}
    return {phase: Quartiles.of([amount / s for s in each]) for phase, (amount, each) in phases.items()}


@dataclass(slots=True)
class Context:
    """One run of the suite. `results` becomes results.json; `section` is the name of the section that runs."""

    device: torch.device
    smoke: bool
    out: Path
    implementations: tuple[str, ...] = ()
    training_steps: int = 20
    section: str = ""
    deadline: float = math.inf
    results: dict[str, Any] = field(default_factory=lambda: {"sections": {}, "rows": []})

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on a GPU. fp32 in smoke mode, because Triton's interpreter computes bf16 incorrectly."""
        return torch.float32 if self.smoke else torch.bfloat16

    def seconds_left(self) -> float:
        """Seconds until the deadline of this section."""
        return self.deadline - time.monotonic()

    def log(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def add(self, what: str, name: str, phase: str = "", **found: Any) -> None:
        """Add a row. found: median, low, high, samples and unit; or status and reason."""
        row = {"section": self.section, "what": what, "name": name, "phase": phase, "status": "measured"} | found
        self.results["rows"].append(row)
        self.log(" | ".join(part for part in (what, name, phase, result_text(row)) if part))

    def compare(self, what: str, operations: Mapping[str, Operation], reference: str = "") -> None:
        """Check each operation, time those that are right in turns, and add a row for each of their phases.

        reference: the operation of one phase whose rate the others are divided by, for their `share`.
        """
        right: dict[str, Case] = {}
        for name, operation in operations.items():
            try:
                fault = operation.fault()
            except ImportError as error:
                self.add(what, name, status="not installed", reason=error_summary(error))
            except Exception as error:  # an operation that fails must not end the run
                self.add(what, name, status="failed", reason=error_summary(error))
            else:
                if fault:
                    self.add(what, name, status="wrong", reason=fault)
                else:
                    right[name] = operation.run
        rounds, repeats = (1, 1) if self.smoke else (3, 7)
        seconds, failures = time_interleaved(Clock(self.device), right, rounds, repeats)
        for name, reason in failures.items():
            self.add(what, name, status="failed", reason=reason)
        found = {name: rates(operations[name], phases) for name, phases in seconds.items()}
        (base,) = found[reference].values() if reference in found else (None,)
        for name, phases in found.items():
            for phase, rate in phases.items():
                share = {"share": rate.median / base.median} if base and name != reference else {}
                self.add(what, name, phase, unit=operations[name].unit, **asdict(rate), **share)
        self.save()

    def save(self, with_table: bool = False) -> None:
        """Write results.json atomically; with_table: also results.md."""
        path = self.out / "results.json"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(self.results, indent=1) + "\n")
        os.replace(temporary, path)
        if with_table:
            path.with_suffix(".md").write_text(markdown(self.results))

    def load(self) -> None:
        """Read what another process has saved."""
        self.results = json.loads((self.out / "results.json").read_text())


def result_text(row: Mapping[str, Any]) -> str:
    """Examples: "788 TFLOP/s (780 to 791), 95% of the reference"; "not installed: No module named 'liger_kernel'"."""
    if "median" not in row:
        return f"{row['status']}: {row['reason']}"
    text = f"{number(row['median'])} {row['unit']}"
    if "low" in row:
        text += f" ({number(row['low'])} to {number(row['high'])})"
    return f"{text}, {row['share']:.0%} of the reference" if "share" in row else text


def number(value: float) -> str:
    """Format with at least three significant digits. Example: 4321.6 is "4,322"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(results: Mapping[str, Any]) -> str:
    """Format all rows as one table per section, and the sections that did not finish."""
    about = results["about"]
    parts = [f"# GPU benchmarks: {about['device']}", "\n".join(f"- {key}: {value}" for key, value in about.items())]
    for name, section in results["sections"].items():
        parts.append(f"## {name.capitalize()}\n\n{section['status']}{section['reason'] and ': '}{section['reason']}")
        rows = [row for row in results["rows"] if row["section"] == name]
        lines = [(row["what"], row["name"], row["phase"], result_text(row)) for row in rows]
        if lines:
            parts.append(table("what | program | phase | median (quartiles)", lines))
    return "\n\n".join(parts) + "\n"
