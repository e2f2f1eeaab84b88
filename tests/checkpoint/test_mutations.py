"""Every wrong value at every place of a checkpoint's JSON: an error of one line, or a load that is equal."""

import dataclasses
import json
import os
import zlib

import pytest
import torch

from moe_dualpipe.checkpoint import check_model, check_weights, load_checkpoint, load_model, verify_checkpoint
from moe_dualpipe.models import ModelConfig
from tests.support.checkpoints import newest, state_of
from tests.support.mutations import check_message, mutations

IGNORED = dict.fromkeys(("init_std", "sequence_loss", "z_loss", "mtp_weight", "router_dtype"))  # not of the weights


def loaded(folder):
    state = {name: torch.full_like(t, -1) for rank in (0, 1) for name, t in state_of(rank, 0).items()}
    load_checkpoint(folder, state)
    return state


def test_every_wrong_value_in_run_json_is_refused(run):
    path = newest(run) / "run.json"
    saved = json.loads(path.read_text())
    for _, text in mutations(saved):
        path.write_text(text)
        try:
            verify_checkpoint(newest(run))
            assert json.loads(text) == saved  # such as 0 replaced by 0
        except ValueError as error:
            check_message(error)


def test_every_wrong_model_option_with_a_matching_checksum_is_refused(run):
    path = newest(run) / "run.json"
    saved = json.loads(path.read_text())
    del saved["checksum"]
    default = json.loads(json.dumps(dataclasses.asdict(ModelConfig())))
    for _, text in mutations(saved["model"]):
        try:
            signed = {**saved, "model": json.loads(text)}
            signed["checksum"] = zlib.crc32(json.dumps(signed, sort_keys=True).encode())
            path.write_text(json.dumps(signed))
        except (ValueError, RecursionError):  # then there is no checksum
            continue
        try:
            check_model(newest(run), ModelConfig())
            assert {**default, **signed["model"], **IGNORED} == {**default, **IGNORED}
        except ValueError as error:
            check_message(error, 4000)
        with pytest.raises(ValueError) as refused:  # the tensors are not those of any model
            load_model(newest(run))
        check_message(refused.value)


def test_every_wrong_value_in_tensors_json_is_refused_or_loads_the_same(run):
    path = newest(run) / "tensors.json"
    saved, expected = json.loads(path.read_text()), loaded(newest(run))
    table = {name: saved[name] for name in ("both", "scalar1")} | {"unused": saved["rank1"]}
    rest = json.dumps({name: saved[name] for name in saved if name not in table})
    refused = equal = 0
    for _, text in mutations(table):
        path.write_text(f"{rest[:-1]}, {text[1:]}" if text[:1] == "{" and len(text) > 2 else text)
        try:
            state = loaded(newest(run))
        except ValueError as error:
            check_message(error)
            refused += 1
        else:
            assert all(torch.equal(state[name], expected[name]) for name in expected)
            equal += 1
    assert refused > 10 * equal > 0


def test_every_wrong_value_in_the_config_json_of_an_export_is_refused(tmp_path):
    model, path = ModelConfig(), tmp_path / "config.json"
    saved = json.loads(json.dumps({"model_type": "moe-dualpipe", **dataclasses.asdict(model)}))
    (tmp_path / "model.safetensors").write_bytes(b"")  # not read here
    for _, text in mutations(saved):
        path.write_text(text)
        try:
            check_weights(tmp_path, model)
            assert {**saved, **json.loads(text), **IGNORED} == {**saved, **IGNORED}
        except ValueError as error:
            check_message(error, 4000)


def test_files_of_an_export_may_be_links_to_regular_files(tmp_path):
    model, blobs, snapshot = ModelConfig(), tmp_path / "blobs", tmp_path / "snapshot"
    snapshot.mkdir()
    blobs.mkdir()
    (blobs / "1").write_text(json.dumps({"model_type": "moe-dualpipe", **dataclasses.asdict(model)}))
    (blobs / "2").write_bytes(b"")
    for name, blob in ("config.json", "1"), ("model.safetensors", "2"):
        (snapshot / name).symlink_to(blobs / blob)
    check_weights(snapshot, model)
    (blobs / "1").unlink()
    os.mkfifo(blobs / "1")
    with pytest.raises(ValueError, match=r"--weights .* must hold config.json and model.safetensors"):
        check_weights(snapshot, model)
