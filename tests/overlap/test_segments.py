"""User modules written as segments, and the errors that they get."""

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Completed
from moe_dualpipe.overlap import Comm, Compute, Engine, PrepareComm, Segmented, in_layer
from moe_dualpipe.overlap.segmented import run_on
from tests.support.segments import Twice, doubled, module_of


def both(module, expected, *inputs):
    """Assert that the module and a plain function of its parameters have equal outputs and gradients."""
    results = []
    for function in (module, expected):
        module.zero_grad()
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.stack([(i + 1) * o.square().sum() for i, o in enumerate(outputs) if o.requires_grad]).sum().backward()
        results.append([*outputs, *(p.grad for p in module.parameters()), *(x.grad for x in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_user_module():
    module = Twice()
    both(module, lambda x: 2 * module.a(x) + module.b(x), torch.randn(4, 3))


class Several(Segmented):
    """Several inputs and outputs, one of them an integer, one an input, and an unused one."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def split(self, x, y):
        return x * self.w, x + y, (x > 0).long()

    def segments(self, x, y, n):
        a, b, positive = yield Compute("split", self.split, x, y)
        yield Compute("unused", torch.sin, a)
        return a, y, b, positive, n


def test_several_inputs_and_outputs():
    module = Several()

    def plain(x, y, n):
        a, b, positive = module.split(x, y)
        return a, y, b, positive, n

    both(module, plain, torch.randn(2, 3), torch.randn(2, 3), torch.arange(2))


def test_outputs_that_the_loss_does_not_use():
    module = Several()
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    a, *_ = module(x, y, 0)
    a.sum().backward()
    assert y.grad is None
    torch.testing.assert_close(x.grad, module.w.detach().expand(2, 3))


def test_a_comm_with_an_input_that_needs_no_gradient():
    class Pair(Segmented):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def segments(self, x):
            y = yield Compute("mul", lambda x: x * self.w, x)
            pair = yield Comm("move", lambda *t: Completed(t), lambda *g: Completed(g), y, torch.arange(3.0))
            return (yield Compute("sum", lambda a, b: a * b, pair))

    module = Pair()
    both(module, lambda x: x * module.w * torch.arange(3.0), torch.randn(2, 3))


# ---- Errors ----


def test_computing_between_yields_is_an_error():
    def segments(self, x):
        y = yield Compute("lin", self.lin, x)
        return (yield Compute("add", torch.add, y * 2, y))

    with pytest.raises(TypeError, match="between two yields, pass tensors on, but do not compute"):
        module_of(segments, lin=nn.Linear(3, 3))(torch.randn(2, 3))


@pytest.mark.parametrize("kind", ["compute", "comm"])
def test_an_input_from_outside_a_segment_is_an_error(kind):
    def segments(self, x):
        if kind == "comm":
            return (yield Comm("double", doubled, doubled, self.lin(x)))
        return (yield Compute("lin", torch.sin, self.lin(x)))

    with pytest.raises(TypeError, match="is not the output of a segment"):
        module_of(segments, lin=nn.Linear(3, 3))(torch.randn(2, 3))


def test_a_captured_tensor_is_an_error():
    """Its gradient would be computed after the backward of the segment that produced it, and would be lost."""

    def segments(self, x):
        y = yield Compute("lin", self.lin, x)
        z = yield Compute("captures", lambda x: x + y, x)
        moved = yield Comm("double", doubled, doubled, z)
        w = yield Compute("sin", torch.sin, y)
        return (yield Compute("add", torch.add, moved, w))

    with pytest.raises(RuntimeError, match="a segment used a tensor that is not among its inputs"):
        module_of(segments, lin=nn.Linear(3, 3))(torch.randn(2, 3)).sum().backward()


def test_a_module_without_segments_is_an_error():
    with pytest.raises(NotImplementedError, match=r"Mine must define segments\(\)"):
        type("Mine", (Segmented,), {})()(torch.ones(1))


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
