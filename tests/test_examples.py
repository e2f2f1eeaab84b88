"""Invalid options of the examples print one line and exit with code 2."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    "arguments,message",
    [
        ("own_stages.py", "each rank is a process: start them with torchrun --nproc-per-node 2 examples/own_stages.py"),
        ("overlapped_pair.py --ranks 7", "32 experts cannot be divided evenly over 7 ranks"),
        ("overlapped_pair.py --gb-per-s 0", "a link needs a positive bandwidth: got 0.0 GB/s"),
        ("fused_experts.py --top-k 9", "k must be from 1 to 4, the number of eligible experts: got 9"),
    ],
)
def test_an_invalid_option_of_an_example(monkeypatch, capsys, arguments, message):
    name, *options = arguments.split()
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # fused_experts.py sets it
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"{name}: error: {message}\n"
