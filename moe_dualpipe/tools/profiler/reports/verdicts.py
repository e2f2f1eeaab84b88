"""The causes of lost time as plain sentences, and what they do not explain."""

from ....messages import plural, printable
from ..analyze import Analysis
from ..doctor.verdict import Verdict
from ..doctor.view import MOST_EVENTS

MOST_VERDICTS = 8
LEAST_SHARE = 0.01
"""Less is not called lost."""
HEALTHY = "All that is not computation at full speed takes less than 1% of the window, or has the causes above."


def verdicts_text(analysis: Analysis) -> str:
    """Return a numbered list: what happens and where, the evidence, the predicted gain, and what to change.

    If the device has more events than are searched, it says so.
    """
    parts, num_events = [], analysis.num_events
    if num_events > MOST_EVENTS:
        parts.append(f"Causes were searched only in the first {MOST_EVENTS:,} of {num_events:,} events of the device.")
    verdicts = analysis.verdicts
    parts += [_verdict_text(number, verdict) for number, verdict in enumerate(verdicts[:MOST_VERDICTS], start=1)]
    if rest := len(verdicts) - MOST_VERDICTS:
        parts += [f"{plural(rest, 'smaller cause')} not shown."] * (rest > 0)
    return "\n".join([*parts, _unexplained(analysis)])


def _unexplained(analysis: Analysis) -> str:
    """What no cause explains, with its three largest places."""
    left, whole = sum(total.us for total in analysis.unexplained), analysis.window_us
    if left < LEAST_SHARE * whole:
        return HEALTHY
    places = [
        f"{total.kind}, {printable(total.detail, 80)} ({total.us / whole:.1%})" for total in analysis.unexplained[:3]
    ]
    return f"Not explained: {left:,.0f} us ({left / whole:.1%} of the window). Most of it: {'; '.join(places)}."


def _verdict_text(number: int, verdict: Verdict) -> str:
    place = f" Most of it: {printable(verdict.place, 80)}." if verdict.place else ""
    lines = [f"{number}. {printable(verdict.title).removesuffix('.')} ({printable(verdict.kind)}).{place}"]
    lines += [printable(sentence, 400) for sentence in (*verdict.evidence, f"{_gain(verdict)} {verdict.remedy}")]
    return "\n   ".join(lines)


def _gain(verdict: Verdict) -> str:
    explained = f"It explains {verdict.share:.1%} of the window."
    if verdict.gain_us is None or verdict.gain_fraction is None:
        return f"{explained} The gain cannot be predicted."
    return (
        f"{explained} Without it, the window would be {verdict.gain_us:,.0f} us ({verdict.gain_fraction:.1%}) shorter."
    )
