"""What the documentation says a command prints is what it prints."""

import re
from pathlib import Path

import pytest

from moe_dualpipe.cli import main

ROOT = Path(__file__).parent.parent
COMMANDS = [
    (path.name, *match) for path in (ROOT / "README.md", ROOT / "docs" / "schedules.md")
    for match in re.findall(r"```\n\$ moe-dualpipe ([^\n]*)\n(.*?)```", path.read_text(), re.DOTALL)
]  # fmt: skip


def test_there_are_commands_in_both():
    assert {name for name, *_ in COMMANDS} == {"README.md", "schedules.md"}


@pytest.mark.parametrize("name,arguments,printed", COMMANDS, ids=lambda text: text[:60].replace("\n", " "))
def test_a_command_prints_what_is_written_below_it(name, arguments, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "order.csv").write_text("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n")  # the faulty one that they show
    main(arguments.split())
    out, err = capsys.readouterr()
    assert out + err == printed, f"in {name}"
