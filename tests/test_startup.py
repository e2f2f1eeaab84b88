"""The overview, the version and schedules need no torch, whose import takes seconds. Every command has its help."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_dualpipe import __version__
from moe_dualpipe.cli import COMMANDS, main

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


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("train", "check parallel")])
def test_every_command_has_help_for_every_option(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.startswith(f"usage: moe-dualpipe {command} [")
    for entry in re.findall(r"^  (?:--?\w|[A-Z]{2}).*\n(?:  +(?!--?\w|[A-Z]{2})\S.*\n)*", text, re.MULTILINE):
        words = re.sub(r"\((default: .*|required|optional|repeatable)\)", "", entry, flags=re.DOTALL)
        assert re.search(r"[A-Za-z]+ [a-z(0-9]", words), entry
