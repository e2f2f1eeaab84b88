"""Loading checkpoints: the newest intact one is found, damage is one line, hostile files run no code, ranks agree."""

import dataclasses
import io
import json
import os
import pickle
import random
import runpy
import sys
import zlib
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file

from moe_dualpipe.checkpoint import (
    check_model,
    find_checkpoint,
    find_weights,
    global_weights,
    load_checkpoint,
    load_model,
    manifest,
    read_manifest,
    start_model,
    verify_checkpoint,
)
from moe_dualpipe.checkpoint.manifest import FileChecksum, Manifest
from moe_dualpipe.data import strict_json
from moe_dualpipe.models import ModelConfig, build_model
from tests.support.checkpoints import loaded_step, newest, state_of, write_manifest
from tests.support.mutations import check_message, mutations
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT

IGNORED = {
    "init_std", "sequence_loss", "z_loss", "mtp_weight", "router_dtype", "group_score", "q_rank", "kv_rank", "rope_dim",
    "value_dim", "latent_norm_eps", "rope_scaling", "yarn_positions", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale",
    "yarn_mscale_all_dim", "yarn_attention_factor", "yarn_truncate", "dense_size",
}  # fmt: skip
"""Options of training, and those without effect on the default model."""
DEFAULT = json.loads(json.dumps(dataclasses.asdict(ModelConfig())))


# ---- Laws ----


def test_every_flipped_bit_is_detected(run, monkeypatch):
    monkeypatch.setattr(manifest, "_BLOCK", 64)  # bytes read at a time: a file has several
    rng = random.Random(0)
    for path in sorted(newest(run).iterdir()):
        original = path.read_bytes()
        for _ in range(12):
            data = bytearray(original)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            with pytest.raises(ValueError, match=r"run\.json|does not match its checksum"):
                verify_checkpoint(newest(run))
        path.write_bytes(original)
    assert verify_checkpoint(newest(run)).step == 9


@pytest.mark.parametrize("signed", [False, True])
def test_every_wrong_value_in_run_json_is_refused_or_changes_nothing(run, signed):
    """signed: with a checksum that matches, as an attacker would write it."""
    path = newest(run) / "run.json"
    expected = dataclasses.replace(read_manifest(newest(run)), model=DEFAULT if signed else {})
    path.write_bytes(expected.encode())
    saved, refused = json.loads(path.read_text()), 0
    values = {key: value for key, value in saved.items() if key != "checksum" or not signed}
    for _, text in [*mutations(values)][::3]:  # of the 20 mutations of each value, another third
        try:
            value = json.loads(text)
            if signed and isinstance(value, dict):
                text = json.dumps({**value, "checksum": zlib.crc32(json.dumps(value, sort_keys=True).encode())})
        except (ValueError, RecursionError):
            pass
        path.write_text(text)
        try:
            loaded_step(find_checkpoint(str(newest(run))))
            check_model(newest(run), ModelConfig())
        except ValueError as error:
            check_message(error, 4000)
            refused += 1
        else:
            found = read_manifest(newest(run))
            changed = {key for key in DEFAULT if found.model.get(key, DEFAULT[key]) != DEFAULT[key]}
            assert found == expected or (
                signed and found.files.items() <= expected.files.items() and changed <= IGNORED
            )
    assert refused > 50


def forge(checkpoint, **more):
    """Write run.json with checksums that match, as an attacker would."""
    old = read_manifest(checkpoint)
    files = {name: FileChecksum.of((checkpoint / name).read_bytes()) for name in old.files}
    (checkpoint / "run.json").write_bytes(Manifest(old.step, old.model, files | more).encode())


