"""Tracebacks of errors in a user's code: only that code, and the notes of the engine."""

import sys

import pytest
import torch

from moe_dualpipe.health.user_frames import short_tracebacks, user_traceback
from moe_dualpipe.messages import without_frames
from moe_dualpipe.overlap import Compute, Segmented
from moe_dualpipe.schedule import parse


def scale(x):
    return x @ torch.zeros(3, 3)


class Wrong(torch.nn.Module):
    def forward(self, x):
        return scale(x)


class Layer(Segmented):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def segments(self, x):
        return (yield Compute("mlp", self.function, x))


def error_of(function, *arguments):
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def frames_of(text):
    return [line.split(" in ")[1] for line in text.splitlines() if line.startswith("  File ")]


def test_frames_of_torch_and_of_the_engine_are_left_out():
    text = user_traceback(error_of(Layer(Wrong()), torch.ones(2, 4)))
    first, hint, *_, error, note = text.splitlines()
    assert (first, hint) == ("Traceback (most recent call last):", "  (calls in torch and moe_dualpipe are left out)")
    assert frames_of(text) == ["forward", "scale"]
    assert "return x @ torch.zeros(3, 3)" in text
    assert error.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x4 and 3x3)")
    assert note == "during mlp(F)"


def test_an_error_in_the_package_that_a_user_calls_keeps_the_frames_of_both():
    text = user_traceback(error_of(Layer(lambda x: parse(str(x.sum().item()))), torch.ones(2)))
    assert frames_of(text) == ["<lambda>", "parse"]


def test_an_error_of_the_package_alone_keeps_all_frames():
    error = error_of(parse, "0X0")
    error.__traceback__ = error.__traceback__.tb_next  # without this file
    text = user_traceback(error)
    assert frames_of(text) == ["parse"]
    assert "left out" not in text
    error = error_of(Layer(torch.nn.Linear(3, 3)), torch.ones(2, 4))
    text = user_traceback(error)
    assert frames_of(text)[0] == "error_of"
    assert {"advance", "_call_impl"} <= {*frames_of(text)}


def test_an_error_whose_message_says_it_all_has_no_frames():
    def fail(_x):
        raise without_frames(ValueError("Wrong must return a tensor"))

    text = user_traceback(error_of(Layer(fail), torch.ones(2, 4)))
    assert text == "ValueError: Wrong must return a tensor\nduring mlp(F)\n"


@pytest.mark.parametrize("code", [0, None, 3])
def test_a_layer_that_exits_is_an_error(code):
    """Exit code 0 would say that the run is complete."""

    def leave(_x):
        sys.exit(code)

    text = user_traceback(error_of(Layer(leave), torch.ones(2, 4)))
    assert text.endswith(f"\nRuntimeError: a layer called sys.exit({code})\nduring mlp(F)\n")
    assert frames_of(text) == ["leave"]


def test_causes_are_shown_in_the_same_way():
    def fail(x):
        try:
            scale(x)
        except RuntimeError as error:
            raise ValueError("wrong") from error

    text = user_traceback(error_of(Layer(fail), torch.ones(2, 4)))
    assert frames_of(text) == ["fail", "scale", "fail"]
    assert "direct cause" in text


def test_the_error_that_ends_a_process_is_printed_short(monkeypatch, capsys):
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda *details: printed.append(details))
    with pytest.raises(RuntimeError) as caught, short_tracebacks():
        Layer(Wrong())(torch.ones(2, 4))
    sys.excepthook(RuntimeError, caught.value, caught.tb)
    assert frames_of(capsys.readouterr().err) == ["forward", "scale"]
    other = KeyboardInterrupt()
    sys.excepthook(KeyboardInterrupt, other, None)
    assert printed == [(KeyboardInterrupt, other, None)]
