"""Packaging: a wheel, an editable install and a bare checkout give the same package."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMPORTS = (
    "import moe_dualpipe.kernels.linear, moe_dualpipe.models, moe_dualpipe.deepseek, moe_dualpipe.training.loop as l; "
    "import moe_dualpipe.integrations.transformers, sys; assert 'transformers' not in sys.modules; "
    "print(l.__file__)"
)


def python(code, cwd, **environment):
    # -P: do not put the working directory on the path, as for a user in another folder.
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=cwd, env=os.environ | environment, capture_output=True, text=True,
        timeout=120, check=True,
    ).stdout.strip()  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_contains_all_files_in_one_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"moe_dualpipe"}
    for top in ("kernels", "models"):
        files = [path for kind in ("*.py", "*.json") for path in (ROOT / top).rglob(kind)]
        assert len(files) > 3
        assert {f"moe_dualpipe/{path.relative_to(ROOT)}" for path in files} <= set(names)
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "moe_dualpipe" / "tools" / "planner").rglob("*.json")}
    assert "moe_dualpipe/tools/planner/devices/h100.json" in data
    assert data <= set(names)
    assert "moe_dualpipe/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.long
def test_an_installed_wheel_can_be_imported(wheel, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    assert python(IMPORTS, tmp_path, PYTHONPATH=str(site)).startswith(str(site))
