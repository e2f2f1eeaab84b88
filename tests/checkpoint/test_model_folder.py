"""`open_model` finds the model in the folder of a run, of a checkpoint, or of an export."""

import dataclasses
import json

import pytest
import torch

from moe_dualpipe.checkpoint import export_weights, find_checkpoint, load_model, open_model
from moe_dualpipe.cli import main
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, settings, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("open_model")
    model = dataclasses.replace(MODEL, router_bias=True, experts="tests.support.own_layers:ExpertList")
    run_ranks(1, train, settings(folder / "run", model=model, steps=1, seq_len=16, eval_sequences=1))
    checkpoint = find_checkpoint(str(folder / "run"))
    export_weights(checkpoint, folder / "exported", experts=model.experts)
    return folder


LAYERS = {"experts": "tests.support.own_layers:ExpertList"}


def test_all_folders_give_the_same_model(run):
    checkpoint = find_checkpoint(str(run / "run"))
    expected = load_model(checkpoint, **LAYERS).state_dict()
    for path in (run / "run", checkpoint, run / "exported"):
        model, tokenizer = open_model(str(path), LAYERS)
        assert str(tokenizer) == "bytes"
        assert model.config.experts == LAYERS["experts"]
        found = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_generate_reads_exported_folders(run, capsys):
    for path in ("run", "exported"):
        options = ["--prompt", "def ", "--sample-tokens", "8", "--device", "cpu", "--experts", LAYERS["experts"]]
        assert main(["generate", str(run / path), *options]) == 0
    first, second = capsys.readouterr().out.split("def ")[1:]
    assert first == second


def changed(run, tmp_path, **changes):
    """An export without checksums, with another config.json."""
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((run / "exported" / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return str(tmp_path)


@pytest.mark.parametrize("changes,message", [
    ({"model_type": "gpt2"}, "is a published model, without layers of your own: leave out --experts"),
    ({"num_layers": 4000}, "cannot build the model of"),
    ({"num_layers": "4"}, "num_layers must be of type int: got '4'"),
    ({"vocab_size": 128}, "has shape [256, 32], expected [128, 32]"),
    ({"experts": "os:system"}, "has experts 'os:system', not 'tests.support.own_layers:ExpertList'"),
], ids=str)  # fmt: skip
def test_an_export_with_another_model_is_an_error(run, tmp_path, changes, message):
    with pytest.raises(ValueError) as error:
        open_model(changed(run, tmp_path, **changes), LAYERS)
    assert message in str(error.value)


def test_an_export_needs_its_own_layers_to_be_named(run):
    with pytest.raises(
        ValueError, match=r"has custom experts, .*: if you trust this code, use --experts tests\.support"
    ):
        open_model(str(run / "exported"))
    with pytest.raises(ValueError, match="no checkpoint in"):
        open_model(str(run))


def test_the_model_is_on_the_device_in_its_dtype(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model, _ = open_model(str(run / "exported"), LAYERS, "auto")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.float32)}
    with pytest.raises(ValueError, match="--device cuda: torch finds no GPU"):
        open_model(str(run / "exported"), LAYERS, "cuda")
