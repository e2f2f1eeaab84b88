"""Any program of segments has the gradients of plain autograd, and waits once for each transfer; and errors."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Completed
from moe_dualpipe.models import next_token_loss
from moe_dualpipe.overlap import Collective, Comm, Compute, Engine, PrepareComm, Segmented, in_layer
from tests.support.engines import run_on
from tests.support.pairs import stage, tokens
from tests.support.properties import given, settings, st
from tests.support.segments import doubled, module_of

DOUBLED = Collective(doubled, doubled)

MOVES = ("move", "collective")


class Waited:
    """A transfer that records when it starts and when it is waited for."""

    def __init__(self, log, name, *tensors):
        self.log, self.name, self.tensors = log, name, tensors
        log.append(name)

    def wait(self):
        self.log.append(f"{self.name} arrived")
        return self.tensors


class Held:
    """What a transfer keeps for its backward, such as a route."""


class Program(Segmented):
    """Each step is a kind of segment and the values that it reads; value 0 is the input.

    A transfer of x returns 2x, 3x and integers, of which later segments use some or none.
    """

    def __init__(self, steps, end):
        super().__init__()
        self.steps, self.end, self.log, self.held = steps, end, [], weakref.WeakSet()
        self.weights = nn.Parameter(torch.rand(1 + len(steps), 3, dtype=torch.float64))

    def compute(self, i, *args):
        kind, reads = self.steps[i - 1] if i else ("scale", self.end)
        given, values = iter(args), []
        for read in reads:
            values.append(next(given))
            if read and self.steps[read - 1][0] in MOVES:
                triple, number = next(given), next(given)
                values.append(number if i % 2 else triple)
        if kind == "mask":
            return (values[0] > 0.5).double()
        return torch.stack([value.double().sin() for value in values]).sum(0) * self.weights[i]

    def there(self, x):
        return 2 * x, 3 * x, torch.arange(3)

    def back(self, i, _held, double, triple):
        return Waited(self.log, f"{i} back", 2 * double + 3 * triple)

    def segments(self, x, number):
        values = [x]
        for i, (kind, reads) in enumerate(self.steps, 1):
            args = [values[read] for read in reads]
            if kind in MOVES:
                held = Held()
                self.held.add(held)
                fns = lambda x, i=i: Waited(self.log, f"{i} there", *self.there(x)), partial(self.back, i, held)
                values.append((yield Comm("move", Collective(*fns, joint=kind == "collective"), *args)))
                del held, fns
            else:
                values.append((yield Compute("compute", partial(self.compute, i), *args)))
        end = yield Compute("end", partial(self.compute, 0), *(values[read] for read in self.end))
        return end, x, number, torch.arange(2)

    def plain(self, x):
        values = [(x,)]
        for i, (kind, reads) in enumerate(self.steps, 1):
            args = [t for read in reads for t in values[read]]
            values.append(self.there(*args) if kind in MOVES else (self.compute(i, *args),))
        return self.compute(0, *(t for read in self.end for t in values[read]))

    def have_backward(self):
        """The transfers that have one: collective ones, and those of values that need a gradient."""
        needs = [True]
        for kind, reads in self.steps:
            needs.append(kind in ("compute", "collective") or (kind == "move" and needs[reads[0]]))
        return [i for i, (kind, _) in enumerate(self.steps, 1) if kind in MOVES and needs[i]]


def grads_of(*tensors):
    """Their gradients, which are dropped; a transfer back gives zeros where autograd gives none."""
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    return grads


@st.composite
def programs(draw):
    steps = []
    for i in range(draw(st.integers(2, 8))):
        kind = draw(st.sampled_from(["compute", "mask", *MOVES]))
        single = [j for j in range(i + 1) if kind not in MOVES or j == 0 or steps[j - 1][0] not in MOVES]
        reads = st.lists(st.sampled_from(single), min_size=1, max_size=1 if kind != "compute" else 3)
        steps.append((kind, draw(reads)))
    return Program(steps, draw(st.lists(st.integers(0, len(steps)), min_size=1, max_size=3)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs(), programs(), st.sampled_from([None, False, True]))
def test_any_program_has_the_gradients_of_plain_autograd_and_waits_once_for_each_transfer(one, other, queued):
    """One after the other, or the backward of one beside the forward of the other, in the order of a CPU or a GPU."""
    inputs = [torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    end, x, number, _ = one(inputs[0], 7)
    after = torch.ones(3, dtype=torch.float64, requires_grad=True)  # a layer after the program
    loss = (end * x * after).sum()
    assert number == 7
    if queued is None:
        loss.backward()
        second = other(inputs[1], 7)[0].sum()
    else:
        engine, criterion = Engine(torch.device("cpu"), queued), lambda end, *_: end.sum()
        second = Program.overlapped_forward_backward(
            other, [inputs[1], 7], criterion, None, one, loss, None, None, engine=engine
        )[1]
    second.backward()
    torch.testing.assert_close(after.grad, end * x)
    for program, x, result in ((one, inputs[0], loss), (other, inputs[1], second)):
        ours = grads_of(x, program.weights)
        expected = program.plain(x)
        expected = (expected * x if program is one else expected).sum()
        expected.backward()
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(ours, grads_of(x, program.weights))
        assert not program.held  # although the loss still exists
        for i, (kind, _) in enumerate(program.steps, 1):
            names = [f"{i} there", f"{i} back"][: (kind in MOVES) + (i in program.have_backward())]
            log = [text for text in program.log if text.startswith(f"{i} ")]
            assert log == [text for name in names for text in (name, f"{name} arrived")]


def gathers_its_weight(self, x):
    y = yield Compute("scale", torch.mul, x, self.weight)  # a parameter may be an input of any segment
    doubled_weight = yield Comm("move", DOUBLED, self.weight)
    return (yield Compute("add", torch.add, y, doubled_weight)), self.weight


def test_a_parameter_may_be_an_input_of_a_transfer_and_an_output():
    module = module_of(gathers_its_weight, weight=nn.Parameter(torch.tensor([2.0, 3.0])))
    x = torch.tensor([5.0, 7.0], requires_grad=True)
    y, weight = module(x)
    (y.sum() + weight.sum()).backward()
    assert y.tolist() == [14, 27] and weight.tolist() == [2, 3]
    assert x.grad.tolist() == [2, 3] and module.weight.grad.tolist() == [5 + 2 + 1, 7 + 2 + 1]


# ---- Errors ----


def test_a_second_backward_is_an_error():
    loss = next_token_loss(stage()(tokens(1)), tokens(1))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has already run"):
        loss.backward()


def computes_between_yields(self, x):
    y = yield Compute("lin", self.lin, x)
    return (yield Compute("add", torch.add, y * 2, y))


def sends_what_no_segment_computed(self, x):
    return (yield Comm("double", DOUBLED, self.lin(x)))


def captures(self, x):
    """The gradient of y would be computed after the backward of the segment that produced it, and would be lost."""
    y = yield Compute("lin", self.lin, x)
    z = yield Compute("captures", lambda x: x + y, x)
    moved = yield Comm("double", DOUBLED, z)
    w = yield Compute("sin", torch.sin, y)
    return (yield Compute("add", torch.add, moved, w))


def returns_too_few_gradients(self, x):
    y = yield Compute("lin", self.lin, x)
    return (yield Comm("two", Collective(lambda *t: Completed(t), lambda *_: Completed(())), y, y))


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
    "in layer 7, move forward": lambda x: iter_of(Comm("move", Collective(boom, doubled), x)),
    "in layer 7, move backward": lambda x: iter_of(Comm("move", Collective(doubled, boom), x)),
    "in layer 7, wait for move forward": lambda x: iter_of(Comm("move", Collective(lambda _: Waits(), doubled), x)),
    "in layer 7, wait for move backward": lambda x: iter_of(Comm("move", Collective(doubled, lambda _: Waits()), x)),
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
        y = yield Comm("move", Collective(lambda _: Watching(), doubled), x)
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
