"""Exported weights: what they hold, who can start from them, in whole or in part, and what is refused."""

import dataclasses
import json
import os
import random
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_dualpipe.checkpoint import (
    atomic_folder,
    check_weights,
    export_weights,
    find_checkpoint,
    load_model,
    load_weights,
    model_folder,
    open_model,
)
from moe_dualpipe.checkpoint.partial import group_names
from moe_dualpipe.checkpoint.tensor_folder import TensorFolder
from moe_dualpipe.checkpoint.weights import WEIGHTS_FILE, global_weights
from moe_dualpipe.cli import main
from moe_dualpipe.models import build_model
from tests.support.mutations import check_message
from tests.support.ranks import run_failing_ranks, run_ranks
from tests.support.runs import MODEL, losses, make_run, make_trainer, records, settings, train, train_and_listen
from tests.support.special_experts import AdapterExperts, named

BALANCED = dataclasses.replace(MODEL, router_bias=True, mtp_layers=1)
ADAPTED = dataclasses.replace(BALANCED, experts=named(AdapterExperts))
OWN = dataclasses.replace(MODEL, experts="tests.support.own_layers:ExpertList")
LAYERS = {"experts": OWN.experts}
FILES = ["checksums.json", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run of two pipeline ranks, and its exported weights."""
    base = tmp_path_factory.mktemp("weights")
    run_ranks(2, train, settings(base / "run", model=BALANCED, steps=3, eval_sequences=8))
    assert main(["export", str(base / "run"), "--out", str(base / "given")]) == 0
    return base


@pytest.fixture
def given(exported, tmp_path):
    """A copy of the exported weights, to damage."""
    return shutil.copytree(exported / "given", tmp_path / "given")


def state_of(model):
    return {f"model.{name}": tensor for name, tensor in global_weights(build_model(model)).items()}


# ---- Laws ----


def test_an_export_holds_exactly_the_weights_of_the_checkpoint(exported, tmp_path, capsys):
    expected = global_weights(load_model(find_checkpoint(str(exported / "run"))))
    found = load_file(exported / "given" / WEIGHTS_FILE)
    assert found.keys() == expected.keys() > {"layers.1.mlp.experts.gate_up.3", "mtp.0.join.weight"}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    fresh = state_of(BALANCED)["model.layers.1.mlp.experts.gate_up.3"]
    assert not torch.equal(found["layers.1.mlp.experts.gate_up.3"], fresh)
    assert main(["export", str(exported / "run"), "--out", str(tmp_path / "again")]) == 0
    count = sum(tensor.numel() for tensor in found.values())
    assert f": {count / 1e6:.2f} M parameters in fp32, " in capsys.readouterr().out
    assert all((tmp_path / "again" / name).read_bytes() == (exported / "given" / name).read_bytes() for name in FILES)


def test_a_flip_of_any_bit_of_any_file_is_refused_with_the_name_of_the_file(given):
    draw = random.Random(7)
    assert sorted(path.name for path in given.iterdir()) == FILES
    for path in given.iterdir():
        intact = path.read_bytes()
        for _ in range(100):
            bit = draw.randrange(8 * len(intact))
            path.write_bytes(intact[: bit // 8] + bytes([intact[bit // 8] ^ 1 << bit % 8]) + intact[bit // 8 + 1 :])
            with pytest.raises(ValueError, match=f"given is broken: .*{path.name}.*; export or copy it again$"):
                check_weights(given, BALANCED)
        path.write_bytes(intact)
    check_weights(given, BALANCED)


def test_only_requested_weights_are_read(exported, monkeypatch):
    read, read_tensor = [], TensorFolder.read
    monkeypatch.setattr(TensorFolder, "read", lambda self, name: read.append(name) or read_tensor(self, name))
    state = {"model.head.weight": torch.zeros(256, 32), "exp_avg.head.weight": torch.zeros(256, 32)}
    load_weights(exported / "given", state)
    assert read == ["head.weight"]
    assert state["model.head.weight"].any() and not state["exp_avg.head.weight"].any()


@pytest.mark.parametrize("ranks,changes", [(1, {}), (2, {"ep": 2, "zero": True})], ids=str)
@pytest.mark.quick("2-{'ep': 2, 'zero': True}")
def test_a_run_starts_from_exported_weights_with_the_same_validation_loss(exported, tmp_path, ranks, changes):
    out = tmp_path / "started"
    given = {"model": BALANCED, "weights": str(exported / "given"), "eval_sequences": 8}
    run_ranks(ranks, train, settings(out, steps=1, **given, **changes))
    ended = losses(records(exported / "run"), "validation_loss")[3]
    assert losses(records(out), "validation_loss")[0] == pytest.approx(ended, rel=1e-5)


def load_in_layouts(rank, configs):
    """What every layout loaded, and the weights of this rank."""
    trainers = [make_trainer(rank, config) for config in configs]
    states = [{n: t for n, t in trainer.state().items() if n.startswith("model.")} for trainer in trainers]
    # As arrays: the memory of a tensor would be shared with this process, which ends.
    return [
        (trainer.partial, {name: tensor.detach().numpy().copy() for name, tensor in state.items()})
        for trainer, state in zip(trainers, states, strict=True)
    ]


def test_every_layout_loads_in_part_and_lists_the_same(exported, tmp_path):
    options = {"model": ADAPTED, "weights": str(exported / "given"), "weights_partial": True}
    layouts = [{"ep": 2, "zero": True}, {"schedule": "dualpipe"}]
    configs = [settings(tmp_path / str(i), **options, **layout) for i, layout in enumerate(layouts)]
    expected = state_of(ADAPTED)
    own = load_weights(exported / "given", expected, partial=True)
    found = load_file(exported / "given" / WEIGHTS_FILE)
    assert own.loaded == sorted(found) and own.ignored == []
    assert {*own.missing} == {name.removeprefix("model.") for name in expected} - found.keys() != set()
    for ranks in zip(*run_ranks(2, load_in_layouts, configs), strict=True):
        whole = {}
        for partial, state in ranks:
            assert partial == own
            for name, array in state.items():
                assert (array == whole.setdefault(name, array)).all(), name  # replicas are equal
        assert {*whole} == {*expected}
        assert all((whole[name] == tensor.numpy()).all() for name, tensor in expected.items())


def test_weights_that_the_model_does_not_have_are_listed_and_not_used(exported):
    state = state_of(dataclasses.replace(BALANCED, num_layers=3))
    partial, found = load_weights(exported / "given", state, partial=True), load_file(exported / "given" / WEIGHTS_FILE)
    assert partial.missing == [] and "layers.3.mlp.experts.gate_up.0 (and 3 like it)" in str(partial).splitlines()[1]
    for name, tensor in found.items():
        assert (name in partial.ignored) == name.startswith("layers.3.")
        assert name not in partial.loaded or torch.equal(state[f"model.{name}"], tensor)


def test_all_folders_give_the_same_model_with_layers_that_must_be_named(tmp_path, capsys):
    run_ranks(1, train, settings(tmp_path / "run", model=OWN, steps=1, seq_len=16, eval_sequences=1))
    checkpoint = find_checkpoint(str(tmp_path / "run"))
    export_weights(checkpoint, tmp_path / "exported", **LAYERS)
    expected = load_model(checkpoint, **LAYERS).state_dict()
    options = ["--prompt", "def ", "--sample-tokens", "8", "--device", "cpu", "--experts", OWN.experts]
    for path in (tmp_path / "run", checkpoint, tmp_path / "exported"):
        model, tokenizer = open_model(str(path), LAYERS)
        assert str(tokenizer) == "bytes" and model.config.experts == OWN.experts
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        assert main(["generate", str(path), *options]) == 0
    assert len({*capsys.readouterr().out.split("def ")[1:]}) == 1
    with pytest.raises(ValueError, match=r"has custom experts, .*: if you trust this code, use --experts tests\.supp"):
        open_model(str(tmp_path / "exported"))
    with pytest.raises(ValueError, match=r"has experts 'tests.*', not 'other:Layer': use --experts tests.*List if you"):
        open_model(str(tmp_path / "exported"), {"experts": "other:Layer"})


def test_the_model_is_on_the_device_in_its_dtype(exported, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model, _ = open_model(str(exported / "given"), device="auto")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.float32)}
    with pytest.raises(ValueError, match="--device cuda: torch finds no GPU"):
        open_model(str(exported / "given"), device="cuda")


def test_low_rank_experts_start_from_a_trained_model(exported, tmp_path):
    """Their additions are zero at first, so the loss is that of the trained model."""
    options = {"weights": str(exported / "given"), "weights_partial": True, "eval_sequences": 8}
    (printed,) = run_ranks(1, train_and_listen, settings(tmp_path / "run", model=ADAPTED, steps=1, **options))
    assert f"of another model (experts was 'swiglu', now '{ADAPTED.experts}'): loaded " in printed
    assert (
        "\nnot in the file, start from their initial weights: layers.1.mlp.experts.adapters.0.0.weight (and" in printed
    )
    ended = losses(records(exported / "run"), "validation_loss")[3]
    assert losses(records(tmp_path / "run"), "validation_loss")[0] == pytest.approx(ended, rel=1e-6)


@pytest.mark.parametrize("names,expected", [
    (["norm.weight", "layers.0.up.2", "layers.10.up.3", "layers.2.up.2"], "layers.0.up.2 (and 2 like it), norm.weight"),
    (["up.1\n", "up.."], r"up.., up.1\n"), ([], ""),
    ([chr(97 + i) for i in range(23)], ", ".join(chr(97 + i) for i in range(20)) + ", and 3 more groups"),
], ids=["groups", "names from a stranger", "none", "many"])  # fmt: skip
def test_names_are_grouped(names, expected):
    assert group_names(names) == expected


# ---- All or nothing ----


def export_to_full_disk(_rank, run, out):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))  # bytes of a file
    return main(["export", str(run), "--out", str(out)])


def export_and_die(_rank, checkpoint, out, step):
    setattr(atomic_folder, step, lambda *_: os._exit(9))
    export_weights(checkpoint, out)


def test_a_failed_export_leaves_nothing_under_its_name(exported, tmp_path, monkeypatch, capsys):
    out, checkpoint = tmp_path / "out", find_checkpoint(str(exported / "run"))
    assert run_ranks(1, export_to_full_disk, exported / "run", out) == [2]
    assert not [*tmp_path.iterdir()]
    model = load_model(checkpoint)
    with torch.no_grad():
        dict(model.named_parameters())["layers.2.attention.out.weight"][3, 4] = torch.nan
    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "load_model", lambda *_, **__: model)
        assert main(["export", str(exported / "run"), "--out", str(out)]) == 2
    assert "layers.2.attention.out.weight holds a NaN or infinity: export an earlier" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
    for step in ("write_synced", "sync"):
        assert run_failing_ranks(1, export_and_die, checkpoint, out, step) == [""]
        assert {path.name for path in tmp_path.iterdir()} == {".out.unfinished", ".out.lock"}
    assert main(["export", str(exported / "run"), "--out", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and sorted(p.name for p in out.iterdir()) == FILES
    assert main(["export", str(exported / "run"), "--out", str(out)]) == 2
    assert "already exists: choose another folder" in capsys.readouterr().err


def load_from_own_folder(rank, folders):
    with pytest.raises(ValueError) as error:
        load_weights(folders[rank], {"model.head.weight": torch.zeros(256, 32)})
    return str(error.value).replace(str(folders[rank]), "FOLDER")


def test_ranks_with_different_exports_stop_and_a_weight_missing_on_one_fails_on_all(exported, tmp_path):
    run_ranks(1, train, settings(tmp_path / "run", model=BALANCED, steps=1))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "other")]) == 0
    errors = run_ranks(2, load_from_own_folder, [exported / "given", tmp_path / "other"])
    assert errors == ["the ranks found different weights at FOLDER: --weights needs a shared path, or equal copies"] * 2
    tensors = load_file(exported / "given" / WEIGHTS_FILE)
    del tensors["head.weight"]
    save_file(tensors, tmp_path / "other" / WEIGHTS_FILE)
    (tmp_path / "other" / "checksums.json").unlink()  # as of an older export
    errors = run_ranks(2, load_from_own_folder, [tmp_path / "other"] * 2)
    assert errors[0] == errors[1] and "FOLDER/model.safetensors has no head.weight: the model that was" in errors[0]


# ---- Refusals ----


def changed(given, **options):
    (given / "checksums.json").unlink()
    config = json.loads((given / "config.json").read_text())
    (given / "config.json").write_text(json.dumps({**config, **options}))


@pytest.mark.parametrize("damage,problem", [
    (lambda given: changed(given, router_bias=False), "holds another model: router_bias was False, now True"),
    (lambda given: changed(given, num_layers=4000), "holds another model: num_layers was 4000, now 4"),
    (lambda given: changed(given, model_type=None), "was not written by moe-dualpipe export"),
    (lambda given: changed(given, model_type="qwen3_moe"), "it has no num_hidden_layers"),
    (lambda given: (given / "config.json").unlink(), "is broken: config.json is missing; export or copy it again"),
    (lambda given: [path.unlink() for path in given.iterdir()], "must hold config.json and model.safetensors"),
    (lambda given: (given / "tokenizer.json").write_text('{"tokenizer": "ids", "vocab_size": 256}'),
     "was trained with another tokenizer: 256 token ids without a tokenizer"),
])  # fmt: skip
def test_what_a_run_cannot_start_from_is_one_line(given, tmp_path, damage, problem):
    damage(given)
    with pytest.raises(ValueError) as error:
        make_run(settings(tmp_path / "run", model=BALANCED, weights=str(given)))
    check_message(error.value)
    assert problem in str(error.value)


@pytest.mark.parametrize("options,message", [
    ({"num_layers": 4000}, "its 4,001 layers do not fit into the "), ({"num_layers": "4"}, "num_layers must be of"),
    ({"vocab_size": 128}, "has shape [256, 32], expected [128, 32]"), ({"expert_size": 2**16}, " do not fit into the "),
    ({"experts": "os:system"}, "has custom experts, 'os:system'"),
], ids=str)  # fmt: skip
def test_an_export_with_another_model_is_not_opened(given, options, message):
    changed(given, **options)
    with pytest.raises(ValueError) as error:
        open_model(str(given))
    check_message(error.value)
    assert message in str(error.value)


def test_a_damaged_export_is_not_opened(given):
    data = (given / WEIGHTS_FILE).read_bytes()
    (given / WEIGHTS_FILE).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"given is broken: model\.safetensors does not match its checksum; export or"):
        open_model(str(given))


def test_what_does_not_fit_in_part_is_an_error(given, tmp_path):
    with pytest.raises(ValueError, match=r": head.weight has shape \[256, 32\], expected \[256, 31\]$"):
        load_weights(given, {"model.head.weight": torch.zeros(256, 31)}, partial=True)
    (given / "checksums.json").unlink()
    save_file({"other.3": torch.zeros(2)}, given / WEIGHTS_FILE)
    nothing = r"has no weight of the model: it has other.3; the model has head.weight$"
    with pytest.raises(ValueError, match=nothing):
        load_weights(given, {"model.head.weight": torch.zeros(256, 32)}, partial=True)
    with pytest.raises(ValueError, match=r"^--weights-partial needs --weights, the folder to load from$"):
        make_run(settings(tmp_path / "run", weights_partial=True))
