"""A run with --profile: same losses, a recording of every rank, and a report."""

import dataclasses
import gzip
import json

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler import analyze, read_trace
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, SHALLOW, losses, make_run, make_trainer, settings, train, train_each


@pytest.mark.parametrize("ranks,changes", [
    (2, {"schedule": "1f1b"}), (2, {"pp": 1, "ep": 2, "batch_size": 8, "ep_backend": "all_to_all"}),
])  # fmt: skip
@pytest.mark.long
def test_a_profile_reports_every_rank_and_does_not_change_the_run(tmp_path, ranks, changes):
    model = dataclasses.replace(MODEL, num_layers=2)
    small = {"steps": 4, "seq_len": 16, "eval_sequences": 1, "model": model, **changes}
    plain, profiled = (
        settings(tmp_path / name, profile=steps, **small) for name, steps in (("plain", 0), ("profiled", 2))
    )
    runs = run_ranks(ranks, train_each, [plain, profiled])[0]
    assert losses(runs[1]) == losses(runs[0])
    assert not (tmp_path / "plain" / "profile").exists()
    folder = tmp_path / "profiled" / "profile"
    recordings = {f"rank{rank}.json.gz" for rank in range(ranks)}
    assert {path.name for path in folder.iterdir()} == {*recordings, "report.json"}
    report = json.loads((folder / "report.json").read_text())
    pp, dp = changes.get("pp", ranks), 2 if "ep" in changes else 1
    assert len(report["pipelines"]) == dp
    assert [one["rank"] for one in report["overlap"]] == list(range(ranks))
    for pipeline in report["pipelines"]:
        assert pipeline["step"] in (3, 4)
        assert len(pipeline["ranks_ms"]) == pp
        for account in pipeline["ranks_ms"]:
            assert account["forward"] > 0 and account["backward"] > 0 and account["optimizer"] > 0
            assert account["rest"] >= 0
        assert pipeline["makespan_ms"] <= pipeline["ranks_ms"][0]["step"]
    for rank in range(ranks):
        (analysis,) = analyze(read_trace(folder / f"rank{rank}.json.gz"))
        assert {"attn(F)", "mlp(F)", "attn(B)", "optimizer"} <= {phase.name for phase in analysis.phases}
    # 1 layer with experts, 4 micro-batches, 2 steps; 4 transfers (2 in forward, 2 in backward) and one of the counts.
    transfers = 4 * 2 * (4 + 1) if "ep" in changes else 0
    assert [one["num_comm"] for one in report["overlap"]] == [transfers] * ranks


def collectives(path):
    """The calls of collectives in a trace, and what ran of them, without those of two peers."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in sorted(events, key=lambda event: event.get("ts", 0)) if event["ph"] == "X"]
    return [
        [n for n in names if n.startswith(kind) and "send" not in n and "recv" not in n] for kind in ("c10d::", "gloo:")
    ]


@pytest.mark.parametrize("changes", [
    {}, {"pp": 1, "check_replicas_every": None}, {"schedule": "1f1b"},
    {"pp": 1, "ep": 2, "ep_backend": "all_to_all", "save_every": 1},
], ids=str)  # fmt: skip
@pytest.mark.quick("{}")
def test_all_ranks_record_the_same_collectives_between_two_barriers(tmp_path, changes, capfd):
    """New weights, which are sent in the background, and a checkpoint would otherwise be in only one of the traces."""
    small = {"model": SHALLOW, "seq_len": 16, "batch_size": 8, "eval_sequences": 1, "eval_every": 1, **changes}
    run_ranks(2, train, settings(tmp_path, steps=5, profile=2, **small))
    traces = [tmp_path / "profile" / f"rank{rank}.json.gz" for rank in range(2)]
    (calls, ran), (other_calls, other_ran) = map(collectives, traces)
    assert calls == other_calls and sorted(ran) == sorted(other_ran)
    assert len(calls) == len(ran) > 2
    assert [calls[0], calls[-1], ran[0], ran[-1]] == ["c10d::barrier"] * 2 + ["gloo:barrier"] * 2
    assert main(["profile", "analyze", *map(str, traces)]) == 0
    assert "Not compared" not in capfd.readouterr().out


def profile_error(rank, config):
    try:
        make_trainer(rank, config)
    except ValueError as error:
        return str(error)
    return None


def test_a_profile_needs_enough_steps(tmp_path):
    errors = run_ranks(2, profile_error, settings(tmp_path / "run", profile=5))
    assert errors == ["--profile 5 needs 7 steps, including 2 to warm up, but the run has 6: use --steps 7"] * 2
    assert run_ranks(1, profile_error, settings(tmp_path / "run", profile=4)) == [None]
    with pytest.raises(ValueError, match="--profile must be at least 0: got -1"):
        make_run(["--out", str(tmp_path), "--profile", "-1"])
