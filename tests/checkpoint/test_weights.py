"""Runs that start from the weights of another run: who can, in whole or in part, and what is refused."""

import dataclasses
import shutil

import pytest
import torch

from moe_dualpipe.checkpoint import check_weights, find_checkpoint, find_weights, load_model, load_weights, open_model
from moe_dualpipe.checkpoint.weights import global_weights, group_names
from moe_dualpipe.models import build_model
from tests.support.checkpoints import tensors_of, write_tensors_of
from tests.support.mutations import check_message
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, make_run, make_trainer, settings, train
from tests.support.special_experts import AdapterExperts, named

BALANCED = dataclasses.replace(MODEL, router_bias=True, mtp_layers=1)
ADAPTED = dataclasses.replace(BALANCED, experts=named(AdapterExperts))
OWN = dataclasses.replace(MODEL, experts="tests.support.own_layers:ExpertList")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two pipeline ranks."""
    folder = tmp_path_factory.mktemp("weights") / "run"
    run_ranks(2, train, settings(folder, model=BALANCED, steps=3, eval_sequences=8))
    return folder


@pytest.fixture
def checkpoint(run, tmp_path):
    """A copy of its checkpoint, to damage."""
    return shutil.copytree(find_checkpoint(str(run)), tmp_path / "step-000003")


def state_of(model):
    return {f"model.{name}": tensor for name, tensor in global_weights(build_model(model)).items()}


def saved_weights(run):
    return {name.removeprefix("model."): t for name, t in tensors_of(run).items() if name.startswith("model.")}


# ---- Laws ----


def load_in_layouts(rank, configs):
    """What every layout loaded, and the weights of this rank."""
    trainers = [make_trainer(rank, config) for config in configs]
    states = [{n: t for n, t in trainer.state().items() if n.startswith("model.")} for trainer in trainers]
    # As arrays: the memory of a tensor would be shared with this process, which ends.
    return [
        (trainer.partial, {name: tensor.detach().numpy().copy() for name, tensor in state.items()})
        for trainer, state in zip(trainers, states, strict=True)
    ]


def test_every_layout_loads_in_part_and_lists_the_same(run, tmp_path):
    options = {"model": ADAPTED, "weights": str(run), "weights_partial": True}
    layouts = [{"ep": 2, "zero": True}, {"schedule": "dualpipe"}]
    configs = [settings(tmp_path / str(i), **options, **layout) for i, layout in enumerate(layouts)]
    expected, found = state_of(ADAPTED), saved_weights(run)
    own = load_weights(find_weights(str(run)), expected, partial=True)
    assert own.loaded == sorted(found) and own.ignored == []
    assert {*own.missing} == {name.removeprefix("model.") for name in expected} - found.keys() != set()
    assert all(torch.equal(expected[f"model.{name}"], tensor) for name, tensor in found.items())
    for ranks in zip(*run_ranks(2, load_in_layouts, configs), strict=True):
        whole = {}
        for partial, state in ranks:
            assert partial == own
            for name, array in state.items():
                assert (array == whole.setdefault(name, array)).all(), name  # replicas are equal
        assert {*whole} == {*expected}
        assert all((whole[name] == tensor.numpy()).all() for name, tensor in expected.items())


def test_weights_that_the_model_does_not_have_are_listed_and_not_used(run):
    state, found = state_of(dataclasses.replace(BALANCED, num_layers=3)), saved_weights(run)
    partial = load_weights(find_weights(str(run)), state, partial=True)
    assert partial.missing == [] and "layers.3.mlp.experts.gate_up.0 (and 3 like it)" in str(partial).splitlines()[1]
    for name, tensor in found.items():
        assert (name in partial.ignored) == name.startswith("layers.3.")
        assert name not in partial.loaded or torch.equal(state[f"model.{name}"], tensor)


@pytest.mark.parametrize("names,expected", [
    (["norm.weight", "layers.0.up.2", "layers.10.up.3", "layers.2.up.2"], "layers.0.up.2 (and 2 like it), norm.weight"),
    (["up.1\n", "up.."], r"up.., up.1\n"), ([], ""),
    ([chr(97 + i) for i in range(23)], ", ".join(chr(97 + i) for i in range(20)) + ", and 3 more groups"),
], ids=["groups", "names from a stranger", "none", "many"])  # fmt: skip
def test_names_are_grouped(names, expected):
    assert group_names(names) == expected


def test_a_run_and_its_checkpoint_give_the_same_model_with_layers_that_must_be_named(tmp_path):
    run_ranks(1, train, settings(tmp_path / "run", model=OWN, steps=1, seq_len=16, eval_sequences=1))
    checkpoint = find_checkpoint(str(tmp_path / "run"))
    expected = load_model(checkpoint, experts=OWN.experts).state_dict()
    for path in (tmp_path / "run", checkpoint):
        model, tokenizer = open_model(str(path), {"experts": OWN.experts})
        assert str(tokenizer) == "bytes" and model.config.experts == OWN.experts
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match=r"has custom experts .*: if you trust this code, use --experts tests\.supp"):
        open_model(str(checkpoint))
    with pytest.raises(
        ValueError, match=r"has custom experts 'tests.*', not 'other:Layer': if you trust .* --experts tests"
    ):
        open_model(str(checkpoint), {"experts": "other:Layer"})


# ---- Refusals ----


def test_a_folder_without_any_weight_of_the_model_is_refused(tmp_path):
    write_tensors_of(tmp_path / "other", {"model.head.weight": torch.ones(256, 32)}, BALANCED)
    for state, problem in (
        ({"model.head.weight": torch.zeros(256, 31)}, r": head.weight has shape \[256, 32\], expected \[256, 31\]$"),
        ({"model.x": torch.zeros(1)}, r"has no weight of the model: it has head.weight; the model has x$"),
    ):
        with pytest.raises(ValueError, match=problem):
            load_weights(tmp_path / "other", state, partial=True)


@pytest.mark.parametrize("model,problem", [
    ({"num_layers": 4000}, "its 4,001 layers of 4 experts and 2 heads do not fit into the "),
    ({"num_layers": "4"}, "num_layers must be a whole number"), ({"num_experts": 3000}, "layers of 3,000 experts and "),
    ({"vocab_size": 128}, "has shape [256, 32], expected [128, 32]"), ({"expert_size": 2**16}, " do not fit into the "),
    ({"experts": "os:system"}, "has custom experts 'os:system'"),
], ids=str)  # fmt: skip
def test_a_checkpoint_with_another_model_is_not_opened(run, tmp_path, model, problem):
    state = {f"model.{name}": tensor for name, tensor in saved_weights(run).items()}
    write_tensors_of(tmp_path / "forged", state, BALANCED, **model)
    with pytest.raises(ValueError) as error:
        open_model(str(tmp_path / "forged"))
    check_message(error.value)
    assert problem in str(error.value)


@pytest.mark.parametrize("damage,problem", [
    (lambda folder: (folder / "rank-0-0.safetensors").unlink(), "is broken: cannot read rank-0-0.safetensors: "),
    (lambda folder: (folder / "run.json").unlink(), "is broken: cannot read run.json: No such file"),
    (lambda folder: [(folder / "run.json").unlink(), (folder / "config.json").write_text("{}")],
     "is neither a run nor a published model: convert what an earlier version exported with examples/"),
    (lambda folder: (folder / "config.json").write_text('{"model_type": "qwen3_moe"}'), "it has no vocab_size"),
])  # fmt: skip
def test_what_a_run_cannot_start_from_is_one_line(checkpoint, tmp_path, damage, problem):
    damage(checkpoint)
    with pytest.raises(ValueError, match=problem) as error:
        make_run(settings(tmp_path / "run", model=BALANCED, weights=str(checkpoint)))
    check_message(error.value)


def test_options_of_a_start_that_do_not_fit(checkpoint):
    with pytest.raises(ValueError, match="router_bias was True, now False; --weights-partial loads"):
        check_weights(checkpoint, dataclasses.replace(BALANCED, router_bias=False))
