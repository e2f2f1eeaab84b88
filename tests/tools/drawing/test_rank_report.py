"""Reports about ranks, from files of made-up programs with known times, as `profile analyze` prints them."""

import json

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler.files import analyze_files
from tests.support.rank_programs import Compute, Join, execute, write_ranks
from tests.support.traces import kernel, write

STEP = [
    Compute({0: 100, 1: 130, 2: 100, 3: 100}, phase="attn"),
    *(Join("all_gather", "tp", ranks, 20, 500_000, "attn") for ranks in ((0, 1), (2, 3))),
    Compute(50, phase="mlp"),
    *(Join("allreduce", "dp", ranks, 100, 250_000, "mlp") for ranks in ((0, 2), (1, 3))),
]
"""Rank 1 is 30 us late in tp; rank 0 waits for it. So ranks 2 and 3 wait 30 us in dp."""


def analyzed(capsys, *arguments):
    assert main(["profile", "analyze", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def table(text, first):
    """The rows below the heading that begins with `first`, of the first such table."""
    lines = text[text.index(f"| {first}") :].splitlines()[2:]
    rows = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def test_collectives_of_compared_ranks(tmp_path, capsys):
    """500,000 floats in 20 us are 100 GB/s; 250,000 in 100 us are 10. Of 2 ranks, the bus factors are 1/2 and 1."""
    text = analyzed(capsys, *write_ranks(execute(STEP * 2, 4), tmp_path), "--collectives")
    assert table(text, "collective") == [
        ["all_reduce, Float", "dp: ranks 0, 2", "2", "2.0 MB", "200", "200",
         "10.00", "10.00"],
        ["all_gather, Float", "tp: ranks 0, 1", "2", "4.0 MB", "100", "100", "100.00", "50.00"],
    ]  # fmt: skip
    assert ">=" not in text


def test_collectives_of_one_rank_are_lower_limits(tmp_path, capsys):
    (path,) = write_ranks(execute(STEP * 2, 4), tmp_path, [0])
    text = analyzed(capsys, path, "--collectives")
    rows = {row[0]: row[-2:] for row in table(text, "collective")}
    assert rows["all_gather, Float"] == [">= 40.00", ">= 20.00"]
    assert ">= : a lower limit" in text
    assert "no trace here" not in text  # one trace is what was asked for
    assert "| collective" not in analyzed(capsys, path)


def test_collectives_in_json(tmp_path, capsys):
    found = json.loads(analyzed(capsys, *write_ranks(execute(STEP * 2, 4), tmp_path), "--json"))
    (_, row), *others = (one["collectives"] for one in found)
    assert row == {
        "kind": "all_gather", "group": "tp", "ranks": [0, 1], "size": 2, "dtype": "Float", "count": 2,
        "bytes": 4_000_000, "total_us": 100, "compared": 2, "transfer_us": 40, "exposed_us": 100,
        "algorithm_gb_s": 100, "bus_gb_s": 50, "is_lower_limit": False,
    }  # fmt: skip
    assert [[row["kind"] for row in rows] for rows in others] == [["all_reduce", "all_gather"]] * 3
    assert [one["problems"] for one in found] == [[]] * 4


def test_unknown_numbers_are_dashes(tmp_path, capsys):
    path = write(tmp_path / "t.json", [kernel("gemm", 0, 50), kernel("deep_ep::dispatch<8>(int)", 10, 20, stream=9)])
    text = analyzed(capsys, path, "--collectives")
    assert table(text, "collective") == [["deep_ep::dispatch", "-", "1", "-", "20", "0", "-", "-"]]
    assert ">=" not in text
    text = analyzed(capsys, write(tmp_path / "u.json", [kernel("gemm", 0, 50)]), "--collectives")
    assert "There are no collectives." in text


def test_names_from_a_trace_stay_in_their_cell(tmp_path, capsys):
    done = execute([Compute(5), Join("a|b\n<script>", "g|h\n", (0, 1), phase="p|q")], 2)
    rows = table(analyzed(capsys, *write_ranks(done, tmp_path), "--collectives"), "collective")
    assert len(rows) == 1


def test_what_could_not_be_compared_is_said(tmp_path, capsys):
    """Rank 0 recorded one collective of tp less, and rank 3 has no trace."""
    done = execute(STEP * 3, 4, numbered=False)
    del done.events[0][1], done.launches[0][1]
    text = analyzed(capsys, *write_ranks(done, tmp_path, [0, 1, 2]))
    problem = (
        "Not compared: tp of ranks 0, 1: rank 0 and rank 1 recorded different collectives, without numbers "
        "(2 of them are compared in their order)."
    )
    missing = "1 of 4 ranks have no trace here (rank 3): waits for them count as communication."
    assert f"\n\n{problem}\n\n{missing}\n" in text
    found = analyze_files([*map(tmp_path.joinpath, ("rank0.json", "rank1.json", "rank2.json"))])
    assert found.problems == found.as_objects()[1]["problems"] == [problem, missing]
    assert analyze_files([tmp_path / "rank0.json"]).problems == []  # a single trace is compared with nothing


@pytest.mark.parametrize("number,text", [
    (None, "-"), (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_250_000, "1.2 MB"), (3 * 10**12, "3,000.0 GB"),
])  # fmt: skip
def test_sizes(number, text):
    from moe_dualpipe.tools.profiler.reports.ranks import _size

    assert _size(number) == text


# ---- Who was late ----


def test_lateness_as_sentences_and_in_json(tmp_path, capsys):
    """Rank 1 is late for tp, so rank 0 is late for dp, and rank 1 too. Window: 900 us."""
    paths = write_ranks(execute(STEP * 3, 4), tmp_path)
    text = analyzed(capsys, *paths)
    assert (
        "rank 1 was late: it joined 6 of 6 collectives last. The others waited 60 us for it with nothing else" in text
    )
    assert "   It spent more time than they did on computation, GEMM in attn (90 us)." in text
    late = json.loads(analyzed(capsys, *paths, "--json"))[1]["lateness"]
    assert (late["joined"], late["last"], late["waited_us"]) == (6, 6, pytest.approx(60))
    assert late["reasons"][0] == {"kind": "computation", "detail": "GEMM in attn", "us": pytest.approx(90)}
    assert json.loads(analyzed(capsys, paths[0], "--json"))["lateness"] is None


def test_only_the_latest_ranks_are_explained(tmp_path, capsys):
    """In pairs, ranks 0, 2, ..., 10 are late for the other one."""
    pairs = [(rank, rank + 1) for rank in range(0, 12, 2)]
    program = [Compute({rank: 100 + 50 * (rank % 2 == 0) * (rank + 1) for rank in range(12)})]
    program += [Join("allreduce", "dp", ranks, 10) for ranks in pairs]
    text = analyzed(capsys, *write_ranks(execute(program * 3, 12), tmp_path))
    assert [line.split()[1] for line in text.splitlines() if " was late: " in line] == ["10", "8", "6", "4"]
    assert "\n2 more ranks made the others wait, for less time.\n" in text


def test_names_of_phases_stay_on_their_line(tmp_path, capsys):
    program = [Compute({0: 10, 1: 90}, phase="a\n# b | c"), Join("allreduce", "dp", (0, 1), phase="\x1b[31m")]
    text = analyzed(capsys, *write_ranks(execute(program * 3, 2), tmp_path))
    assert "GEMM in a\\n# b | c (" in text and "\x1b" not in text


def test_large_groups_are_counted(tmp_path, capsys):
    done = execute([Compute(5), Join("allreduce", "dp", tuple(range(9)))], 9)
    text = analyzed(capsys, *write_ranks(done, tmp_path, [0]), "--collectives")
    assert table(text, "collective")[0][1] == "dp: 9 ranks"