class Attack:
    """Creates a marker file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("kind", ["pickle", "saved", "short"])
def test_a_file_that_holds_no_tensors_is_refused_and_runs_no_code(run, kind):
    marker, path = run / "marker", newest(run) / "rank-0-0.safetensors"
    torch.save(Attack(marker), buffer := io.BytesIO())
    payloads = {"pickle": pickle.dumps(Attack(marker)).ljust(600, b"\0"), "saved": buffer.getvalue()}
    path.write_bytes(payloads.get(kind, path.read_bytes()[:-1]))
    forge(newest(run))
    with pytest.raises(ValueError, match=r"cannot read .*rank-0-0.safetensors: it has .* not a safetensors") as refused:
        loaded_step(find_checkpoint(str(run)))
    check_message(refused.value)
    assert not marker.exists()


# ---- Which checkpoint a run resumes from ----


def test_find_returns_the_newest_complete_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint in .*: give the folder of a run or of a checkpoint"):
        find_checkpoint(str(tmp_path))
    for step, missing in [(9, ""), (20, ""), (100, "run.json"), (200, "tokens.txt")]:
        write_manifest(folder := tmp_path / "checkpoints" / f"step-{step:06d}")
        if missing:
            (folder / missing).unlink()
    assert find_checkpoint(str(tmp_path)).name == find_checkpoint(str(tmp_path / "checkpoints")).name == "step-000020"
    direct = tmp_path / "checkpoints" / "step-000009"
    assert find_checkpoint(str(direct)) == direct
    direct.rename(tmp_path / "elsewhere")  # the folder itself may be a link
    direct.symlink_to(tmp_path / "elsewhere")
    assert find_checkpoint(str(direct)) == direct


def test_a_resumed_run_without_options_has_the_model_of_its_newest_checkpoint(tmp_path):
    for step in (9, 20):
        write_manifest(tmp_path / "checkpoints" / f"step-{step:06d}", step, {"num_layers": step})
    for given in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step-000020"):
        assert start_model(str(given), None) == ModelConfig(num_layers=20)
    assert start_model(str(tmp_path / "nothing"), None) is start_model(None, None) is None


@pytest.mark.parametrize("change,now,problem", [
    ({"hidden_size": 64}, {}, "hidden_size was 64, now 128"), ({"depth": 3}, {}, "unknown option 'depth'"),
    ({"rope_theta": None}, {"rope_theta": 500.0}, "rope_theta was 10000.0, now 500.0"), ({"rope_theta": None}, {}, ""),
    ({"init_std": 0.5, "sequence_loss": 1e-4, "z_loss": 0, "mtp_weight": 1}, {}, ""),
], ids=str)  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change, now, problem):
    """An option that the checkpoint does not have (None) counts as its default. Those of training may differ."""
    model = {key: value for key, value in {**DEFAULT, **change}.items() if value is not None}
    write_manifest(tmp_path, 7, model)
    if not problem:
        assert check_model(tmp_path, ModelConfig(**now)) == 7
        return
    with pytest.raises(ValueError, match=f"(holds another model|cannot build the model of .*): {problem}$"):
        check_model(tmp_path, ModelConfig(**now))


def load_on_two_ranks(rank, folders):
    with pytest.raises(ValueError, match="the ranks found different checkpoints"):
        load_checkpoint(folders[rank], state_of(rank, 0))
    missing = {f"missing{rank}": torch.zeros(1)} if rank else {}
    with pytest.raises(ValueError, match="has no missing1"):  # also on rank 0, which finds all its tensors
        load_checkpoint(folders[0], state_of(rank, 0) | missing)
    with pytest.raises(ValueError, match=r": rank1 has shape \[1, 8\], expected \[2, 4\]"):
        load_checkpoint(folders[0], {"rank1": torch.zeros(2, 4)})
    load_checkpoint(folders[0], state := state_of(rank, 0))
    return int(state["both"][0, 0, 0])


def test_a_load_that_fails_on_one_rank_fails_on_all(run):
    folders = [run / "checkpoints" / f"step-00000{step}" for step in (5, 9)]
    assert run_ranks(2, load_on_two_ranks, folders) == [5, 5]


# ---- Refusals ----


def link(path, target):
    path.rename(target)
    path.symlink_to(target)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


TOKENS, FIRST, RUN = "tokens.txt", "rank-0-0.safetensors", "run.json"
NO_BYTES = FileChecksum.of(b"")
DAMAGES = {
    "truncated": (lambda c: os.truncate(c / FIRST, 50), f"{FIRST} has 50 bytes, expected "),
    "missing": (lambda c: (c / FIRST).unlink(), f"cannot read {FIRST}: No such file"),
    "a link": (lambda c: link(c / TOKENS, c.parent / TOKENS), f"cannot read {TOKENS}: it is a symbolic link"),
    "a link inside": (lambda c: link(c / FIRST, c / "copy"), f"cannot read {FIRST}: it is a symbolic link"),
    "a linked run.json": (lambda c: link(c / RUN, c.parent / "run"), f"cannot read {RUN}: it is a symbolic link"),
    "a pipe": (lambda c: pipe(c / TOKENS), f"cannot read {TOKENS}: it is not a regular file"),
    "a pipe as run.json": (lambda c: pipe(c / RUN), f"cannot read {RUN}: it is not a regular file"),
    "a folder": (
        lambda c: [(c / TOKENS).unlink(), (c / TOKENS).mkdir()],
        f"cannot read {TOKENS}: it is not a regular file",
    ),
    "outside": (
        lambda c: forge(c, **{"../tokens.txt": NO_BYTES}),
        f"cannot read {RUN}: '../tokens.txt' is not a valid",
    ),
    "absolute": (lambda c: forge(c, **{"/etc/hostname": NO_BYTES}), f"cannot read {RUN}: '/etc/hostname' is not a va"),
    "dots": (lambda c: forge(c, **{"..": NO_BYTES}), f"cannot read {RUN}: '..' is not a valid file name"),
    "nested": (lambda c: (c / RUN).write_text("[" * 5000 + "]" * 5000), f"cannot read {RUN}: its objects and lists"),
    "empty": (lambda c: [path.unlink() for path in c.iterdir()], f"cannot read {RUN}: No such file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_checkpoint_is_reported_and_the_one_before_it_is_used(run, damage):
    damage_checkpoint, reason = DAMAGES[damage]
    damage_checkpoint(newest(run))
    messages = []
    assert loaded_step(find_checkpoint(str(run), messages.append)) == 5
    (line,) = messages
    assert line.startswith(f"skipped broken checkpoint {newest(run)}: {reason}")
    with pytest.raises(ValueError) as error:
        find_checkpoint(str(newest(run)))
    assert str(error.value).startswith(f"{newest(run)} is broken: {reason}")


def test_all_broken_checkpoints_are_named_and_a_large_run_json_is_not_read(run, monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_BYTES", 1000)
    large = "run.json: it has more than 1,000 bytes"
    with pytest.raises(ValueError, match=rf"all .* are broken: .*9: .*{large}.*5: .*{large}.*3: .*{large}"):
        find_checkpoint(str(run))


# ---- examples/convert_checkpoint.py: a checkpoint of an earlier version becomes one that loads ----


def write_old(folder, step):
    """Write the state of two ranks as earlier versions did: with torch.save, one tensor after the other in a file."""
    folder.mkdir(parents=True)
    data, table = io.BytesIO(), {}
    for name, tensor in (state_of(0, step) | state_of(1, step)).items():
        torch.save(tensor, buffer := io.BytesIO())
        place = {"file": "__0_0.distcp", "offset": data.tell(), "length": data.write(buffer.getvalue())}
        table[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape], **place}
    contents = {
        "__0_0.distcp": data.getvalue(), ".metadata": b"a pickle", "tokenizer.json": b"{}",
        "tensors.json": json.dumps(table).encode(),
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = {name: FileChecksum.of(content) for name, content in contents.items()}
    (folder / "run.json").write_bytes(Manifest(step, asdict(ModelConfig()), files).encode())


def test_checkpoints_and_exported_weights_of_earlier_versions_are_converted(tmp_path, monkeypatch, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    for step in (3, 7):
        write_old(old / "checkpoints" / f"step-00000{step}", step)
    (old / "run.toml").write_text("steps = 9\ndata_cache_gb = 20.0\n")
    advice = "is broken: an earlier version wrote it: convert it with examples/convert_checkpoint.py; --resume"
    with pytest.raises(ValueError, match=advice):
        find_checkpoint(str(old / "checkpoints" / "step-000007"))
    (old / "checkpoints" / "step-000007" / "__0_0.distcp").write_bytes(b"damaged")
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", str(old), str(new)])
    main = runpy.run_path(str(ROOT / "examples" / "convert_checkpoint.py"))["main"]
    main()
    assert capsys.readouterr().out == f"{old} -> {new}/checkpoints/step-000003\n"
    found = find_checkpoint(str(new))
    assert loaded_step(found) == check_model(found, ModelConfig()) == 3
    assert (found / "tokenizer.json").read_bytes() == b"{}" and (new / "run.toml").read_text() == "steps = 9\n"
    (exported := tmp_path / "exported").mkdir()
    model = build_model(ModelConfig(num_layers=2))
    save_file(global_weights(model), exported / "model.safetensors")
    (exported / "config.json").write_text(json.dumps({"model_type": "moe-dualpipe", **asdict(model.config)}))
    sys.argv[1:] = [str(exported), str(tmp_path / "weights")]
    main()
    found = load_model(find_weights(str(tmp_path / "weights"))).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
