"""The causes of lost time as plain sentences."""

from collections.abc import Sequence

from ....messages import plural, printable
from ..doctor.verdict import Verdict
from ..doctor.view import MOST_EVENTS

MOST_VERDICTS = 8
HEALTHY = "None of the known causes costs more than 1% of the window."


def verdicts_text(verdicts: Sequence[Verdict], num_events: int = 0) -> str:
    """Return a numbered list: what happens and where, the evidence, the predicted gain, and what to change.

    num_events: of the device. If these are more than are searched, it says so.
    """
    parts = []
    if num_events > MOST_EVENTS:
        parts.append(f"Causes were searched only in the first {MOST_EVENTS:,} of {num_events:,} events of the device.")
    if not verdicts:
        return "\n".join([*parts, HEALTHY])
    parts += [_verdict_text(number, verdict) for number, verdict in enumerate(verdicts[:MOST_VERDICTS], start=1)]
    if rest := len(verdicts) - MOST_VERDICTS:
        parts += [f"{plural(rest, 'smaller cause')} not shown."] * (rest > 0)
    return "\n".join(parts)


def _verdict_text(number: int, verdict: Verdict) -> str:
    place = f" Most of it: {printable(verdict.place, 80)}." if verdict.place else ""
    lines = [f"{number}. {printable(verdict.title).removesuffix('.')} ({printable(verdict.kind)}).{place}"]
    lines += [printable(sentence, 400) for sentence in (*verdict.evidence, f"{_gain(verdict)} {verdict.remedy}")]
    return "\n   ".join(lines)


def _gain(verdict: Verdict) -> str:
    if verdict.gain_us is None or verdict.gain_fraction is None:
        return f"It costs {verdict.cost_us:,.0f} us; the gain cannot be predicted."
    return f"Without it, the window would be {verdict.gain_us:,.0f} us ({verdict.gain_fraction:.1%}) shorter."
