"""`moe-dualpipe check experts|router|attention|block`: exit codes, options and errors."""

import pytest

from moe_dualpipe.cli import main
from tests.support import broken_experts, own_layers

BROKEN, OWN = broken_experts.__file__, own_layers.__file__


@pytest.mark.parametrize("words,code,shown", [
    (["experts", f"{OWN}:VariedExpert", "--options", "factor=2", "widths=3,5"], 0, "12 checks passed, 1 warning"),
    (["experts", f"{BROKEN}:UsesTheNextExpert", "--num-experts", "6"], 1, "the result differs by"),
    (["router", "topk", "--hidden-size", "10"], 0, "13 checks passed"),
    (["attention", f"{OWN}:WithCache"], 0, "15 checks passed"),
    (["block", f"{OWN}:PlainBlock", "--options", "factor=0.5"], 0, "14 checks passed, 1 skipped"),
], ids=["options", "broken", "router", "attention", "block"])  # fmt: skip
def test_the_exit_code_says_whether_a_check_failed(capsys, words, code, shown):
    assert main(["check", *words]) == code
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("words,problem", [
    (["experts", f"{OWN}:VariedExpert", "--options", "rank=2"], "Widths has no option 'rank'; choose from: factor"),
    (["experts", f"{OWN}:Missing"], "has no Missing"),
    (["router", "topk", "--num-experts", "0"], "num_experts must be at least 1: got 0"),
    (["block", "no_such_module:X"], "cannot import the block 'no_such_module:X'"),
], ids=["options", "name", "sizes", "module"])  # fmt: skip
def test_invalid_options_are_one_line_and_exit_code_2(capsys, words, problem):
    assert main(["check", *words]) == 2
    output = capsys.readouterr()
    assert problem in output.err and output.err.count("\n") == 1 and not output.out


def test_an_exception_of_a_layer_is_one_line_and_with_traceback_all_frames(capsys):
    words = ["check", "experts", f"{BROKEN}:NeedsARow"]
    assert main(words) == 1
    table = capsys.readouterr()
    assert "broken_experts.py:" in table.out and "Traceback" not in table.out + table.err
    assert main([*words, "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err
