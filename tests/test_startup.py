"""The program as it is installed and started: its wheel, imports, help, and the command that resumes a run."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moe_dualpipe import __version__
from moe_dualpipe.cli import COMMANDS, main
from moe_dualpipe.command_line import entry, shown
from moe_dualpipe.health.report import program_name, training_command

ROOT = Path(__file__).parents[1]
PROGRAM = """
import contextlib, io, json, sys
from moe_dualpipe.cli import main
ended = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(arguments)
    ended.append((code, out.getvalue()))
assert "torch" not in sys.modules
print(json.dumps(ended))
"""


def test_the_overview_the_version_and_schedules_need_no_torch():
    show = ["schedule", "show", "dualpipe", "--pp", "4", "--micro-batches", "10", "--width", "80"]
    commands = [["--help"], ["schedule", "--help"], ["--version"], show]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (all_of, help_), (one, group), (_, version), (shown, timeline) = json.loads(done.stdout)
    assert (all_of, one, shown) == (0, 0, 0)
    assert version == f"moe-dualpipe {__version__}\n"
    assert timeline.startswith("dualpipe: 4 ranks, 4 stages, 10 micro-batches")
    assert help_.startswith("usage: moe-dualpipe COMMAND [OPTIONS]\n")
    assert group.startswith("usage: moe-dualpipe schedule COMMAND [OPTIONS]\n")
    for name, (_, text) in COMMANDS.items():
        assert re.search(rf"^  {name} +{text}$", help_, re.MULTILINE)
        assert (text in group) == name.startswith("schedule ")


def help_of(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_has_a_text_for_every_option(capsys, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = help_of(capsys, command.split()).splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= (50 if columns == 100 else 110)
    text = "\n".join(lines) + "\n"
    assert "None" not in text and "Raises" not in text
    assert text.count("(default") == len(re.findall(r"\(default [^\n]+\)$", text, re.MULTILINE))
    entries = re.findall(r"^  (?:--\w|[A-Z]{2}).*\n(?: {29}.*\n)*", text, re.MULTILINE)
    assert all(re.search(r"[A-Za-z]+ [a-z(0-9]", entry) for entry in entries)
    assert entries or command in ("model list", "check parallel")


def test_defaults_are_shown_as_they_are_typed():
    assert [shown(one) for one in ("a b", "", "x", 0.5, True, ("p", "q r"))] == [
        '"a b"',
        '""',
        "x",
        "0.5",
        "true",
        'p "q r"',
    ]
    assert entry("--x", "INT", "Text. None: no limit.").split("  ")[-1] == "Text. Default: no limit."
    assert entry("--x", "{a,b}", "Text.", "a").endswith("Text. (default a)")


def test_help_names_exactly_the_options_that_are_parsed(capsys):
    options = {*re.findall(r"--[a-z][\w.-]*", help_of(capsys, ["schedule", "show"]))}
    assert options == {"--pp", "--micro-batches", "--num-chunks", "--until", "--out", "--width"} | {
        f"--cost.{name}" for name in ("F", "B", "W", "FB", "comm")
    }


# ---- How a run was started: the name in its messages, and the command that resumes it ----


BIN = Path(sys.executable).parent


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script,name,alone,launched", [
    ("train.py", "train.py", "python train.py", "torchrun --nproc-per-node 2 train.py"),
    (f"{BIN}/moe-dualpipe", "moe-dualpipe train", "moe-dualpipe train",
     "torchrun --nproc-per-node 2 --no-python moe-dualpipe train"),
    ("moe_dualpipe/cli.py", "moe-dualpipe train", "moe-dualpipe train",
     "torchrun --nproc-per-node 2 --no-python moe-dualpipe train"),
    ("moe_dualpipe/__main__.py", "moe-dualpipe train", "moe-dualpipe train",
     "torchrun --nproc-per-node 2 --no-python moe-dualpipe train"),
], ids=["script", "console", "module", "package"])  # fmt: skip
def test_a_run_resumes_as_it_was_started(monkeypatch, ranks, script, name, alone, launched):
    monkeypatch.setattr(sys, "argv", [script, "train"])
    monkeypatch.setenv("PATH", str(BIN))
    assert program_name() == name
    assert training_command(ranks if ranks > 1 else None) == (alone if ranks == 1 else launched).split()
    monkeypatch.setattr(sys, "argv", [script, "eval"])
    assert program_name() == name.removesuffix(" train")


def test_a_run_on_several_machines_resumes_on_as_many(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("PATH", str(BIN))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert training_command(4) == ["torchrun", "--nnodes", "2", "--nproc-per-node", "4", "train.py"]


# ---- A wheel gives the same package as a checkout ----


IMPORTS = (
    "import moe_dualpipe.kernels.linear, moe_dualpipe.models, moe_dualpipe.deepseek, moe_dualpipe.training.loop as l; "
    "import moe_dualpipe.integrations.transformers, sys; assert 'transformers' not in sys.modules; "
    "print(l.__file__)"
)


def test_a_wheel_contains_all_files_in_one_package_that_can_be_imported(tmp_path):
    copy = tmp_path / "copy"  # setuptools would put files of an earlier build into the wheel
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "runs", "__pycache__"))
    build = [sys.executable, "-c", f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"]
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {*wheel.namelist()}
        wheel.extractall(site := tmp_path / "site")
    assert {top for top in (name.split("/")[0] for name in names) if not top.endswith(".dist-info")} == {"moe_dualpipe"}
    for top in ("kernels", "models"):
        files = [path for kind in ("*.py", "*.json") for path in (ROOT / top).rglob(kind)]
        assert len(files) > 3
        assert {f"moe_dualpipe/{path.relative_to(ROOT)}" for path in files} <= names
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "moe_dualpipe").rglob("*.json")}
    assert "moe_dualpipe/runtime/devices/h100.json" in data <= names
    assert "moe_dualpipe/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    # -P: do not put the working directory on the path, as for a user in another folder
    code = [sys.executable, "-P", "-c", IMPORTS]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith(str(site))
