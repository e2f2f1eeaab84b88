"""User modules written as segments, and the errors that they get."""

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Completed
from moe_dualpipe.overlap import Comm, Compute, Engine, PrepareComm, Segmented, in_layer
from moe_dualpipe.overlap.segmented import run_on
from tests.support.segments import doubled, module_of


def computes_between_yields(self, x):
    y = yield Compute("lin", self.lin, x)
    return (yield Compute("add", torch.add, y * 2, y))


def sends_what_no_segment_computed(self, x):
    return (yield Comm("double", doubled, doubled, self.lin(x)))


def captures(self, x):
    """The gradient of y would be computed after the backward of the segment that produced it, and would be lost."""
    y = yield Compute("lin", self.lin, x)
    z = yield Compute("captures", lambda x: x + y, x)
    moved = yield Comm("double", doubled, doubled, z)
    w = yield Compute("sin", torch.sin, y)
    return (yield Compute("add", torch.add, moved, w))


def returns_too_few_gradients(self, x):
    y = yield Compute("lin", self.lin, x)
    return (yield Comm("two", lambda *t: Completed(t), lambda *_: Completed(()), y, y))


def returns_a_nested_tuple(self, x):
    y = yield Compute("lin", self.lin, x)
    return y, [y]


@pytest.mark.parametrize("segments,error,problem", [
    (computes_between_yields, TypeError, "between two yields, pass tensors on, but do not compute"),
    (sends_what_no_segment_computed, TypeError, "is not the output of a segment"),
    (captures, RuntimeError, "a segment used a tensor that is not among its inputs"),
    (returns_too_few_gradients, ValueError, "the backward of a Comm returned 0 gradients for 2 inputs"),
    (returns_a_nested_tuple, TypeError, "must return a tensor or a flat tuple: got tuple"),
    (Segmented.segments, NotImplementedError, r"Mine must define segments\(\)"),
])  # fmt: skip
def test_what_segments_may_not_do(segments, error, problem):
    with pytest.raises(error, match=problem):
        module_of(segments, lin=nn.Linear(3, 3))(torch.randn(2, 3)).sum().backward()


def boom(*_):
    raise ArithmeticError("boom")


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, *_):
        boom()


class Waits:
    def wait(self):
        boom()


FAILURES = {
    "in layer 7, inner forward": lambda x: iter_of(Compute("inner", boom, x)),
    "in layer 7, inner backward": lambda x: iter_of(Compute("inner", Fails.apply, x)),
    "in layer 7, move forward": lambda x: iter_of(Comm("move", boom, doubled, x)),
    "in layer 7, move backward": lambda x: iter_of(Comm("move", doubled, boom, x)),
    "in layer 7, wait for move forward": lambda x: iter_of(Comm("move", lambda _: Waits(), doubled, x)),
    "in layer 7, wait for move backward": lambda x: iter_of(Comm("move", doubled, lambda _: Waits(), x)),
    "in layer 7, prepare plan forward": lambda x: iter_of(PrepareComm("plan", boom, x)),
}


def iter_of(segment):
    result = yield segment
    return (yield Compute("end", torch.sum, result))


def test_the_innermost_annotation_is_what_the_engine_runs():
    engine, seen = Engine(torch.device("cpu")), []

    class Watching:
        def wait(self):
            seen.append(engine.running)
            return (torch.ones(2),)

    def segments(_self, x):
        y = yield Comm("move", lambda _: Watching(), doubled, x)
        return (yield Compute("end", lambda y: seen.append(engine.running) or y, y))

    with run_on(engine):
        module_of(segments)(torch.ones(2))
    assert seen == [("wait for move(F)", None), ("end(F)", None)] and engine.running is None


@pytest.mark.parametrize("where", FAILURES)
def test_an_error_names_segment_and_layer(where):
    def segments(self, x):
        y = yield Compute("lin", self.lin, x)
        return (yield from in_layer(7, FAILURES[where](y)))

    with pytest.raises(ArithmeticError, match="boom") as error:
        module_of(segments, lin=nn.Linear(3, 3))(torch.randn(2, 3)).sum().backward()
    assert where in error.value.__notes__
