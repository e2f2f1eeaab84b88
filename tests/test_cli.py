"""The console script prints what the library computes, and one line for an invalid option."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.messages import printable, quoted, shell_word, unknown_name
from moe_dualpipe.schedule import Costs, add_comms, build, fill, least_time, simulate
from moe_dualpipe.training.options import parse_arguments
from tests.support.runs import ROOT

SHOW = ["schedule", "show", "dualpipe", "--pp", "4", "--micro-batches", "10"]


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_fill_takes_the_costs_of_a_profiled_run_and_writes_what_train_runs(capsys, refused, tmp_path):
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
    assert "report.json has no costs of a pipeline" in refused(*fill_it, "--costs", tmp_path / "run")


@pytest.mark.parametrize("suffix", ["svg", "png", "csv"])
def test_show_writes_files(capsys, tmp_path, suffix):
    path = tmp_path / f"fig.{suffix}"
    assert run(capsys, *SHOW, "--out", path) == (0, f"{path}\n", "")
    assert path.stat().st_size > 100


def test_check_validates_transfers(capsys, tmp_path):
    path = tmp_path / "lowered.csv"
    lists = add_comms(build("1f1b", 2, 2))
    path.write_text("\n".join(",".join(map(str, steps)) for steps in lists))
    code, out, _ = run(capsys, "schedule", "check", path)
    assert (code, out) == (0, f"{path}: valid; 2 ranks, 2 stages, 2 micro-batches, 8 actions, "
                              "8 transfers that cannot deadlock\n")  # fmt: skip
    path.write_text(
        "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    code, out, err = run(capsys, "schedule", "check", path)
    assert (code, out) == (1, "")
    assert err.startswith("lowered.csv: blocking transfers deadlock: rank 0 at 0RECV_B0; rank 1 at 1RECV_F1\n")


@pytest.mark.parametrize("program", [["train.py"], ["-m", "moe_dualpipe", "generate", "run"]], ids=str)
def test_ctrl_c_during_the_imports_prints_nothing(tmp_path, program):
    (tmp_path / "difflib.py").write_text("import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(9)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, *program], cwd=ROOT, env=environment, capture_output=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.touch() or os.truncate(path, 1 << 27)])
def test_a_schedule_that_does_not_end_is_refused(refused, tmp_path, make):
    make(path := tmp_path / "mine.csv")
    assert refused("schedule", "check", path) == f"{path} is not a file of at most 67,108,864 bytes\n"


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
def test_an_invalid_option_prints_one_line_and_exits_with_code_2(refused, arguments, message):
    assert message in refused("schedule", *arguments.split())


def test_a_file_from_a_spreadsheet_without_a_suffix(capsys, tmp_path):
    path = tmp_path / "order"
    path.write_bytes(b"\xef\xbb\xbf" + build("zbv", 2, 4).to_csv().replace("\n", "\r\n").encode())
    assert run(capsys, "schedule", "check", path)[0] == 0
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
    ("schedule show dualpipe --ppp 4", "unknown option '--ppp'; did you mean --pp? --help lists all"),
    ("schedule compare", "missing --stages --micro-batches"),
    ("generate", "missing RUN"),
])  # fmt: skip
def test_an_unknown_or_missing_word_prints_one_line_and_exits_with_code_2(refused, arguments, message):
    assert refused(*arguments.split()) == f"{message}\n"


def shell(arguments, redirection):
    line = f"{sys.executable} -m moe_dualpipe {arguments} {redirection}; exit ${{PIPESTATUS[0]}}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments,redirection,code,errors", [
    ("--help", "> /dev/full", 1, "moe-dualpipe: error: standard output: No space left on device\n"),
    ("schedule show 1f1b --pp 2 --micro-batches 4", "> /dev/full", 1,
     "moe-dualpipe: error: standard output: No space left on device\n"),
    ("--help", "| true", 0, ""),
    ("schedule show 1f1b --pp 64 --micro-batches 200 --width 2000", "| true", 0, ""),  # more than a pipe holds
    ("schedule show 1f1b --pp 2 --micro-batches 4", ">&- 2>&-", 0, ""),
])  # fmt: skip
def test_commands_end_without_a_traceback(arguments, redirection, code, errors):
    done = shell(arguments, redirection)
    assert (done.returncode, done.stderr) == (code, errors)


def test_a_prompt_typed_in_an_ascii_locale_is_text():
    typed = "d\u00e9f ".encode().decode("ascii", "surrogateescape")
    assert parse_arguments(["--prompt", typed]).sample.prompt == "d\u00e9f "


# ---- Every option that is a number, with a number that makes no sense ----


COMMANDS = {
    "schedule show interleaved_1f1b": (["--pp 2", "--micro-batches 4", "--num-chunks 2"], ["--width"]),
    "schedule check interleaved_1f1b": (["--pp 2", "--micro-batches 4", "--num-chunks 2"], []),
    "schedule compare": (
        ["--stages 2", "--micro-batches 4", "--num-chunks 2"],
        ["--cost.F", "--cost.B", "--cost.comm"],
    ),
    "model show tiny": ([], ["--seq-len"]),
    "generate nowhere": (
        [],
        ["--sample-tokens", "--num", "--temperature", "--top-k", "--top-p", "--seq-len", "--seed"],
    ),
    "profile run": ([], ["--num-layers", "--ep", "--seq-len", "--tokens", "--link-gbps", "--link-latency-us"]),
    "data prepare LICENSE --out new": ([], ["--vocab-size", "--workers"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_number_without_sense_is_refused_in_one_line(refused, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LICENSE").write_text("some words " * 99)
    required, others = COMMANDS[command]
    for flag in [*(words.split()[0] for words in required), *others]:
        real = flag.startswith("--cost") or flag in ("--temperature", "--top-p", "--link-gbps", "--link-latency-us")
        for value in ("nan", "-1") if real else (str(10**30),):
            given = [word for words in required if words.split()[0] != flag for word in words.split()]
            error = refused(*command.split(), *given, flag, value)
            assert len(error) < 300, (flag, value)
            assert "no checkpoint" not in error and "No such file" not in error, error  # it is about the number


# ---- Messages show text from files on one line, without characters that change a terminal ----


CASES = {
    "plain": "plain", "grün π 🙂": "grün π 🙂", "a\nb\r\tc": r"a\nb\r\tc", "\x1b[31mred\x07": r"\x1b[31mred\x07",
    "a\u202eb\u2028\ufeff": r"a\u202eb\u2028\ufeff", "\udc80.txt": r"\udc80.txt", "back\\slash": "back\\slash",
}  # fmt: skip


@pytest.mark.parametrize("text", CASES)
def test_unprintable_characters_are_escaped(text):
    assert printable(text) == CASES[text]
    assert printable(printable(text)) == CASES[text]
    printable(text).encode()


def test_a_long_value_is_cut():
    assert printable("x" * 200) == "x" * 200
    assert printable("x" * 201) == "x" * 200 + "…"
    assert printable([1] * 1000, limit=5) == "[1, 1…"


def test_an_unknown_name_suggests_a_similar_one():
    names, aliases = ("tiny", "olmoe-1b-7b", "qwen3-30b-a3b"), {"vpp": "tiny"}
    listed = "from: tiny, olmoe-1b-7b, qwen3-30b-a3b"
    for name, meant in {"tinny": "tiny", "TINY": "tiny", "vpp": "tiny", "qw": "qwen3-30b-a3b"}.items():
        error = str(unknown_name("preset", name, names, aliases))
        assert error == f"unknown preset '{name}'; did you mean '{meant}'? Choose {listed}"
    for name in ("huge", "", "q", "\x1b" * 1000):
        assert str(unknown_name("preset", name, names)) == f"unknown preset {quoted(name, 60)}; choose {listed}"


@pytest.mark.parametrize("word", ["plain", "two words", "it's", "$a \\ü", ""])
def test_a_shell_reads_the_word_that_was_quoted(word):
    command = f"printf %s {shell_word(word)}"
    assert command.isprintable()
    assert subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout == os.fsencode(word)


@pytest.mark.parametrize("name", ["a\nb\x1b[31m.csv", "\udc80\u202e.csv", "n" * 5000 + ".csv"])
def test_errors_of_commands_are_one_short_line(name, refused):
    error = refused("schedule", "check", name)
    assert error[:-1].isprintable() and len(error) < 1000
