"""Errors in a user's code: the line that is to blame, what is known about it, and what commands print."""

import sys
import sysconfig
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from moe_dualpipe.errors import (
    CodeLine,
    LayerError,
    _owner,
    describe_user_error,
    error_text,
    fault_of,
    in_context,
    user_error,
    user_line,
    without_frames,
)
from moe_dualpipe.overlap import Compute, Segmented, in_layer
from moe_dualpipe.schedule import parse

FILE = str(Path(__file__).relative_to(Path.cwd()))


def scale(x):
    return x @ torch.zeros(3, 3)


class Wrong(nn.Module):
    def forward(self, x):
        return scale(x)


class Layer(Segmented):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def segments(self, x):
        return (yield from in_layer(3, self.own_segments(x)))

    def own_segments(self, x):
        return (yield Compute("mlp", self.function, x))


def error_of(function, *arguments):
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def line_of(function, text):
    """The number of the line with `text` in `function`."""
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines[first - 1 :], first) if text in line)


def test_the_innermost_line_of_the_user_is_named_with_its_layer():
    error = error_of(Layer(Wrong()), torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as torch_error:
        _ = torch.ones(2, 4) @ torch.ones(3, 3)
    message = f"RuntimeError: {torch_error.value}"
    assert user_error(error) == f"{FILE}:{line_of(scale, '@')} in scale (layer 3, mlp forward): {message}"
    assert error_text(error, "train.py") == f"train.py: error: {user_error(error)}\n"
    full = error_text(error, "train.py", full=True)
    assert (
        full == "".join(traceback.format_exception(error))
        and "in advance" in full
        and full.endswith("\nin layer 3, mlp forward\n")
    )


def test_an_error_of_the_package_keeps_its_traceback():
    error = error_of(parse, "0X0")
    assert user_line(error) is None and user_error(error) is None and fault_of(error) == ""
    assert error_text(error, "train.py") == "".join(traceback.format_exception(error))
    error = error_of(Layer(nn.Linear(3, 3)), torch.ones(2, 4))
    assert user_error(error) is None
    assert "in advance" in error_text(error, "train.py")


def test_an_error_without_a_line_of_the_user_is_reported_where_the_running_class_is_defined():
    """Such as that of a torch module that a user's function returned."""
    error = error_of(Layer(nn.Linear(3, 3)), torch.ones(2, 4))
    in_context(error, "experts", Wrong)
    place = f"{FILE}:{line_of(Wrong.forward, 'def')} in Wrong.forward"
    assert user_error(error).startswith(f"{place} (experts, layer 3, mlp forward): RuntimeError: ")
    in_package = error_of(parse, "0X0")
    in_context(in_package, "experts", Wrong)
    assert user_error(in_package) is None


def test_notes_are_shown_outermost_first_and_an_error_about_a_layer_without_its_type():
    error = LayerError("Own must return [3]", CodeLine("own.py", 7, "Own.forward"))
    for where in ("experts", "layer 2, mlp forward", "layer 2, mlp forward", "step 5", "rank 1"):
        in_context(error, where)
    error.add_note("see the manual")
    context = "rank 1, step 5, layer 2, mlp forward, experts"
    assert user_error(error) == f"own.py:7 in Own.forward ({context}): Own must return [3]"
    assert "\nin step 5\nin rank 1\nsee the manual\n" in error_text(error, "train.py", full=True)


@pytest.mark.parametrize("code", [0, None, 3])
def test_a_layer_that_exits_is_an_error(code):
    """Exit code 0 would say that the run is complete."""

    def leave(_x):
        sys.exit(code)

    error = error_of(Layer(leave), torch.ones(2, 4))
    assert isinstance(error, LayerError)
    line = line_of(leave, "sys.exit")
    assert user_error(error) == f"{FILE}:{line} in leave (layer 3, mlp forward): a layer called sys.exit({code})"


def test_an_error_that_needs_no_frames_is_one_line():
    error = error_of(parse, "0X0")
    without_frames(error)
    assert error_text(error, "train.py") == f"train.py: error: {error}\n"
    assert fault_of(error) == str(error)


def test_errors_at_the_same_line_are_alike_even_if_their_messages_differ():
    first, second = (error_of(Layer(Wrong()), torch.ones(rows, 4)) for rows in (2, 7))
    assert str(first) != str(second) and fault_of(first) == fault_of(second) != ""
    another_type = error_of(Layer(scale), "no tensor")
    assert user_line(another_type) == user_line(first) and fault_of(another_type) != fault_of(first)


def test_a_syntax_error_is_in_its_own_line(tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    layer = Layer(lambda _: compile((tmp_path / "broken.py").read_text(), str(tmp_path / "broken.py"), "exec"))
    error = error_of(layer, torch.ones(2))
    expected = f"{tmp_path}/broken.py:2 (layer 3, mlp forward): SyntaxError: invalid syntax"
    assert describe_user_error(error) == user_error(error) == expected


@pytest.mark.parametrize("file,owner", [
    (FILE, "user"), ("<ipython-input-3>", "user"), ("<string>", "library"), ("<frozen importlib>", "library"),
    (f"{sysconfig.get_path('stdlib')}/json/decoder.py", "library"),
    (f"{sysconfig.get_path('stdlib')}/site-packages/own/layer.py", "library"),  # as without a virtual environment
    (torch.nn.__file__, "library"), ("models/moe.py", "package"),
])  # fmt: skip
def test_whose_code_a_file_has(file, owner):
    assert _owner(file) == owner


def test_without_a_free_file_descriptor_an_error_is_one_line():
    """torch and gloo report it as a RuntimeError from C++."""
    said = "program: error: no free file descriptor: raise the limit, as with `ulimit -n 65536`\n"
    for error in (
        RuntimeError("[enforce fail at loop.cc:105] epoll_create: Too many open files"),
        OSError(24, "Too many open files", "x"),
    ):
        assert error_text(error, "program") == said
    assert error_text(RuntimeError("other"), "program").startswith("RuntimeError: other")
