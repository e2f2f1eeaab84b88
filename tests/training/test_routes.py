"""Recorded routes: replayed, a run has its own losses bit for bit; and they are those of any layout and program."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_dualpipe
from moe_dualpipe.checkpoint.routes import RecordedRoutes
from moe_dualpipe.cli import main
from moe_dualpipe.models import MoE
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, change, losses, make_trainer, settings, train, train_each, without_clocks

GROUPS = dataclasses.replace(
    MODEL, num_layers=3, num_experts=8, experts_per_token=3, router_bias=True, router_score="sigmoid", z_loss=0.01,
    expert_groups=4, top_groups=2,
)  # fmt: skip
RUN = {"model": GROUPS, "steps": 2, "seq_len": 16, "batch_size": 8, "document_mask": True, "bias_rate": 0.05}
OTHER = {"pp": 1, "ep": 2, "micro_batch_size": 2, "recompute": "attention"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The routes of a run on two ranks under DualPipe."""
    folder = tmp_path_factory.mktemp("recorded")
    run_ranks(2, train, settings(folder / "run", record_routes=str(folder / "routes"), **RUN))
    return folder / "routes"


def test_a_run_that_replays_its_own_routes_has_its_losses_bit_for_bit(tmp_path, recorded):
    plain = settings(tmp_path / "plain", **RUN)
    same = change(plain, out=str(tmp_path / "same"), replay_routes=str(recorded), recompute="full")
    other = change(same, out=str(tmp_path / "other"), **OTHER)
    expected, found, run = run_ranks(2, train_each, [plain, same, other])[0]
    assert without_clocks(found) == without_clocks(expected)
    # The routes are the same, and products and sums round otherwise.
    assert losses(run) == pytest.approx(losses(expected), rel=1e-5)
    assert losses(run, "expert_load_max_over_mean") == losses(expected, "expert_load_max_over_mean")


def other_routes(folder, tmp_path):
    """The routes of all samples in one file: other experts, but for the second half of each sequence."""
    routes, tensors = RecordedRoutes(folder), {}
    for layer, rows in routes.rows.items():
        experts_NSK = (routes.read(layer, sorted(rows), 16, 3, 8) + 1) % 8
        experts_NSK[:, 8:] = -1
        tensors[f"layers.{layer}.experts"] = experts_NSK[:, :12].to(torch.int16)
        tensors[f"layers.{layer}.samples"] = torch.tensor(sorted(rows))
    save_file(tensors, tmp_path / "other.safetensors")
    return tmp_path / "other.safetensors"


def replayed_step(rank, config):
    """Whether each layer of this rank has the routes that are known, and chooses the others itself."""
    trainer = make_trainer(rank, config)
    trainer.step(0)
    own = [i for stage in trainer.stages.values() for i in stage.modules() if isinstance(i, MoE)]
    for layer in own:
        given, taken = layer.replayed_RSK, layer.recorded_RSK
        here = (taken >= 0).flatten(1).any(1)
        assert here.any() and (given[:, 8:] == -1).all()
        assert torch.equal(given[here, :8], taken[here, :8]) and (taken[here, 8:] >= 0).all()
    return len(own)


def test_other_routes_are_taken_where_they_are_known(tmp_path, recorded):
    config = settings(tmp_path / "run", replay_routes=str(other_routes(recorded, tmp_path)), **RUN)
    config = change(config, record_routes=str(tmp_path / "again"), recompute="full")
    assert run_ranks(2, replayed_step, config) == [2, 2]  # under DualPipe, each rank has all layers


def test_generate_records_what_the_router_chooses_for_the_text(tmp_path, capsys):
    folder, file = tmp_path / "run", tmp_path / "texts.safetensors"
    run_ranks(1, train, settings(folder, steps=1, model=dataclasses.replace(MODEL, num_layers=3)))
    written = ["--prompt", "def ", "--sample-tokens", "5", "--num", "3", "--record-routes", str(file)]
    assert main(["generate", str(folder), *written]) == 0
    found = load_file(file)
    assert {name: (tensor.dtype, [*tensor.shape]) for name, tensor in found.items()} == {
        f"layers.{layer}.{name}": shape
        for layer in (1, 2)
        for name, shape in (("experts", (torch.int16, [3, 8, 2])), ("samples", (torch.int64, [3])))
    }  # fmt: skip
    assert found["layers.1.samples"].tolist() == [0, 1, 2]
    assert (found["layers.1.experts"][0, :4] == found["layers.1.experts"][2, :4]).all()  # of the same prompt
    assert main(["generate", str(folder), *written, "--seq-len", "8"]) == 2
    assert "--record-routes needs --seq-len 9 or more, for the whole text: got 8" in capsys.readouterr().err


@pytest.mark.parametrize("changes,problem", [
    ({"steps": 3}, "routes has no routes of sample 16 in layer 1"),
    ({"replay_routes": "nowhere/routes"}, "cannot read routes from nowhere/routes: No such file"),
    ({"replay_routes": "{}"}, "has no routes: name a folder that record_routes wrote"),
    ({"seq_len": 12}, r"the routes of layer 1 are \[16, 3\] with experts up to 7, not \[at most 12, 3\] with experts"),
    ({"model": dataclasses.replace(GROUPS, router="balanced", z_loss=0.0)}, "replay_routes needs --router topk: got"),
    ({"record_routes": "s3://bucket/routes"}, "record_routes s3://bucket/routes must be a local folder"),
], ids=str)  # fmt: skip
def test_routes_that_do_not_fit_are_one_line(tmp_path, recorded, changes, problem):
    changes = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in changes.items()}
    config = settings(tmp_path / "new", **{**RUN, "replay_routes": str(recorded), **changes})
    with pytest.raises(ValueError, match=problem):
        moe_dualpipe.train(config, verbose=False)
