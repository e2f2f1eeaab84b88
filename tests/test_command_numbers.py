"""Every option of `moe-dualpipe` that is a number, with a number that makes no sense: one line, exit code 2."""

import pytest

from moe_dualpipe.cli import main

COMMANDS = {
    "schedule show interleaved_1f1b": (["--pp 2", "--micro-batches 4", "--num-chunks 2"], ["--width"]),
    "schedule check interleaved_1f1b": (
        ["--pp 2", "--micro-batches 4", "--num-chunks 2"],
        ["--ep", "--num-layers", "--dense-layers", "--mtp-layers"],
    ),
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
def test_a_number_without_sense_is_refused_in_one_line(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LICENSE").write_text("some words " * 99)
    required, others = COMMANDS[command]
    for flag in [*(words.split()[0] for words in required), *others]:
        real = flag.startswith("--cost") or flag in ("--temperature", "--top-p", "--link-gbps", "--link-latency-us")
        for value in ("nan", "-1") if real else (str(10**30),):
            given = [word for words in required if words.split()[0] != flag for word in words.split()]
            assert main([*command.split(), *given, flag, value]) == 2, (flag, value)
            out, error = capsys.readouterr()
            assert out == "" and error.startswith("moe-dualpipe: error: ") and error.count("\n") == 1, (flag, value)
            assert len(error) < 300
            assert "no checkpoint" not in error and "No such file" not in error, error  # it is about the number
