"""A run with --profile: same losses, a recording of every rank, and a report."""

import dataclasses
import json

import pytest

from moe_dualpipe.overlap.labels import is_for_experts
from moe_dualpipe.tools.profiler import NAMES, read_trace
from moe_dualpipe.tools.profiler.host import host_as_device
from moe_dualpipe.tools.profiler.phases import Phases
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, losses, settings, train_each


@pytest.mark.long
def test_a_profile_reports_every_rank_and_does_not_change_the_run(tmp_path):
    model = dataclasses.replace(MODEL, num_layers=2)
    layout = {"pp": 1, "ep": 2, "batch_size": 8, "ep_backend": "all_to_all"}
    small = {"steps": 4, "seq_len": 16, "eval_sequences": 1, "model": model, **layout}
    plain, profiled = (
        settings(tmp_path / name, profile=steps, **small) for name, steps in (("plain", 0), ("profiled", 2))
    )
    runs = run_ranks(2, train_each, [plain, profiled])[0]
    assert losses(runs[1]) == losses(runs[0])
    assert not (tmp_path / "plain" / "profile").exists()
    folder = tmp_path / "profiled" / "profile"
    recordings = {f"rank{rank}.json.gz" for rank in (0, 1)}
    assert {path.name for path in folder.iterdir()} == {*recordings, "report.json"}
    report = json.loads((folder / "report.json").read_text())
    assert len(report["pipelines"]) == 2
    for pipeline in report["pipelines"]:
        assert pipeline["step"] in (3, 4)
        (account,) = pipeline["ranks_ms"]
        assert account["forward"] > 0 and account["backward"] > 0 and account["optimizer"] > 0
        assert account["rest"] >= 0
        assert pipeline["makespan_ms"] <= pipeline["ranks_ms"][0]["step"]
    # 1 layer with experts, 4 micro-batches, 2 steps; 4 transfers (2 in forward, 2 in backward) and one of the counts.
    for rank in (0, 1):
        trace = host_as_device(read_trace(folder / f"rank{rank}.json.gz"), NAMES)
        phases = Phases(trace)
        names = [phases.phase_of(event) for event in trace.device_events if NAMES.kind_of(event) == "comm"]
        assert {"attn(F)", "mlp(F)", "attn(B)", "optimizer"} <= {*map(phases.phase_of, trace.device_events)}
        assert sum(map(is_for_experts, names)) == 4 * 2 * (4 + 1)
