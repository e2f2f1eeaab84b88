"""Annotations are in traces as those of record_function are, and cost little while nothing is recorded."""

import json

import pytest
import torch

from moe_dualpipe.overlap.annotation import annotation


def annotate_and_fail():
    with annotation("outer"):
        with pytest.raises(ValueError, match="inside"), annotation("failed"):
            raise ValueError("inside")
        with annotation("after"):
            torch.ones(3)


def test_they_are_user_annotations_and_nest(tmp_path):
    with torch.profiler.profile() as profile:
        annotate_and_fail()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    assert {*found} >= {"outer", "failed", "after"}
    outer, failed, then = ((found[n]["ts"], found[n]["ts"] + found[n]["dur"]) for n in ("outer", "failed", "after"))
    assert outer[0] <= failed[0] <= failed[1] <= then[0] <= then[1] <= outer[1]


def test_a_profile_may_begin_and_end_inside():
    with annotation("before"), torch.profiler.profile() as profile, annotation("recorded"):
        pass
    recorder = torch.profiler.profile()
    recorder.start()
    with annotation("cut"):
        recorder.stop()
    assert [event.name for event in profile.events() or ()] == ["recorded"]
