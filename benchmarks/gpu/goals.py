"""The project's performance goals on an H200, compared with the results of a run of the GPU suite.

Each goal has a title, a target and a function that finds the measured value in the results. A value that was not
measured is reported as "not measured": the goal is neither met nor missed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .overlap import REPLAY_RUN
from .shapes import GOAL_SHAPE, INDEX_BYTES
from .transfers import GOAL_SIZES, GOAL_SMS

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """`measured` returns the value from the results, or None. The target is a minimum, or a maximum if `at_most`."""

    title: str
    target: float
    unit: str
    measured: Callable[[Results], float | None]
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class GoalResult:
    """One row of the table of goals, as text. status: "met", "missed" or "not measured"."""

    title: str
    target: str
    measured: str
    status: str


def entry_at_goal_shape(results: Results, section: str) -> dict[str, Any]:
    """Return the section's entry for GOAL_SHAPE; empty if it was not measured."""
    for entry in results.get(section, {}).get("shapes", []):
        if all(entry["shape"][name] == getattr(GOAL_SHAPE, name) for name in "TDFEK"):
            return entry
    return {}


def outcome_of(results: Results, implementation: str) -> dict[str, Any]:
    return entry_at_goal_shape(results, "experts").get("contestants", {}).get(implementation, {})


def median_rate(results: Results, implementation: str, phase: str) -> float | None:
    return outcome_of(results, implementation).get(phase, {}).get("median")


def speedup_over(other: str, phase: str) -> Callable[[Results], float | None]:
    """Return a function that computes our speedup over `other`, from medians of the same run."""

    def measured(results: Results) -> float | None:
        ours, theirs = median_rate(results, "triton", phase), median_rate(results, other, phase)
        return ours / theirs if ours and theirs else None

    return measured


def saved_bytes(results: Results) -> float | None:
    ours = outcome_of(results, "triton")
    return ours.get("kept_bytes_per_token") if ours.get("status") == "timed" else None


def combine_share(results: Results) -> float | None:
    """Rate of unpermute in percent of a device copy's rate."""
    share = entry_at_goal_shape(results, "permute").get("unpermute", {}).get("triton", {}).get("share")
    return None if share is None else 100 * share


def dispatch_share(results: Results) -> float | None:
    """Best rate of a one-sided dispatch on at most GOAL_SMS multiprocessors, in percent of a device copy's rate."""
    record = results.get("transfers", {})
    if record.get("sizes") != GOAL_SIZES._asdict():
        return None
    timed = [o["share"] for n, o in record["dispatch"].items() if int(n) <= GOAL_SMS and o["status"] == "timed"]
    return 100 * max(timed) if timed else None


def hidden_share(results: Results) -> float | None:
    """Percent of the time of DeepSeek's transfers that is hidden behind our computation of the same layers."""
    record = results.get("overlap", {})
    run = record.get("runs", {}).get(REPLAY_RUN, {})
    if record.get("preset") != "deepseek-v3" or run.get("status") != "timed":
        return None
    return 100 * run["overlapped"]["hidden_fraction"]


def _goals() -> tuple[Goal, ...]:
    phases = {"forward": "forward", "both": "forward + backward"}
    rates = [
        Goal(f"{title}, TFLOP/s", target, "", lambda r, phase=phase: median_rate(r, "triton", phase))
        for (phase, title), target in zip(phases.items(), (500, 480), strict=True)
    ]
    speedups = [
        Goal(f"{title}, times {name}", 1.5, "x", speedup_over(other, phase))
        for other, name in (("liger", "Liger"), ("scattermoe", "ScatterMoE"))
        for phase, title in phases.items()
    ]
    bound = GOAL_SHAPE.saved_bytes() + INDEX_BYTES * GOAL_SHAPE.K
    memory = Goal("saved for backward, bytes per token (2D + 4KF and indices)", bound, "", saved_bytes, at_most=True)
    combine = Goal("combine, share of a copy's rate", 85, "%", combine_share)
    dispatch = Goal(f"one-sided dispatch on up to {GOAL_SMS} SMs, share of a copy's rate", 85, "%", dispatch_share)
    hidden = Goal("DeepSeek's transfers, hidden share", 97, "%", hidden_share)
    return (*rates, *speedups, memory, combine, dispatch, hidden)


GOALS = _goals()


def evaluate_goals(results: Results) -> list[GoalResult]:
    """Compare each goal with the results, in the order of GOALS."""
    return [_goal_result(goal, goal.measured(results)) for goal in GOALS]


def _goal_result(goal: Goal, measured: float | None) -> GoalResult:
    target = f"{'at most' if goal.at_most else 'at least'} {goal.target:,g}{goal.unit}"
    if measured is None:
        return GoalResult(goal.title, target, "-", "not measured")
    met = measured <= goal.target if goal.at_most else measured >= goal.target
    text = f"{measured:,.2f}" if measured < 10 else f"{measured:,.0f}"
    return GoalResult(goal.title, target, text + goal.unit, "met" if met else "missed")
