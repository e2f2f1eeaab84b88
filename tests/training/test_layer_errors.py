"""What train.py prints about errors in a user's layer, and its exit code."""

import re

import pytest

from moe_dualpipe.commands.train import main
from tests.support.runs import SMALL

LINE = r"train.py: error: tests/support/broken_layers.py:\d+ in {}: {}\n"


def train(capfd, out, name, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, SMALL), "--out", str(out), "--experts", f"tests.support.broken_layers:{name}", *arguments])
    return ended.value.code, re.sub(r"\r.*\r", "", capfd.readouterr().err)


def test_an_error_in_a_layer_is_one_line_and_exits_with_code_1(tmp_path, capfd):
    code, printed = train(capfd, tmp_path, "Product")
    problem = r"RuntimeError: mat1 and mat2 shapes cannot be multiplied \(\d+x32 and 3x3\)"
    assert code == 1 and re.fullmatch(
        LINE.format(r"Product.forward \(layer 1, mlp forward, experts\)", problem), printed
    )


def test_an_error_in_a_constructor_is_one_line_and_exits_with_code_2(tmp_path, capfd):
    code, printed = train(capfd, tmp_path, "Reset")
    problem = "AttributeError: 'Reset' object has no attribute 'down'"
    assert code == 2 and re.fullmatch(LINE.format(r"Reset.reset_expert \(layer 1, experts\)", problem), printed)
