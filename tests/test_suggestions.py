"""What a message suggests is tried: typed instead of the wrong value, it is accepted. One thing is in the singular."""

import itertools
import re

import pytest

from moe_dualpipe.cli import COMMANDS, _parse, main
from moe_dualpipe.training.layout_choice import choose
from moe_dualpipe.training.options import FLAGS, OptionError, parse_arguments

BAD_ENGLISH = re.compile(
    r"\b1 (?!process\b)\w+s\b(?! x)|the 1 |\b1 \w+ (do|are|need|have) |invalid literal|INT\b|NoneType|\(1 times"
)


def suggestions(message: str) -> list[str]:
    """What `with_suggestions` appended: options as they are typed, or a number of processes."""
    found = re.search(r"[:;] use (.*)", message)
    return found[1].split(", or ") if found else []


def instead(words: list[str], way: str) -> list[str]:
    """`words` with the options of `way` instead of their own."""
    words, new = [*words], way.split()
    for option, value in zip(new[::2], new[1::2], strict=True):
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return words


# ---- Layouts of train.py ----


def layout_error(processes: int, words: list[str]) -> str:
    try:
        choose(parse_arguments(words), processes)
    except ValueError as error:
        return str(error)
    return ""


def layouts_that_do_not_fit():
    options = [
        "--pp 1", "--pp 2", "--pp 3", "--pp 4", "--pp 5", "--ep 2", "--ep 3", "--ep 4", "--ep 8",
        "--schedule dualpipe", "--schedule zbv", "--schedule interleaved_1f1b", "--batch-size 2", "--batch-size 3",
        "--batch-size 17", "--micro-batch-size 3", "--num-layers 1", "--num-layers 3", "--num-experts 6",
        "--set parallel.num_chunks=3",
    ]  # fmt: skip
    pairs = [[], *([one] for one in options), *([a, b] for i, a in enumerate(options) for b in options[i + 1 :: 4])]
    for processes in (1, 6):
        for chosen in pairs:
            words = " ".join(chosen).split()
            flags = [word for word in words if word.startswith("--")]
            if len(set(flags)) == len(flags) and layout_error(processes, words):
                yield processes, words


def test_every_layout_that_an_error_suggests_is_accepted():
    tried = 0
    for processes, words in layouts_that_do_not_fit():
        message = layout_error(processes, words)
        assert "\n" not in message and not BAD_ENGLISH.search(message), message
        for way in suggestions(message):
            number = re.fullmatch(r"([\d,]+) process(?:es)?", way)
            other = (int(number[1].replace(",", "")), words) if number else (processes, instead(words, way))
            assert layout_error(*other) == "", f"{processes} {words}: {message}"
            tried += 1
    assert tried > 50


# ---- Commands ----


def run(capsys, words):
    try:
        code = main(words)
    except SystemExit as exit_:
        code = exit_.code
    return code, capsys.readouterr().err


SHOW = "schedule show"
PLAN = "plan estimate --model olmoe-1b-7b --gpu h100"


@pytest.mark.parametrize("line", [
    f"{SHOW} dualpipe --pp 3 --micro-batches 8", f"{SHOW} dualpipe --pp 4 --micro-batches 7",
    f"{SHOW} interleaved_1f1b --pp 4 --micro-batches 7",
    f"{SHOW} interleaved_1f1b --pp 2 --micro-batches 4 --num-chunks 1", f"{SHOW} 1f1b --pp 0 --micro-batches 4",
    "schedule check dualpipev --pp 2 --micro-batches 3",
    f"{PLAN} --gpus 8 --batch-size 48 --pp 3", f"{PLAN} --gpus 8 --batch-size 48 --tp 3", f"{PLAN} --gpus 8 --ep 16",
    f"{PLAN} --gpus 7 --batch-size 14 --ep 3",
    f"{PLAN} --gpus 8 --batch-size 3", f"{PLAN} --gpus 8 --micro-batch-size 3",
    f"{PLAN} --gpus 8 --batch-size 48 --cp 3",
    f"{PLAN} --gpus 8 --batch-size 48 --pp 8 --vpp 4", f"{PLAN} --gpus 8 --pp 8 --schedule dualpipe --batch-size 8",
    f"{PLAN} --gpus 6 --batch-size 48 --pp 3 --schedule dualpipe",
    "plan search --model tiny --gpu h100 --gpus 100 --batch-size 7",
])  # fmt: skip
def test_every_number_that_a_command_suggests_is_accepted(capsys, line):
    words = line.split()
    code, message = run(capsys, words)
    assert code == 2 and message.count("\n") == 1 and not BAD_ENGLISH.search(message), message
    ways = suggestions(message.strip())
    assert ways, message
    for way in ways:
        assert run(capsys, instead(words, way)) == (0, ""), f"{line}: {message}"


