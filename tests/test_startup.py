"""Help, the version and invalid options need no torch, whose import takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

from moe_dualpipe import __version__

ROOT = Path(__file__).parents[1]
COMMANDS = [
    [], ["train"], ["schedule"], ["schedule", "show"], ["schedule", "compare"], ["schedule", "check"], ["profile"],
    ["profile", "analyze"], ["profile", "run"], ["data"], ["data", "prepare"], ["data", "check"], ["plot"],
    ["generate"], ["export"], ["model"], ["model", "list"], ["model", "show"],
]  # fmt: skip
PROGRAM = """
import contextlib, io, json, sys
from moe_dualpipe.cli import main
sys.argv[0] = "/usr/bin/moe-dualpipe"
ended = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = exit_.code
    imported = [name for name in ("torch", "triton") if name in sys.modules]
    ended.append((code or 0, out.getvalue(), err.getvalue(), imported))
print(json.dumps(ended))
"""


def run_without_torch(*commands):
    """Run commands in one process that has not imported torch. Returns the exit code and the output of each."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ended = json.loads(done.stdout)
    for arguments, (*_, imported) in zip(commands, ended, strict=True):
        assert not imported, f"{arguments} imports {imported}"
    return [tuple(outcome[:3]) for outcome in ended]


def test_help_and_version_need_no_torch():
    helps = [[*command, "--help"] for command in COMMANDS]
    *ended, version, train_version = run_without_torch(*helps, ["--version"], ["train", "--version"])
    for arguments, (code, out, err) in zip(helps, ended, strict=True):
        assert (code, err) == (0, ""), arguments
        assert out.startswith(f"usage: {' '.join(['moe-dualpipe', *arguments[:-1]])} "), out.splitlines()[0]
    assert version == train_version == (0, f"moe-dualpipe {__version__}\n", "")
