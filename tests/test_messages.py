"""Messages show text from files on one line, without characters that change a terminal."""

import os
import subprocess

import pytest

from moe_dualpipe import cli
from moe_dualpipe.messages import printable, quoted, shell_word, unknown_name

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
def test_errors_of_commands_are_one_short_line(name, capsys):
    assert cli.main(["schedule", "check", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moe-dualpipe: error: ") and error.endswith("\n")
    assert error[:-1].isprintable() and len(error) < 1000
