"""Exported weights: their contents, starting a run from them, and errors if they do not fit."""

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
)
from moe_dualpipe.checkpoint.tensor_folder import TensorFolder
from moe_dualpipe.checkpoint.weights import global_weights
from moe_dualpipe.cli import main
from moe_dualpipe.models import build_model
from tests.support.ranks import run_failing_ranks, run_ranks
from tests.support.runs import MODEL, losses, make_run, make_trainer, records, settings, train

BALANCED = dataclasses.replace(MODEL, router_bias=True, mtp_layers=1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run of two pipeline ranks, and its exported weights."""
    base = tmp_path_factory.mktemp("weights")
    run_ranks(2, train, settings(base / "run", model=BALANCED, steps=3, eval_sequences=8))
    assert main(["export", str(base / "run"), "--out", str(base / "given")]) == 0
    return base


def test_an_export_holds_exactly_the_weights_of_the_checkpoint(exported, capsys):
    model = load_model(find_checkpoint(str(exported / "run")))
    expected = {name: tensor.shape for name, tensor in global_weights(model).items()}
    given = load_file(exported / "given" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in given.items()} == expected
    assert {"layers.1.mlp.experts.gate_up.3", "layers.1.mlp.router.bias_E", "mtp.0.join.weight"} <= set(given)
    fresh = global_weights(build_model(BALANCED))
    assert not torch.equal(given["layers.1.mlp.experts.gate_up.3"], fresh["layers.1.mlp.experts.gate_up.3"])
    assert main(["export", str(exported / "run"), "--out", str(exported / "again")]) == 0
    count = sum(tensor.numel() for tensor in given.values())
    assert f": {count / 1e6:.2f} M parameters in fp32, " in capsys.readouterr().out
    assert (exported / "again" / "config.json").read_text() == (exported / "given" / "config.json").read_text()


def test_weights_that_are_not_finite_are_refused_by_name(exported, tmp_path, monkeypatch, capsys):
    model = load_model(find_checkpoint(str(exported / "run")))
    with torch.no_grad():
        dict(model.named_parameters())["layers.2.attention.out.weight"][3, 4] = torch.nan
    monkeypatch.setattr(model_folder, "load_model", lambda *_, **__: model)
    assert main(["export", str(exported / "run"), "--out", str(tmp_path / "out")]) == 2
    assert "layers.2.attention.out.weight holds a NaN or infinity: export an earlier" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("ranks,changes", [(1, {}), (2, {"ep": 2, "zero": True})], ids=str)
@pytest.mark.quick("2-{'ep': 2, 'zero': True}")
def test_a_run_starts_from_exported_weights_with_the_same_validation_loss(exported, tmp_path, ranks, changes):
    out = tmp_path / "started"
    given = {"model": BALANCED, "weights": str(exported / "given"), "eval_sequences": 8}
    run_ranks(ranks, train, settings(out, steps=1, **given, **changes))
    ended = losses(records(exported / "run"), "validation_loss")[3]
    assert losses(records(out), "validation_loss")[0] == pytest.approx(ended, rel=1e-5)


def plan_run(tmp_path, **changes):
    return make_run(settings(tmp_path / "run", **{"model": MODEL, **changes}))


def test_weights_of_another_model_and_other_files_are_rejected(exported, tmp_path):
    with pytest.raises(ValueError, match=r"given holds another model: router_bias was True, now False; mtp_"):
        plan_run(tmp_path, weights=str(exported / "given"))
    with pytest.raises(
        ValueError, match=r"--weights .* must hold config.json and model.safetensors: give a folder from moe-d"
    ):
        plan_run(tmp_path, weights=str(exported / "run"))
    with pytest.raises(ValueError, match="--weights starts a new run and --resume continues an old one: use one"):
        plan_run(tmp_path, weights=str(exported / "given"), resume=str(exported / "run"))
    other = shutil.copytree(find_checkpoint(str(exported / "run")), tmp_path / "step-000003")
    (other / "tokenizer.json").write_bytes(b'{"tokenizer": "ids", "vocab_size": 256}')
    assert main(["export", str(other), "--out", str(tmp_path / "ids")]) == 0
    with pytest.raises(
        ValueError, match="ids was trained with another tokenizer: 256 token ids without a tokenizer; --"
    ):
        plan_run(tmp_path, weights=str(tmp_path / "ids"), model=BALANCED)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"")
    for config in ('{"model_type": "qwen3_moe"}', "[]", "{", '{"hidden_size": 32}'):
        (foreign / "config.json").write_text(config)
        with pytest.raises(
            ValueError,
            match=r"cannot read .*config.json: |: it has no vocab_size|was not written by moe-dualpipe export",
        ):
            plan_run(tmp_path, weights=str(foreign))


def test_errors_name_missing_and_mismatched_tensors(exported, tmp_path):
    state = {f"model.{name}": tensor for name, tensor in global_weights(build_model(BALANCED)).items()}
    good = load_file(exported / "given" / "model.safetensors")
    for change, problem in [
        (lambda d: d.pop("head.weight"), "has no head.weight"),
        (lambda d: d.update({"head.weight": torch.zeros(3)}), r": head.weight has shape \[3\], expected \[256, 32\]"),
        (
            lambda d: d.update({"head.weight": torch.zeros(1, 32)}),
            r": head.weight has shape \[1, 32\], expected \[256, 32\]",
        ),
    ]:
        tensors = dict(good)
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=problem):
            load_weights(tmp_path, state)
    data = (exported / "given" / "model.safetensors").read_bytes()
    for broken in (data[: len(data) // 2], data[:4], b"", b"\xff" * 100, b"PK\x03\x04" + data):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ValueError, match=r"cannot read .*model.safetensors: "):
            load_weights(tmp_path, state)


def load_error(rank, config):
    with pytest.raises(ValueError) as error:
        make_trainer(rank, config)
    return str(error.value)


def test_a_weight_missing_on_one_rank_is_an_error_on_all(exported, tmp_path):
    tensors = load_file(exported / "given" / "model.safetensors")
    del tensors["layers.0.attention.qkv.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copyfile(exported / "given" / "config.json", tmp_path / "config.json")
    config = settings(tmp_path / "run", model=BALANCED, schedule="1f1b", weights=str(tmp_path))
    first, second = run_ranks(2, load_error, config)
    assert first == second
    assert "model.safetensors has no layers.0.attention.qkv.weight" in first


def test_only_requested_weights_are_read(exported, monkeypatch):
    read, read_tensor = [], TensorFolder.read
    monkeypatch.setattr(TensorFolder, "read", lambda self, name: read.append(name) or read_tensor(self, name))
    state = {"model.head.weight": torch.zeros(256, 32), "exp_avg.head.weight": torch.zeros(256, 32)}
    load_weights(exported / "given", state)
    assert read == ["head.weight"]
    assert state["model.head.weight"].any()
    assert not state["exp_avg.head.weight"].any()


FILES = ["checksums.json", "config.json", "model.safetensors"]


def test_a_flip_of_any_bit_of_any_file_is_refused_with_the_name_of_the_file(exported, tmp_path):
    given = shutil.copytree(exported / "given", tmp_path / "given")
    assert sorted(path.name for path in given.iterdir()) == FILES
    draw = random.Random(7)
    for path in given.iterdir():
        intact = path.read_bytes()
        for _ in range(100):
            bit = draw.randrange(8 * len(intact))
            path.write_bytes(intact[: bit // 8] + bytes([intact[bit // 8] ^ 1 << bit % 8]) + intact[bit // 8 + 1 :])
            with pytest.raises(ValueError, match=f"given is broken: .*{path.name}.*; export or copy it again$"):
                check_weights(given, BALANCED)
        path.write_bytes(intact)
    check_weights(given, BALANCED)


def test_exports_without_checksums_load_as_before(exported, tmp_path):
    older = shutil.copytree(exported / "given", tmp_path / "older")
    (older / "checksums.json").unlink()
    check_weights(older, BALANCED)
    state = {"model.head.weight": torch.zeros(256, 32)}
    load_weights(older, state)
    assert state["model.head.weight"].any()


def load_from_own_folder(rank, folders):
    with pytest.raises(ValueError) as error:
        load_weights(folders[rank], {"model.head.weight": torch.zeros(256, 32)})
    return str(error.value).replace(str(folders[rank]), "FOLDER")


def test_ranks_with_different_exports_stop(exported, tmp_path):
    run_ranks(1, train, settings(tmp_path / "run", model=BALANCED, steps=1))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "other")]) == 0
    errors = run_ranks(2, load_from_own_folder, [exported / "given", tmp_path / "other"])
    expected = "the ranks found different weights at FOLDER: --weights needs a shared path, or equal copies"
    assert errors == [expected] * 2


def export_to_full_disk(_rank, run, out):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))  # bytes of a file
    return main(["export", str(run), "--out", str(out)])


def export_and_die(_rank, checkpoint, out, step):
    def die(*_):
        os._exit(9)

    setattr(atomic_folder, step, die)
    export_weights(checkpoint, out)


def test_a_failed_export_leaves_nothing_under_its_name(exported, tmp_path):
    out = tmp_path / "out"
    assert run_ranks(1, export_to_full_disk, exported / "run", out) == [2]
    assert not [*tmp_path.iterdir()]
    for step in ("write_synced", "sync"):
        assert run_failing_ranks(1, export_and_die, find_checkpoint(str(exported / "run")), out, step) == [""]
        assert {path.name for path in tmp_path.iterdir()} == {".out.unfinished", ".out.lock"}
    assert main(["export", str(exported / "run"), "--out", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == FILES
