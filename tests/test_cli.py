"""The console script prints what the library computes, and one line for an invalid option."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.commands.train import main as train
from moe_dualpipe.schedule import Costs, add_comms, build, fill, least_time, simulate
from moe_dualpipe.schedule.compare import compare
from moe_dualpipe.tools.drawing.tables import comparison_table
from moe_dualpipe.tools.drawing.timeline_text import timeline_text
from moe_dualpipe.training.options import parse_arguments

SHOW = ["schedule", "show", "dualpipe", "--pp", "4", "--micro-batches", "10"]


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_show_prints_the_timeline(capsys):
    costs = ["--cost.F", "2", "--cost.B", "5", "--cost.W", "2", "--cost.FB", "6", "--cost.comm", "1"]
    timeline = simulate(build("dualpipe", 4, 10), Costs(2, 5, 2, 6, 1))
    assert run(capsys, *SHOW, *costs, "--width", 100) == (0, timeline_text(timeline, 100) + "\n", "")


def test_fill_takes_the_costs_of_a_profiled_run_and_writes_what_train_runs(capsys, tmp_path):
    cost = {"F": [24, 24], "B": [46, 46], "W": [16, 16], "FB": [59, 59], "comm": 0}
    report, out = tmp_path / "run" / "profile" / "report.json", tmp_path / "mine.csv"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"pipelines": [{"costs_ms": cost}]}))
    schedule, fill_it = build("dualpipe", 2, 4), ["schedule", "fill", "dualpipe", "--pp", 2, "--micro-batches", 4]
    code, text, _ = run(capsys, *fill_it, "--costs", tmp_path / "run", "--out", out)
    filled, c = fill(schedule, Costs(**cost)), Costs(**cost)
    assert code == 0 and text.endswith(f"\n\n{out}\n") and out.read_text() == filled.to_csv()
    steps = [simulate(schedule, c).makespan, simulate(filled, c).makespan, least_time(schedule.placement, 4, c)]
    table = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")][1:]
    assert [float(step) for _, step in table] == steps and steps[0] > steps[1] >= steps[2]
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
    assert err.splitlines() == [
        "lowered.csv: blocking transfers deadlock: rank 0 at 0RECV_B0; rank 1 at 1RECV_F1",
        "rank 0  0F0      0SEND_F0 0F1 >0RECV_B0< 0SEND_F1 0B0 0RECV_B1 0B1     ",
        "rank 1  1RECV_F0 1F0      1B0 >1RECV_F1< 1SEND_B0 1F1 1B1      1SEND_B1",
    ]


def test_check_shows_where_a_schedule_is_invalid(capsys, tmp_path):
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n")
    code, out, err = run(capsys, "schedule", "check", path)
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "order.csv: the order deadlocks: rank 0 needs 1B0 before 0B0; rank 1 needs 1F0 before 1B0",
        "rank 0  0F0   0F1 >0B0< 0B1",
        "rank 1  >1B0< 1F0 1F1   1B1",
    ]
    assert run(capsys, "schedule", "show", path)[0] == 1


def test_compare(capsys):
    arguments = ["schedule", "compare", "--stages", 8, "--micro-batches", 32]
    costs = ["--cost.F", 2, "--cost.B", 5, "--cost.W", 2, "--cost.FB", 6]
    entries = compare(8, 32, Costs(2, 5, 2, 6))
    assert run(capsys, *arguments, *costs)[:2] == (0, comparison_table(entries) + "\n")
    code, out, _ = run(capsys, *arguments, *costs, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps([entry.as_object() for entry in entries]))


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


def test_a_file_of_other_content_prints_one_line_and_exits_with_code_2(capsys, tmp_path):
    path = tmp_path / "order.csv"
    path.write_text("0F0,hello")
    code, out, err = run(capsys, "schedule", "check", path)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"moe-dualpipe: error: {path}: line 1, cell 2: not an action: 'hello'")
    for content in ("", ",,\n\n", "0REDUCE_GRAD"):
        path.write_text(content)
        code, out, err = run(capsys, "schedule", "check", path)
        assert (code, out) == (2, "")
        assert err.startswith(f"moe-dualpipe: error: {path} has no actions: write one line for each rank, such as ")
    path.write_bytes(b"\x89PNG\xff\xfe")
    assert run(capsys, "schedule", "check", path)[::2] == (2, f"moe-dualpipe: error: {path}: not a text file\n")


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
    ("--help", "| true", 0, ""),
    ("schedule show 1f1b --pp 2 --micro-batches 4", ">&- 2>&-", 0, ""),
])  # fmt: skip
def test_commands_end_without_a_traceback(arguments, redirection, code, errors):
    done = shell(arguments, redirection)
    assert (done.returncode, done.stderr) == (code, errors)


def test_names_that_a_terminal_lacks_are_escaped(monkeypatch):
    for program, words in ((main, ["--version"]), (train, ["--help"])):
        output = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
        with contextlib.suppress(SystemExit):
            program(words)
        print("grün", flush=True)
        assert output.getvalue().endswith(b"\ngr\\xfcn\n")


def test_the_installed_script_starts_without_torch():
    script = Path(sys.executable).with_name("moe-dualpipe")
    done = subprocess.run([script, *SHOW, "--width", "80"], capture_output=True, text=True, check=True)
    assert "overlapped" not in done.stderr and done.stdout.startswith("dualpipe: 4 ranks, 4 stages, 10 micro-batches")
    program = "import sys, moe_dualpipe.cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_figure_without_matplotlib_is_an_error(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(capsys, *SHOW, "--out", tmp_path / "fig.svg")
    assert (code, err) == (2, "moe-dualpipe: error: figures need matplotlib: pip install 'moe-dualpipe[viz]'\n")


@pytest.mark.parametrize("words", ["f\u00fc", "schedule show n\u00f6.csv"])
def test_an_ascii_locale_prints_one_line(words):
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "moe_dualpipe.cli", *words.split()], env=ascii_only, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.isascii() and done.stderr.count("\n") == 1
    assert done.stderr.startswith("moe-dualpipe: error: ")


def test_a_prompt_typed_in_an_ascii_locale_is_text():
    typed = "d\u00e9f ".encode().decode("ascii", "surrogateescape")
    assert parse_arguments(["--prompt", typed]).sample.prompt == "d\u00e9f "
