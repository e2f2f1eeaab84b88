"""Help, the version and invalid options need no torch, whose import takes seconds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_dualpipe import __version__

ROOT = Path(__file__).parents[1]
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
        [sys.executable, "-c", PROGRAM, json.dumps(commands)], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    ended = json.loads(done.stdout)
    for arguments, (*_, imported) in zip(commands, ended, strict=True):
        assert not imported, f"{arguments} imports {imported}"
    return [tuple(outcome[:3]) for outcome in ended]


@pytest.fixture(scope="module")
def helps():
    """What `--help` prints, for each command that is listed anywhere."""
    found, level = {}, [()]
    while level:
        ended = run_without_torch(*([*command, "--help"] for command in level))
        assert all((code, err) == (0, "") for code, _, err in ended)
        helps = {command: out for command, (_, out, _) in zip(level, ended, strict=True)}
        found |= helps
        listed = {command: re.findall(r"^ +[•*] (\w+)", text, re.MULTILINE) for command, text in helps.items()}
        level = [(*command, name) for command, names in listed.items() for name in names]
    return {" ".join(["moe-dualpipe", *command]): text for command, text in found.items()}


def test_help_needs_no_torch_and_starts_with_the_usage(helps):
    assert {"moe-dualpipe", "moe-dualpipe train", "moe-dualpipe data", "moe-dualpipe profile run"} <= {*helps}
    for command, text in helps.items():
        assert text.startswith(f"usage: {command} ["), command


def options_in(text):
    """The words and the help text of each option. Output that is not to a terminal has no frames."""
    for entry in re.findall(r"^  (?:--?\w|[A-Z]{2}).*\n(?:  +(?!--?\w|[A-Z]{2})\S.*\n)*", text, re.MULTILINE):
        words, description = [], []
        for line in entry.splitlines():
            parts = ["", line] if line.startswith(" " * 6) else re.split(r" {2,}", line.strip(), maxsplit=1)
            words.append(parts[0])
            description += parts[1:]
        yield "".join(words), " ".join(" ".join(description).split())


def test_every_option_has_a_help_text(helps):
    found = {(command, words): text for command, help_ in helps.items() for words, text in options_in(help_)}
    for option, text in found.items():
        assert re.sub(r"\((default: .*|required|optional)\)$", "", text).strip(), option
    flags = {words.split()[0].rstrip(",") for _, words in found}
    assert {"--pp", "--optim.lr", "--model.z-loss", "--eval-every", "--cost.FB", "--link-gbps", "RUN", "--out"} <= flags
    assert len(found) > 140


# Text that the user is free to choose. All other texts are one of a few names, which the help lists.
FREE = {
    *("--data", "--data-field", "--out", "--export", "--resume", "--weights", "--wandb", "--prompt"),
    *("--comm-pattern", "--comm", "--compute", "--steps"),  # of profile analyze
    *("--model", "--gpu", "--software", "--loads"),  # of plan
    *("--staging", "--data-cache", "--tokenizer", "--field", "--experts", "--router", "--attention", "--block"),
    "--include-path",
    *(
        f"--model.{part}{options}"
        for part in ("experts", "router", "attention", "block")
        for options in ("", "-options")
    ),
}


def test_every_option_with_a_fixed_set_of_values_lists_them(helps):
    listed = {}
    for command, text in helps.items():
        for words, _ in options_in(text):
            flag, _, value = words.partition(" ")
            assert "STR" not in value or flag in FREE, f"{command} {words}"
            if value.startswith("{") and value != "{None}|STR":
                listed[command, flag] = value
    train = "moe-dualpipe train"
    assert listed[train, "--preset"].startswith("{tiny,small,") and "qwen3-30b-a3b" in listed[train, "--preset"]
    assert listed[train, "--schedule"].startswith("{auto,gpipe,") and listed[train, "--schedule"].endswith("dualpipev}")
    assert listed[train, "--device"] == "{auto,cpu,cuda}" and listed[train, "--optim.name"] == "{adamw,muon}"


def test_the_version():
    ended = run_without_torch(["--version"], ["train", "--version"])
    assert ended == [(0, f"moe-dualpipe {__version__}\n", "")] * 2


def test_an_invalid_option_needs_no_torch_and_names_the_nearest_value():
    cases = {
        "train --preset tinny": "unknown preset 'tinny'; did you mean 'tiny'? Choose from: tiny, small, ",
        "train --device cdua": "unknown --device 'cdua'; did you mean 'cuda'? Choose from: auto, cpu, cuda",
        "train --optim.name adam": "unknown --optim.name 'adam'; did you mean 'adamw'? Choose from: adamw, muon",
        "train --recompute attn": "unknown --recompute 'attn'; ",
        "train --stesp 3": "Unrecognized options: --stesp, 3. Perhaps you meant: --steps INT",
        "profile run --mode prefil": "unknown --mode 'prefil'; did you mean 'prefill'? Choose from: train, ",
    }
    ended = run_without_torch(*(command.split() for command in cases))
    for (command, message), (code, out, err) in zip(cases.items(), ended, strict=True):
        program = "moe-dualpipe train" if command.startswith("train") else "moe-dualpipe"
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"{program}: error: {message}"), err
