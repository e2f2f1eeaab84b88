"""The console script prints what the library computes, and one line for an invalid option."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.schedule import Costs, add_comms, build, fill, least_time, simulate
from moe_dualpipe.training.options import parse_arguments

SHOW = ["schedule", "show", "dualpipe", "--pp", "4", "--micro-batches", "10"]


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_fill_takes_the_costs_of_a_profiled_run_and_writes_what_train_runs(capsys, tmp_path):
    cost = {"F": [24, 24], "B": [46, 46], "W": [16, 16], "FB": [59, 59], "comm": 0}
    report, out = tmp_path / "run" / "profile" / "report.json", tmp_path / "mine.csv"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"pipelines": [{"costs_ms": cost}]}))
    schedule, fill_it = build("dualpipe", 2, 4), ["schedule", "fill", "dualpipe", "--pp", 2, "--micro-batches", 4]
    code, text, _ = run(capsys, *fill_it, "--costs", tmp_path / "run", "--out", out)
    filled, c = fill(schedule, Costs(**cost)), Costs(**cost)
    assert code == 0 and text.endswith(f"\n\n{out}\n") and out.read_text() == filled.to_csv()
    steps, least = [simulate(one, c).makespan for one in (schedule, filled)], least_time(schedule.placement, 4, c)
    table = [line.split("|")[3:5] for line in text.splitlines() if line.startswith("| ")][1:]
    assert [[float(cell) for cell in row] for row in table] == [[step, least] for step in steps]
    assert steps[0] > steps[1] >= least
    report.write_text('{"pipelines": []}')
    code, text, error = run(capsys, *fill_it, "--costs", tmp_path / "run")
    assert (code, text, error.count("\n")) == (2, "", 1) and "report.json has no costs of a pipeline" in error


@pytest.mark.parametrize("suffix", ["svg", "png", "csv"])
def test_show_writes_files(capsys, tmp_path, suffix):
    path = tmp_path / f"fig.{suffix}"
    assert run(capsys, *SHOW, "--out", path) == (0, f"{path}\n", "")
    assert path.stat().st_size > 100


def test_check_validates_transfers(capsys, tmp_path):
    path = tmp_path / "lowered.csv"
    lists = add_comms(build("1f1b", 2, 2))
    path.write_text("\n".join(",".join(map(str, steps)) for steps in lists))
    code, out, _ = run(capsys, "schedule", "check", path, "--actions-only")
    assert (code, out) == (0, f"{path}: valid; 2 ranks, 2 stages, 2 micro-batches, 8 actions, "
                              "8 transfers that cannot deadlock\n")  # fmt: skip
    path.write_text(
        "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    code, out, err = run(capsys, "schedule", "check", path)
    assert (code, out) == (1, "")
    assert err.startswith("lowered.csv: blocking transfers deadlock: rank 0 at 0RECV_B0; rank 1 at 1RECV_F1\n")


@pytest.mark.parametrize(
    "arguments,message",
    [
        ("show dualpip --pp 4 --micro-batches 8", "unknown schedule 'dualpip'; did you mean 'dualpipe'?"),
        ("show dualpip", "unknown schedule 'dualpip'; did you mean 'dualpipe'?"),
        ("show dualpipe --pp 4 --micro-batches 9", "needs an even number of micro-batches >= 2 x ranks: got 9"),
        ("show dualpipe --pp 3 --micro-batches 8", "even number of pipeline ranks: got 3; use --pp 4"),
        ("show dualpipe --pp 4", "dualpipe needs --pp and --micro-batches, as in"),
        (
            "show zbv --pp 2 --micro-batches 4 --cost.F 0",
            "--cost.F must be a finite number greater than 0: got 0; use 1",
        ),
        (
            "show zbv --pp 2 --micro-batches 4 --cost.B -2",
            "--cost.B must be a finite number greater than 0: got -2; use 1",
        ),
        (
            "show zbv --pp 2 --micro-batches 4 --cost.comm -2",
            "--cost.comm must be a finite number at least 0: got -2; use 0",
        ),
        ("show zbv --pp 2 --micro-batches 4 --cost.W 2", "cost W is part of B and must be smaller"),
        ("show zbv --pp 2 --micro-batches 4 --cost.F 1 2 3", "has 3 numbers for 4 stages"),
        ("show zbv --pp 2 --micro-batches 4 --num-chunks 2", "zbv does not take a number of chunks"),
        ("show zbv --pp 2 --micro-batches 4 --out fig.pdf", "cannot write 'fig.pdf': use one of .svg, .png"),
        ("show zbv --pp 2 --micro-batches 4 --out /nowhere/at/all.svg", "the folder '/nowhere/at' does not exist"),
        ("show zbv --pp 2 --micro-batches 4 --width 10", "--width must be at least 40: got 10"),
        ("show gpipe --pp 4 --micro-batches 8 --until 32 --out a.svg", "--until must be at least 33: got 32.0"),
        ("show vpp", "unknown schedule 'vpp'; did you mean 'interleaved_1f1b'?"),
        (
            "show order.csv --pp 4",
            "order.csv defines the sizes: remove --pp, --micro-batches and --num-chunks",
        ),
        ("show nothing.csv", "nothing.csv: No such file or directory"),
        ("check nothing.csv", "nothing.csv: No such file or directory"),
        ("check ./nothing", "nothing: No such file or directory"),
        ("check ./", ".: Is a directory"),
        ("check dualpipe --pp 0 --micro-batches 4", "dualpipe needs at least one pipeline rank: got 0; use --pp 2"),
        ("check dualpipe --pp 2 --micro-batches 0", "even number of micro-batches >= 2 x ranks: got 0"),
        ("compare --stages 8 --micro-batches 1", "no schedule runs with fewer micro-batches than ranks"),
        (
            "compare --stages 8 --micro-batches 8 --cost.FB 0",
            "--cost.FB must be a finite number greater than 0: got 0; use 1",
        ),
    ],
)
def test_an_invalid_option_prints_one_line_and_exits_with_code_2(capsys, arguments, message):
    code, out, err = run(capsys, "schedule", *arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith("moe-dualpipe: error: ") and err.count("\n") == 1
    assert message in err


def test_a_file_from_a_spreadsheet_without_a_suffix(capsys, tmp_path):
    path = tmp_path / "order"
    path.write_bytes(b"\xef\xbb\xbf" + build("zbv", 2, 4).to_csv().replace("\n", "\r\n").encode())
    assert run(capsys, "schedule", "check", path, "--ep", 1)[0] == 0
    assert run(capsys, "schedule", "show", path)[1].startswith("order: 2 ranks, 4 stages, 4 micro-batches\n")


@pytest.mark.parametrize("arguments,message", [
    ("", "missing command; choose from: train, schedule, profile, data, generate, eval, export, model, plan, "
     "check"),
    ("schedule", "missing command; choose from: show, compare, fill, check"),
    ("profle", "unknown command 'profle'; did you mean 'profile'? Choose from: train, schedule, profile, data, "
     "generate, eval, export, model, plan, check"),
    ("profle run --help", "unknown command 'profle'; did you mean 'profile'? Choose from: train, schedule, profile, "
     "data, generate, eval, export, model, plan, check"),
    ("schedule shwo", "unknown command 'shwo'; did you mean 'show'? Choose from: show, compare, fill, check"),
    ("check layers", "unknown command 'layers'; choose from: parallel, cluster, experts, router, attention, block"),
    ("schedule show dualpipe --ppp 4", "unknown option --ppp; did you mean --pp?"),
    ("schedule compare", "missing --stages --micro-batches"),
    ("generate", "missing RUN"),
])  # fmt: skip
def test_an_unknown_or_missing_word_prints_one_line_and_exits_with_code_2(capsys, arguments, message):
    assert run(capsys, *arguments.split()) == (2, "", f"moe-dualpipe: error: {message}\n")


def shell(arguments, redirection):
    line = f"{sys.executable} -m moe_dualpipe.cli {arguments} {redirection}; exit ${{PIPESTATUS[0]}}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments,redirection,code,errors", [
    ("--help", "> /dev/full", 1, "moe-dualpipe: error: standard output: No space left on device\n"),
    ("schedule show 1f1b --pp 2 --micro-batches 4", "> /dev/full", 1,
     "moe-dualpipe: error: standard output: No space left on device\n"),
    ("--help", "| true", 0, ""), ("train --help-all", "| true", 0, ""),
    ("schedule show 1f1b --pp 2 --micro-batches 4", ">&- 2>&-", 0, ""),
])  # fmt: skip
def test_commands_end_without_a_traceback(arguments, redirection, code, errors):
    done = shell(arguments, redirection)
    assert (done.returncode, done.stderr) == (code, errors)


def test_a_prompt_typed_in_an_ascii_locale_is_text():
    typed = "d\u00e9f ".encode().decode("ascii", "surrogateescape")
    assert parse_arguments(["--prompt", typed]).sample.prompt == "d\u00e9f "
