"""What changed between two recordings: sentences that explain the difference of their steps, and tables."""

from collections.abc import Sequence

from ....messages import plural, printable
from ...drawing.tables import markdown
from ..categories import COMMUNICATION, COPY
from ..compare import Comparison, Difference, explaining
from ..doctor.verdict import Verdict
from ..kernel_names import short_name
from ..recordings import IDLE_TIME, LATE_LAUNCHES, NO_WORK, Recording, Sums, Work
from .overlap import percent

_NAMES = {
    COMMUNICATION: "exposed communication", COPY: "copies", IDLE_TIME: "idle",
    LATE_LAUNCHES: "idle, not launched yet",
}  # fmt: skip
_LEAST = 0.05  # of the difference of the steps, for a sentence
_SAME = 0.005  # steps that differ by a smaller share take the same time
_MOST_KERNELS, _LEAST_KERNEL = 2, 0.2  # kernels in a sentence, each with this share of its difference


def compare_text(comparison: Comparison) -> str:
    """Return what explains the difference, then tables of the work, the transfers and the causes."""
    sides = [_side(letter, one) for letter, one in zip("AB", (comparison.a, comparison.b), strict=True)]
    if not comparison.by_step:
        unknown = [letter for letter, one in zip("AB", (comparison.a, comparison.b), strict=True) if not one.per_step]
        sides.append(f"No steps are recorded in {' and '.join(unknown)}: whole recordings are compared.")
        if ratio := comparison.work_ratio:
            a, b = (sums.step_us for sums in comparison.sums)
            longer = f"the same work takes {b / a / ratio:.2f} times as long" if a else "-"
            sides.append(f"B runs the kernels of A {ratio:.2f} times: {longer}.")
    parts = ["\n".join([*sides, *map(printable, comparison.unlike)]), "\n".join(_explanation(comparison))]
    parts += [markdown(_work_rows(comparison))]
    if comparison.transfers:
        parts += [markdown(_transfer_rows(comparison)), _hidden(comparison)]
    return "\n\n".join([*parts, "\n".join(_causes(comparison))])


def _side(letter: str, one: Recording) -> str:
    kinds = "CPU" if one.on_cpu else printable(", ".join(one.gpus))
    steps = plural(one.steps, "step") if one.steps else "no steps"
    return f"{letter}: {printable(one.name)}: {plural(one.devices, 'device')}{f' ({kinds})' if kinds else ''}, {steps}"


def _explanation(comparison: Comparison) -> list[str]:
    """The difference of the steps, and the work that explains it, numbered."""
    (a, b), whole = (sums.step_us for sums in comparison.sums), comparison.difference_us
    what = "A step" if comparison.by_step else "The recording"
    share = abs(whole) / a if a else 0.0
    if share < _SAME:
        first = f"{what} takes the same time in A and B, within {_SAME:.1%}: {a:,.0f} us and {b:,.0f} us."
    else:
        first = f"{what} of B takes {_more(whole)} ({share:.1%}) than of A: {b:,.0f} us instead of {a:,.0f} us."
    because, against = explaining(comparison.parts, whole, _LEAST)
    if share < _SAME:
        because, against = [], [part for part in comparison.parts if abs(part.us) > _SAME * a]
    lines = [f"{number}. {_reason(comparison, part, whole)}" for number, part in enumerate(because, start=1)]
    if against:
        lines += ["Against it:" if because else "Inside of it, times moved:"]
        lines += [f"- {_reason(comparison, part, 0.0)}" for part in against]
    return [first, *lines]


def _more(us: float) -> str:
    return f"{abs(us):,.0f} us {'more' if us > 0 else 'less'}"


def _reason(comparison: Comparison, part: Difference, whole: float) -> str:
    share = f", {part.us / whole:.0%} of the difference" if whole else ""
    text = f"{_NAMES.get(part.name, part.name)}: {_more(part.us)}{share}."
    if part.name == IDLE_TIME:
        return text
    if part.name == LATE_LAUNCHES:
        return f"{text} In this time, the host had not launched the next work."
    if part.name == COMMUNICATION:
        a, b = comparison.sums
        hidden = f"{percent(_hidden_share(a))} of it is hidden in A, {percent(_hidden_share(b))} in B"
        return f"{text} All communication takes {a.comm_us:,.0f} us in A and {b.comm_us:,.0f} us in B; {hidden}."
    return " ".join([text, _counts(part, _noun(comparison)), *_kernels(comparison.kernels(part.name), part.us)])


def _noun(comparison: Comparison) -> str:
    return "operator" if comparison.a.on_cpu and comparison.b.on_cpu else "kernel"


