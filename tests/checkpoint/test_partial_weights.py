"""--weights-partial: what fits is loaded, the rest starts from its initial values, and both are listed."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_dualpipe.checkpoint import export_weights, find_checkpoint, load_weights
from moe_dualpipe.checkpoint.partial import group_names
from moe_dualpipe.checkpoint.weights import WEIGHTS_FILE, global_weights
from moe_dualpipe.models import build_model
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, losses, make_run, make_trainer, records, settings, train, train_and_listen
from tests.support.special_experts import AdapterExperts, named

ADAPTED = dataclasses.replace(MODEL, experts=named(AdapterExperts))
ADAPTERS = "layers.1-3.mlp.experts.adapters.0-3.0-1.weight (24 tensors)"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run, and its exported weights in `given`."""
    base = tmp_path_factory.mktemp("weights")
    run_ranks(1, train, settings(base / "run", model=MODEL, steps=1))
    export_weights(find_checkpoint(str(base / "run")), base / "given")
    return base


def state_of(model):
    return {f"model.{name}": tensor for name, tensor in global_weights(model).items()}


def load_in_layouts(rank, configs):
    """What every layout loaded, and the weights of this rank."""
    trainers = [make_trainer(rank, config) for config in configs]
    states = [{n: t for n, t in trainer.state().items() if n.startswith("model.")} for trainer in trainers]
    # As arrays: the memory of a tensor would be shared with this process, which ends.
    return [
        (trainer.partial, {name: tensor.detach().numpy().copy() for name, tensor in state.items()})
        for trainer, state in zip(trainers, states, strict=True)
    ]


def test_every_layout_loads_and_lists_the_same(exported, tmp_path):
    options = {"model": ADAPTED, "weights": str(exported / "given"), "weights_partial": True}
    layouts = [{"ep": 2, "zero": True}, {"schedule": "dualpipe"}]
    configs = [settings(tmp_path / str(i), **options, **layout) for i, layout in enumerate(layouts)]
    expected = state_of(build_model(ADAPTED))
    own = load_in_part_alone(exported / "given", expected)
    loaded = load_file(exported / "given" / WEIGHTS_FILE)
    assert own.loaded == sorted(loaded) and own.ignored == []
    for ranks in zip(*run_ranks(2, load_in_layouts, configs), strict=True):
        whole = {}
        for partial, state in ranks:
            assert partial == own
            for name, array in state.items():
                assert (array == whole.setdefault(name, array)).all(), name  # replicas are equal
        assert {*whole} == {*expected}
        for name, tensor in expected.items():
            assert (whole[name] == tensor.numpy()).all(), name


def load_in_part_alone(folder, state):
    """Load in this process, compare the names with those of `state`, and return them."""
    partial = load_weights(folder, state, partial=True)
    assert {*partial.loaded, *partial.missing} == {name.removeprefix("model.") for name in state}
    return partial


def test_low_rank_experts_start_from_a_trained_model(exported, tmp_path):
    """Their additions are zero at first, so the loss is that of the trained model."""
    config = settings(
        tmp_path / "run", model=ADAPTED, steps=1, weights=str(exported / "given"), weights_partial=True
    )  # fmt: skip
    (printed,) = run_ranks(1, train_and_listen, config)
    assert f"of another model (experts was 'swiglu', now '{ADAPTED.experts}'): loaded " in printed
    assert f"\nnot in the file, start from their initial weights: {ADAPTERS}\n" in printed
    assert "in the file, but not" not in printed
    ended = losses(records(exported / "run"), "validation_loss")[1]
    assert losses(records(tmp_path / "run"), "validation_loss")[0] == pytest.approx(ended, rel=1e-6)


def test_weights_that_the_model_does_not_have_are_listed(exported):
    shallow = dataclasses.replace(MODEL, num_layers=3)
    state = state_of(build_model(shallow))
    before = {name: tensor.clone() for name, tensor in state.items()}
    partial = load_in_part_alone(exported / "given", state)
    assert partial.missing == []
    assert "layers.3.mlp.experts.gate_up.0-3 (4 tensors)" in str(partial).splitlines()[1]
    assert not torch.equal(state["model.head.weight"], before["model.head.weight"])
    for name, tensor in load_file(exported / "given" / WEIGHTS_FILE).items():
        assert (name in partial.ignored) == name.startswith("layers.3.")
        if name in partial.loaded:
            assert torch.equal(state[f"model.{name}"], tensor)


def test_what_does_not_fit_is_an_error(exported, tmp_path):
    given = exported / "given"
    with pytest.raises(ValueError, match=r": head.weight has shape \[256, 32\], expected \[256, 31\]$"):
        load_weights(given, {"model.head.weight": torch.zeros(256, 31)}, partial=True)
    save_file({"other.3": torch.zeros(2)}, tmp_path / WEIGHTS_FILE)
    nothing = r"has no weight of the model: it has other.3 \(1 tensor\); the model has head.weight \(1 tensor\)$"
    with pytest.raises(ValueError, match=nothing):
        load_weights(tmp_path, {"model.head.weight": torch.zeros(256, 32)}, partial=True)
    with pytest.raises(ValueError, match=r"^--weights-partial needs --weights, the folder to load from$"):
        make_run(settings(tmp_path / "run", weights_partial=True))
    with pytest.raises(ValueError, match=r"another model: experts was .*; --weights-partial loads the weights that b"):
        make_run(settings(tmp_path / "run", weights=str(given), model=ADAPTED))


@pytest.mark.parametrize("names,expected", [
    (["norm.weight", "layers.0.up.2", "layers.0.up.3", "layers.2.up.2", "layers.2.up.3"],
     "layers.0,2.up.2-3 (4 tensors), norm.weight (1 tensor)"),
    (["up.8-11", "up.0-3", "up.4-7", "up.12"], "up.0-12 (4 tensors)"),
    (["up.*", "up.9999999999", "up.1\n", "up.."], r"up.* (1 tensor), up.. (1 tensor), up.1\n (1 tensor), "
     "up.9999999999 (1 tensor)"),
    ([], ""),
    ([f"a{i:02}" for i in range(23)], ", ".join(f"a{i:02} (1 tensor)" for i in range(20)) + ", and 3 more groups"),
], ids=["ranges", "shared by experts", "names from a stranger", "none", "many"])  # fmt: skip
def test_names_are_grouped(names, expected):
    assert group_names(names) == expected
