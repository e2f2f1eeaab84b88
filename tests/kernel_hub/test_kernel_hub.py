"""The repository for Hugging Face's kernel hub works from its own folder alone, without this project."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import tomllib

import pytest

from kernel_hub.__main__ import build

# Loads the variant as the hub's loader does: from a path, under the id of its metadata.
USE = """
import importlib.util, json, pathlib, sys

for name in ("moe_dualpipe", "kernels", "models"):
    sys.modules[name] = None  # cannot be imported
folder = pathlib.Path(sys.argv[1])
metadata = json.loads((folder / "metadata.json").read_text())
spec = importlib.util.spec_from_file_location(metadata["id"], folder / "__init__.py")
moe = sys.modules[metadata["id"]] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(moe)

import torch

torch.manual_seed(0)
leaves = [torch.randn(*shape, requires_grad=True) for shape in ((3, 16), (3, 24, 16), (3, 16, 12), (3, 2))]
x, gate_up, down, weights = leaves
ids = torch.tensor([[0, 2], [2, 0], [0, 2]])
results = []
for kernels in ("reference", "triton"):
    y = moe.experts(x, gate_up, down, moe.expert_order(ids, 3, kernels=kernels), weights, kernels=kernels)
    results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
for name, expected, ours in zip(["y", "x", "gate_up", "down", "weights"], *results):
    assert (ours - expected).norm() <= 3e-6 * expected.norm(), name
dense = sum(
    weights[:, k, None] * torch.stack([down[e] @ moe.swiglu(gate_up[e] @ row) for e, row in zip(ids[:, k], x)])
    for k in range(2)
)
assert (y - dense).norm() <= 3e-6 * dense.norm()

sys.path.insert(0, str(folder))  # as loaders before kernels 0.10 did
import moe_dualpipe_kernels

assert moe_dualpipe_kernels.experts is moe.experts
print(*sorted(moe.__all__))
print(*sorted({name.split(".")[0] for name in sys.modules if "dualpipe_k" in name}))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return build(tmp_path_factory.mktemp("hub"))


@pytest.mark.long
def test_forward_and_backward_from_the_folder_alone(repository, tmp_path):
    pytest.importorskip("triton")
    variant = repository / "build" / "torch-universal"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", "-c", USE, str(variant)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    names, modules = done.stdout.splitlines()
    assert {"experts", "expert_order", "grouped_linear", "route"} <= {*names.split()}
    assert modules == f"{metadata_of(variant)['id']} moe_dualpipe_kernels"


def metadata_of(variant):
    return json.loads((variant / "metadata.json").read_text())


def test_the_metadata_describes_the_files(repository):
    variant = repository / "build" / "torch-universal"
    general = tomllib.loads((repository / "build.toml").read_text())["general"]
    metadata = metadata_of(variant)
    assert {name: metadata[name] for name in ("name", "version", "license")} == {
        name: general[name] for name in ("name", "version", "license")
    }
    assert metadata["id"].isidentifier()
    found = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()} - {"metadata.json"}
    assert {*metadata["digest"]["files"]} == found
    assert found >= {"__init__.py", "experts.py", "gpu/swiglu.py", "gpu/tuned.json", "moe_dualpipe_kernels/__init__.py"}
    for name, expected in metadata["digest"]["files"].items():
        assert base64.b64encode(hashlib.sha256((variant / name).read_bytes()).digest()).decode() == expected
    sources = repository / "torch-ext" / "moe_dualpipe_kernels"
    assert (sources / "experts.py").read_bytes() == (variant / "experts.py").read_bytes()
