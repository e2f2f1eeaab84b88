"""`moe-dualpipe eval` and docs/training.md: what is printed, for text in every form, and what cannot be evaluated."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_dualpipe import cli
from moe_dualpipe.checkpoint import open_model
from moe_dualpipe.inference import stream_losses
from tests.support.ranks import run_ranks
from tests.support.runs import settings, train

PAGE = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
SHOWN = re.findall(r"```\n\$ moe-dualpipe (eval [^\n]*)\n(.+?)```", PAGE, re.DOTALL)
TEXT = "".join(f"line {i} of é notes: {'do re mi fa so la'[i % 17 :]}\n" for i in range(400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of a model of bytes, the text that it is evaluated on, and the same text as token ids."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "notes.py").write_text(TEXT)
    run_ranks(1, train, settings(folder / "runs" / "tiny", steps=2, seq_len=64, data=(str(folder / "notes.py"),)))
    prepare = ["data", "prepare", str(folder / "notes.py"), "--out", str(folder / "ids"), "--tokenizer", "bytes"]
    assert cli.main(prepare) == 0
    return folder


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def evaluate(capsys, *arguments):
    capsys.readouterr()
    assert cli.main(["eval", "runs/tiny", "--device", "cpu", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_numbers_are_those_of_the_losses_of_the_tokens(capsys):
    tokens, (model, _) = np.array([*TEXT.encode(), 0]), open_model("runs/tiny")
    found = evaluate(capsys, "--data", "notes.py", "--seq-len", "48", "--batch-size", "5")
    loss = torch.cat([*stream_losses(model, tokens, 48)]).mean().item()
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-5)  # a token is a byte
    assert found["tokens"] == found["bytes"] == len(tokens) - 1
    assert found["tokens_per_second"] > 0

    start = evaluate(capsys, "--data", "notes.py", "--seq-len", "48", "--max-tokens", "100")
    assert start["tokens"] == 100
    assert start["loss"] == pytest.approx(torch.cat([*stream_losses(model, tokens[:101], 48)]).mean().item(), rel=1e-5)
    strided = evaluate(capsys, "--data", "notes.py", "--seq-len", "48", "--stride", "12")
    assert (strided["tokens"], strided["stride"]) == (found["tokens"], 12)
    assert strided["loss"] != found["loss"]


def test_text_in_every_form_has_the_same_loss(capsys):
    expected = evaluate(capsys, "--data", "notes.py", "--max-tokens", "300")["loss"]
    Path("notes.jsonl").write_text(json.dumps({"body": TEXT}) + "\n")
    (Path("notes") / "below").mkdir(parents=True)
    shutil.copyfile("notes.py", "notes/below/notes.py")
    for data in (["notes.jsonl", "--data-field", "body"], ["notes"], ["note*.py"], ["ids/train.bin"]):
        assert evaluate(capsys, "--max-tokens", "300", "--data", *data)["loss"] == expected, data
    held_out = evaluate(capsys, "--data", "ids")
    assert held_out["loss"] == evaluate(capsys, "--data", "ids/held_out.bin")["loss"] != expected


def test_the_page_shows_what_is_printed(capsys):
    """Up to the numbers: those of the page are of a longer run."""

    def without_numbers(text):
        return re.sub(r"\d[\d,]*\.\d+|\d[\d,]*(?= tokens| of| experts)|(?<=layer )\d+", "#", text)

    assert len(SHOWN) == 2
    for command, printed in SHOWN:
        capsys.readouterr()
        assert cli.main(command.split()) == 0
        assert without_numbers(capsys.readouterr().out) == without_numbers(printed)


@pytest.mark.parametrize("arguments,message", [
    ([], "eval needs --data, the text to evaluate, or --tasks: give one of them"),
    (["--data", "notes.py", "--tasks", "a"], "eval needs --data, the text to evaluate, or --tasks: give one of them"),
    (["--data", "nowhere"], "--data nowhere: no such file or folder, and no file matches it as a glob"),
    (["--data", ""], "--data is empty: name a file, a folder, a glob"),
    (["--data", "notes.py", "--seq-len", "0"], "--seq-len must be at least 1: got 0"),
    (["--data", "notes.py", "--seq-len", "8", "--stride", "9"],
     "--stride must be at most 8: got 9; a longer one would leave out tokens"),
    (["--data", "notes.py", "--stride", "0"], "--stride must be at least 1: got 0\n"),
    (["--data", "notes.py", "--batch-size", "0"], "--batch-size must be at least 1: got 0"),
    (["--data", "notes.py", "--max-tokens", "0"], "--max-tokens must be at least 1: got 0"),
    (["--data", "notes.py", "--experts", "a:b"], "runs/tiny/checkpoints/step-000002 has experts 'swiglu', not 'a:b'"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_invalid_options_print_one_line(refused, arguments, message):
    assert refused("eval", "runs/tiny", *arguments).startswith(message)


def test_text_of_another_tokenizer_is_an_error(refused, tmp_path):
    assert cli.main(["data", "prepare", "notes.py", "--out", str(tmp_path / "bpe"), "--vocab-size", "300"]) == 0
    error = refused("eval", "runs/tiny", "--data", tmp_path / "bpe")
    assert re.search(r"held_out\.bin has the tokenizer BPE of \d+ tokens, but the model has bytes\n$", error)
