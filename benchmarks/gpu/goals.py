"""What this project set out to reach on an H200, held against what a run of the GPU suite measured.

Each goal names its number, where in the results it stands, and what it takes. A number that was not measured is said to
be so: neither met nor missed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .overlap import REPLAY_RUN
from .shapes import GOAL_SHAPE, INDEX_BYTES

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """`measure` finds the number in the results, or None; it is met when at least `wanted` (at most, if `below`)."""

    title: str
    target: float
    unit: str
    measure: Callable[[Results], float | None]
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class GoalResult:
    """A line of the table of goals. status: met, missed, or not measured."""

    title: str
    target: str
    measured: str
    status: str


def outcomes_at_goal_shape(results: Results) -> dict[str, Any]:
    """Contestants at the shape where the goals are set; empty if it was not measured."""
    for entry in results.get("experts", {}).get("shapes", []):
        if all(entry["shape"][name] == getattr(GOAL_SHAPE, name) for name in "TDFEK"):
            return entry["contestants"]
    return {}


def median_rate(results: Results, implementation: str, part: str) -> float | None:
    return outcomes_at_goal_shape(results).get(implementation, {}).get(part, {}).get("median")


def speedup_over(peer: str, part: str) -> Callable[[Results], float | None]:
    """How many times as fast as a peer, by medians of the same run."""

    def measure(results: Results) -> float | None:
        ours, theirs = median_rate(results, "triton", part), median_rate(results, peer, part)
        return ours / theirs if ours and theirs else None

    return measure


def saved_bytes(results: Results) -> float | None:
    ours = outcomes_at_goal_shape(results).get("triton", {})
    return ours.get("kept_bytes_per_token") if ours.get("status") == "timed" else None


def combine_share(results: Results) -> float | None:
    for entry in results.get("permute", {}).get("shapes", []):
        if all(entry["shape"][name] == getattr(GOAL_SHAPE, name) for name in "TDFEK"):
            share = entry["unpermute"]["triton"].get("share")
            return None if share is None else 100 * share
    return None


def hidden_share(results: Results) -> float | None:
    """Percent of DeepSeek's transfers that our order of the same layers hides."""
    record = results.get("overlap", {})
    found = record.get("runs", {}).get(REPLAY_RUN, {})
    if record.get("preset") != "deepseek-v3" or found.get("status") != "timed":
        return None
    return 100 * found["overlapped"]["hidden_fraction"]


def _goals() -> tuple[Goal, ...]:
    parts = {"forward": "forward", "both": "forward + backward"}
    rates = [
        Goal(f"{title}, TFLOP/s", target, "", lambda r, part=part: median_rate(r, "triton", part))
        for (part, title), target in zip(parts.items(), (500, 480), strict=True)
    ]
    peers = [
        Goal(f"{title}, times {name}", 1.5, "x", speedup_over(peer, part))
        for peer, name in (("liger", "Liger"), ("scattermoe", "ScatterMoE"))
        for part, title in parts.items()
    ]
    bound = GOAL_SHAPE.saved_bytes() + INDEX_BYTES * GOAL_SHAPE.K
    memory = Goal("kept for backward, bytes a token (2D + 4KF and indices)", bound, "", saved_bytes, at_most=True)
    combine = Goal("combine, share of a copy's rate", 85, "%", combine_share)
    return (*rates, *peers, memory, combine, Goal("DeepSeek's transfers, hidden share", 97, "%", hidden_share))


GOALS = _goals()


def evaluate_goals(results: Results) -> list[GoalResult]:
    """One verdict a goal, in order."""
    return [_goal_result(goal, goal.measure(results)) for goal in GOALS]


def _goal_result(goal: Goal, measured: float | None) -> GoalResult:
    target = f"{'at most' if goal.at_most else 'at least'} {goal.target:,g}{goal.unit}"
    if measured is None:
        return GoalResult(goal.title, target, "-", "not measured")
    reached = measured <= goal.target if goal.at_most else measured >= goal.target
    shown = f"{measured:,.2f}" if measured < 10 else f"{measured:,.0f}"
    return GoalResult(goal.title, target, shown + goal.unit, "met" if reached else "missed")
