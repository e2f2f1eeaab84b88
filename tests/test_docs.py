"""What the documentation says a command prints is what it prints."""

import re
from pathlib import Path

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.drawing.timeline_boxes import format_number
from moe_dualpipe.schedule import Costs, build, simulate
from moe_dualpipe.schedule.compare import compare

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT.parent / "shared" / "data" / "deepseek_v3_train_trace.json.gz"
COMMANDS = [
    (path.name, *match) for path in (ROOT / "README.md", ROOT / "docs" / "schedules.md", ROOT / "docs" / "model.md")
    for match in re.findall(r"```\n\$ moe-dualpipe ((?:schedule|model) [^\n]*)\n(.*?)```", path.read_text(), re.DOTALL)
]  # fmt: skip


def steps(comm, pair, num_chunks):
    """The step time of every schedule on 8 ranks."""
    entries = compare(8, 32, Costs(2, 5, 2, pair, comm), num_chunks)
    return {e.name: format_number(e.timeline.makespan) for e in entries if e.num_ranks == 8 and e.timeline}


def test_the_tables_that_no_single_command_prints():
    document = (ROOT / "docs" / "schedules.md").read_text()
    for comm in (0, 0.25):
        vpp = [steps(comm, 7, chunks)["interleaved_1f1b"] for chunks in (2, 4, 8)]
        plain, gaining = steps(comm, 7, 2), steps(comm, 6, 2)
        pairs = [times[name] for name in ("dualpipe", "dualpipev") for times in (plain, gaining)]
        assert " | ".join([f"| comm = {comm:g}", *vpp, plain["zb1p"], plain["zbv"], *pairs]) + " |" in document
    for micro_batches in (16, 32, 64, 128):
        row = [f"| {micro_batches}"]
        for name in ("chimera", "dualpipe", "1f1b"):
            timeline = simulate(build(name, 8, micro_batches), Costs(1, 2, 1, 3))
            row.append(f"{timeline.makespan:g}, {timeline.bubble[0]:g} ({timeline.bubble_share:.1%})")
        assert " | ".join(row) + " |" in document


def test_there_are_commands_in_all():
    assert {name for name, *_ in COMMANDS} == {"README.md", "schedules.md", "model.md"}


@pytest.mark.parametrize("name,arguments,printed", COMMANDS, ids=lambda text: text[:60].replace("\n", " "))
def test_a_command_prints_what_is_written_below_it(name, arguments, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "order.csv").write_text("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n")  # the faulty one that they show
    main(arguments.split())
    out, err = capsys.readouterr()
    assert out + err == printed, f"in {name}"


@pytest.mark.skipif(not PUBLISHED.exists(), reason="DeepSeek's trace is not here")
def test_what_is_written_of_the_published_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json.gz").symlink_to(PUBLISHED)
    assert main(["profile", "analyze", "train.json.gz", "--phases"]) == 0
    printed = capsys.readouterr().out
    assert f"```\n{printed}```" in (ROOT / "docs" / "profiling.md").read_text()
    assert main(["profile", "analyze", "train.json.gz"]) == 0
    assert f"```\n{capsys.readouterr().out}```" in (ROOT / "README.md").read_text()