def _counts(part: Difference, noun: str) -> str:
    """Whether there are more kernels, or each takes longer."""
    a, b, nouns = part.a, part.b, ("copy", "copies") if part.name == COPY else (noun, f"{noun}s")
    counts = f"{_number(b.count)} {nouns[_number(b.count) != '1']} instead of {_number(a.count)}"
    if not a.count or not b.count:
        return f"{counts}."
    ratio = (b.total_us / b.count) / (a.total_us / a.count) if a.total_us else 1.0
    each = f"each takes {ratio:.2f} times as long on average"
    if abs(a.count - b.count) < 0.005 * a.count:
        return f"As many {nouns[1]} ({_number(a.count)}), {each}."
    return f"{counts}, {each}."


def _kernels(kernels: Sequence[Difference], us: float) -> list[str]:
    """The kernels with the largest differences in the same direction. Those with one short name count as one."""
    merged: dict[str, Difference] = {}
    for one in kernels:
        name = short_name(one.name)
        known = merged.get(name, Difference(name, Work(), Work()))
        merged[name] = Difference(name, known.a + one.a, known.b + one.b)
    shown = [one for one in merged.values() if one.us * us > 0 and abs(one.us) >= _LEAST_KERNEL * abs(us)]
    shown = sorted(shown, key=lambda one: -abs(one.us))[:_MOST_KERNELS]
    if not shown:
        return []
    texts = []
    for one in shown:
        name = printable(one.name, 70)
        if not one.a.count or not one.b.count:
            texts.append(f"{name} ({'only in B' if one.b.count else 'only in A'}, {abs(one.us):,.0f} us)")
        else:
            texts.append(f"{name} ({one.a.step_us:,.0f} -> {one.b.step_us:,.0f} us)")
    return [f"Most of it: {', '.join(texts)}."]


def _number(count: float) -> str:
    """A count per step: "12", or "12.5" if it is not the same in every step."""
    return f"{count:,.0f}" if abs(count - round(count)) < 0.05 else f"{count:,.1f}"


def _work_rows(comparison: Comparison) -> list[list[str]]:
    a, b = comparison.sums
    unit = "us per step" if comparison.by_step else "us"
    rows = [[unit, "A", "B", "B - A", "change", f"{_noun(comparison)}s in A", "in B"]]
    rows.append(["step" if comparison.by_step else "recording", *_times(a.step_us, b.step_us), "", ""])
    last = (COPY, COMMUNICATION, *NO_WORK)
    ordered = sorted(comparison.parts, key=lambda one: (one.name in last, -max(one.a.step_us, one.b.step_us)))
    for part in ordered:
        counts = ["", ""] if part.name in NO_WORK else [_number(one.count) for one in (part.a, part.b)]
        name = f"- {_NAMES.get(part.name, part.name)}"
        rows.append([name, *_times(part.a.step_us, part.b.step_us), *counts])
    return rows


def _times(a: float, b: float) -> list[str]:
    change = "-" if a < 0.5 else f"{b / a - 1:+.1%}" if b < 10 * a else f"{b / a:,.0f} times"
    return [f"{a:,.0f}", f"{b:,.0f}", f"{b - a:+,.0f}", change]


def _transfer_rows(comparison: Comparison) -> list[list[str]]:
    rows = [["communication", "times in A", "in B", "us in A", "in B", "exposed in A", "in B"]]
    for kind in comparison.transfers:
        cells = [_number(kind.a.count), _number(kind.b.count)]
        for key in ("total_us", "step_us"):
            cells += [f"{getattr(one, key):,.0f}" for one in (kind.a, kind.b)]
        rows.append([short_name(kind.name), *cells])
    return rows


def _hidden_share(sums: Sums) -> float | None:
    return sums.hidden_us / sums.comm_us if sums.comm_us else None


def _hidden(comparison: Comparison) -> str:
    a, b = (percent(_hidden_share(sums)) for sums in comparison.sums)
    return f"Of the communication, {a} is hidden behind computation in A, and {b} in B."


def _causes(comparison: Comparison) -> list[str]:
    """The causes of lost time that are gone, new, or cost more or less."""
    found = comparison.verdicts
    lines = [f"Gone in B: {_cause(a)}." for a, _ in found["gone"] if a]
    lines += [f"New in B: {_cause(b)}." for _, b in found["new"] if b]
    for a, b in found["changed"]:
        if a and b:
            lines.append(f"Changed: {_cause(a)} in A, {percent(b.gain_fraction)} in B.")
    return lines or ["The causes of lost time are the same in both."]


def _cause(verdict: Verdict) -> str:
    gain = "" if verdict.gain_fraction is None else f", {verdict.gain_fraction:.1%} of the window"
    return f"{printable(verdict.title).removesuffix('.')} ({verdict.kind}{gain})"