@pytest.mark.parametrize("typed", [
    "plot", "trian", "sched", "show", "estimate", "analyze", "profile-analyze", "checkparallel", "genrate",
    "evaluate", "help",
    "version", "--hlep", "schedule shwo", "model lst", "plan serch", "check expert", "data prep", "profile compaer",
])  # fmt: skip
def test_the_command_that_was_meant_exists(capsys, typed):
    code, message = run(capsys, typed.split())
    (meant,) = re.findall(r"; did you mean '(.*?)'\?", message)
    assert code == 2 and message.count("\n") == 1
    group = typed.split()[:-1]
    code, message = run(
        capsys, [*group, *meant.split()] if meant == "--version" else [*group, *meant.split(), "--help"]
    )
    assert (code, message) == (0, "")


@pytest.mark.parametrize("typed,flag", [
    ("--lrr 3", "--lr"), ("--epochs 3", "--steps"), ("--batch_size 8", "--batch-size"), ("--sett a=1", "--set"),
    ("--seq_len 8", "--seq-len"), ("--no-fused-los", "--fused-loss"), ("--micro-batch 1", "--micro-batch-size"),
])  # fmt: skip
def test_the_flag_of_training_that_was_meant_exists(typed, flag):
    with pytest.raises(OptionError, match=f"unknown option '{typed.split()[0]}'; did you mean {flag}\\?"):
        parse_arguments(typed.split())
    assert flag == "--set" or flag.removeprefix("--") in FLAGS


WRONG_VALUES = ["", "x", "-1", "nan", "9" * 40, "ü\n", "--"]
SIMILAR_VALUES = ["1.5", "0", "1e400", "None", "true", "[1]"]
VALUES = pytest.mark.parametrize("values", [
    pytest.param(WRONG_VALUES, id="wrong"), pytest.param(SIMILAR_VALUES, id="similar", marks=pytest.mark.long),
])  # fmt: skip


NEEDED = {
    "schedule compare": "--stages 8 --micro-batches 8", "plan estimate": "--model tiny --gpu h100 --gpus 8",
    "plan search": "--model tiny --gpu h100 --gpus 8", "profile compare": "a b", "model list": "", "profile run": "",
}  # fmt: skip


@VALUES
@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name not in ("train", "check parallel", "check cluster")]
)
def test_wrong_values_of_every_option_of_a_command_are_one_line(capsys, name, values):
    """Options are read from the help, so that a new one is tried, too."""
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    options, refused = sorted({*re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out)} - {"--help"}), 0
    for option in options:
        for value in values:
            try:
                _parse([*name.split(), *NEEDED.get(name, "a").split(), option, value])
            except ValueError as error:
                refused += 1
                assert str(error).isprintable() and not BAD_ENGLISH.search(str(error)), (option, value)
                assert re.match(r"--|unknown |unexpected: |missing |cost W ", str(error)), (option, value)
    assert refused or not {*options} - {"--comm", "--compute", "--json", "--out", "--phases", "--steps"}  # texts


@VALUES
def test_wrong_values_of_every_option_of_training_print_one_line(values):
    for flag, value in itertools.product(FLAGS, values):
        try:
            parse_arguments([f"--{flag}", value])
        except ValueError as error:
            assert "\n" not in str(error) and not BAD_ENGLISH.search(str(error)), str(error)
