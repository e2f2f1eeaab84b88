"""What changed between two recordings: the difference of their steps, and the account that explains it."""

from ....messages import plural, printable
from ...drawing.tables import markdown
from ..account import KINDS
from ..compare import Comparison, Recording
from .overlap import percent

_SAME = 0.005  # steps that differ by a smaller share take the same time
_MOST_DETAILS = 12


def compare_text(comparison: Comparison) -> str:
    """Return the difference of the steps, the account of both, and the largest differences in it."""
    both = {"A": comparison.a, "B": comparison.b}
    heads = [_side(letter, one) for letter, one in both.items()]
    if not comparison.by_step:
        unknown = [letter for letter, one in both.items() if not one.steps]
        heads.append(f"No steps are recorded in {' and '.join(unknown)}: whole recordings are compared.")
    parts = ["\n".join(heads), _difference(comparison)]
    parts += [markdown(_account_rows(comparison)), markdown(_detail_rows(comparison))]
    a, b = (one.hidden_fraction for one in both.values())
    if a is not None or b is not None:
        parts.append(f"Of the communication, {percent(a)} is hidden behind computation in A, and {percent(b)} in B.")
    return "\n\n".join(parts)


def _side(letter: str, one: Recording) -> str:
    kinds = "CPU" if one.analyses[0].device == "cpu" else printable(", ".join(one.gpus))
    devices = plural(len(one.analyses), "device") + (f" ({kinds})" if kinds else "")
    return f"{letter}: {printable(one.name)}: {devices}, {plural(one.steps, 'step') if one.steps else 'no steps'}"


def _difference(comparison: Comparison) -> str:
    (a, b), whole = comparison.times_us, comparison.difference_us
    what = "A step" if comparison.by_step else "The recording"
    share = abs(whole) / a if a else 0.0
    if share < _SAME:
        return f"{what} takes the same time in A and B, within {_SAME:.1%}: {a:,.0f} us and {b:,.0f} us."
    more = f"{abs(whole):,.0f} us {'more' if whole > 0 else 'less'}"
    return f"{what} of B takes {more} ({share:.1%}) than of A: {b:,.0f} us instead of {a:,.0f} us."


def _account_rows(comparison: Comparison) -> list[list[str]]:
    """The kinds, which add up to the step."""
    rows = [["us per step" if comparison.by_step else "us", "A", "B", "B - A", "change"]]
    rows.append(["step" if comparison.by_step else "recording", *_times(*comparison.times_us)])
    for kind in KINDS:
        sums = [sum(us[side] for key, us in comparison.account.items() if key[0] == kind) for side in (0, 1)]
        if max(sums) >= 0.5:
            rows.append([f"- {kind}", *_times(*sums)])
    return rows


def _detail_rows(comparison: Comparison) -> list[list[str]]:
    """The largest differences, and what is left, so that they add up, too."""
    found = [*comparison.account.items()]
    rows = [["the largest differences", "A", "B", "B - A", "change"]]
    for (kind, detail), us in found[:_MOST_DETAILS]:
        rows.append([printable(", ".join(filter(None, (kind, detail))), 80), *_times(*us)])
    if rest := [us for _, us in found[_MOST_DETAILS:]]:
        rows.append([f"{len(rest)} more", *_times(*map(sum, zip(*rest, strict=True)))])
    return rows


def _times(a: float, b: float) -> list[str]:
    change = "-" if a < 0.5 else f"{b / a - 1:+.1%}" if b < 10 * a else f"{b / a:,.0f} times"
    return [f"{a:,.0f}", f"{b:,.0f}", f"{b - a:+,.0f}", change]
