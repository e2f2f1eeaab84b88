"""What this project set out to reach on an H200, held against what a run of the GPU suite measured.

Each goal names its number, where in the results it stands, and what it takes. A number that was not measured is said to
be so: neither met nor missed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .overlap import REPLAY
from .shapes import GOAL, INDEX_BYTES

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """`measure` finds the number in the results, or None; it is met when at least `wanted` (at most, if `below`)."""

    title: str
    wanted: float
    unit: str
    measure: Callable[[Results], float | None]
    below: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """A line of the table of goals. status: met, missed, or not measured."""

    title: str
    wanted: str
    measured: str
    status: str


def at_goal_shape(results: Results) -> dict[str, Any]:
    """Contestants at the shape where the goals are set; empty if it was not measured."""
    for entry in results.get("experts", {}).get("shapes", []):
        if all(entry["shape"][name] == getattr(GOAL, name) for name in "TDFEK"):
            return entry["contestants"]
    return {}


def median(results: Results, contestant: str, part: str) -> float | None:
    return at_goal_shape(results).get(contestant, {}).get(part, {}).get("median")


def times_peer(peer: str, part: str) -> Callable[[Results], float | None]:
    """How many times as fast as a peer, by medians of the same run."""

    def measure(results: Results) -> float | None:
        ours, theirs = median(results, "triton", part), median(results, peer, part)
        return ours / theirs if ours and theirs else None

    return measure


def kept(results: Results) -> float | None:
    ours = at_goal_shape(results).get("triton", {})
    return ours.get("kept_bytes_per_token") if ours.get("status") == "timed" else None


def combine_share(results: Results) -> float | None:
    for entry in results.get("permute", {}).get("shapes", []):
        if all(entry["shape"][name] == getattr(GOAL, name) for name in "TDFEK"):
            share = entry["unpermute"]["triton"].get("share")
            return None if share is None else 100 * share
    return None


def hidden_share(results: Results) -> float | None:
    """Percent of DeepSeek's transfers that our order of the same layers hides."""
    record = results.get("overlap", {})
    found = record.get("runs", {}).get(REPLAY, {})
    if record.get("preset") != "deepseek-v3" or found.get("status") != "timed":
        return None
    return 100 * found["overlapped"]["hidden_fraction"]


def _goals() -> tuple[Goal, ...]:
    parts = {"forward": "forward", "both": "forward + backward"}
    rates = [
        Goal(f"{title}, TFLOP/s", wanted, "", lambda r, part=part: median(r, "triton", part))
        for (part, title), wanted in zip(parts.items(), (500, 480), strict=True)
    ]
    peers = [
        Goal(f"{title}, times {name}", 1.5, "x", times_peer(peer, part))
        for peer, name in (("liger", "Liger"), ("scattermoe", "ScatterMoE"))
        for part, title in parts.items()
    ]
    bound = GOAL.kept_bytes() + INDEX_BYTES * GOAL.K
    memory = Goal("kept for backward, bytes a token (2D + 4KF and indices)", bound, "", kept, below=True)
    combine = Goal("combine, share of a copy's rate", 85, "%", combine_share)
    return (*rates, *peers, memory, combine, Goal("DeepSeek's transfers, hidden share", 97, "%", hidden_share))


GOALS = _goals()


def judge(results: Results) -> list[Verdict]:
    """One verdict a goal, in order."""
    return [_verdict(goal, goal.measure(results)) for goal in GOALS]


def _verdict(goal: Goal, measured: float | None) -> Verdict:
    wanted = f"{'at most' if goal.below else 'at least'} {goal.wanted:,g}{goal.unit}"
    if measured is None:
        return Verdict(goal.title, wanted, "-", "not measured")
    reached = measured <= goal.wanted if goal.below else measured >= goal.wanted
    shown = f"{measured:,.2f}" if measured < 10 else f"{measured:,.0f}"
    return Verdict(goal.title, wanted, shown + goal.unit, "met" if reached else "missed")
