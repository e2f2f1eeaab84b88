"""Causes as sentences."""

from moe_dualpipe.tools.profiler.doctor.verdict import Verdict
from moe_dualpipe.tools.profiler.reports.verdicts import HEALTHY, verdicts_text


def verdict(**changes):
    fields = {
        "kind": "host-sync", "title": "The host waits.", "evidence": ("It waited twice.",), "remedy": "Read it later.",
        "place": "item in attn(F)", "start_us": 0.0, "end_us": 1.0, "cost_us": 1234.5,
    }  # fmt: skip
    return Verdict(**(fields | changes))


def test_a_cause_has_its_place_its_evidence_its_gain_and_what_to_change():
    known, unknown = verdict(gain_us=1000.4, gain_fraction=0.1), verdict(place="")
    assert verdicts_text([known, unknown]) == (
        "1. The host waits (host-sync). Most of it: item in attn(F).\n   It waited twice.\n"
        "   Without it, the window would be 1,000 us (10.0%) shorter. Read it later.\n"
        "2. The host waits (host-sync).\n   It waited twice.\n"
        "   It costs 1,234 us; the gain cannot be predicted. Read it later."
    )


def test_many_causes_and_none():
    assert verdicts_text([verdict()] * 9).endswith("\n1 smaller cause not shown.")
    assert "8. " in verdicts_text([verdict()] * 8) and "not shown" not in verdicts_text([verdict()] * 8)
    assert verdicts_text([]) == HEALTHY


def test_names_stay_on_their_line():
    assert "\n2" not in verdicts_text([verdict(place="a\n2. another cause", evidence=("b\n2",))])


def test_a_part_of_a_long_trace_is_searched():
    text = "Causes were searched only in the first 300,000 of 300,001 events of the device.\n"
    assert verdicts_text([], 300_001) == text + HEALTHY and verdicts_text([], 300_000) == HEALTHY
    assert verdicts_text([verdict()], 300_001).startswith(text + "1. ")
