"""Annotations are in traces as those of record_function are, and cost little while nothing is recorded."""

import json

import pytest
import torch

from moe_dualpipe.overlap.annotation import annotation


def test_they_nest_in_a_trace_and_a_profile_may_end_inside(tmp_path):
    with torch.profiler.profile() as profile, annotation("outer"):
        with pytest.raises(ValueError, match="inside"), annotation("failed"):
            raise ValueError("inside")
        with annotation("after"):
            torch.ones(3)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    outer, failed, then = ((found[n]["ts"], found[n]["ts"] + found[n]["dur"]) for n in ("outer", "failed", "after"))
    assert outer[0] <= failed[0] <= failed[1] <= then[0] <= then[1] <= outer[1]
    recorder = torch.profiler.profile()
    recorder.start()
    with annotation("cut"):
        recorder.stop()
