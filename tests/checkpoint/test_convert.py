"""examples/convert_checkpoint.py: a checkpoint of an earlier version becomes one that loads; without it, one line."""

import io
import json
import runpy
import sys
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file

from moe_dualpipe.checkpoint import check_model, find_checkpoint, find_weights, load_model
from moe_dualpipe.checkpoint.manifest import FileChecksum, Manifest
from moe_dualpipe.checkpoint.weights import global_weights
from moe_dualpipe.models import ModelConfig, build_model
from tests.support.checkpoints import loaded_step, state_of
from tests.support.runs import ROOT


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
