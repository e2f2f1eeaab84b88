"""The overview, the version and schedules need no torch, whose import takes seconds. Every command has its help."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_dualpipe import __version__
from moe_dualpipe.cli import COMMANDS, main
from moe_dualpipe.option_help import entry, shown

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


def test_the_package_is_a_program():
    done = subprocess.run([sys.executable, "-m", "moe_dualpipe", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"moe-dualpipe {__version__}\n")
