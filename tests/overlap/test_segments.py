"""Modules of one's own, written as segments: what they may do, and what they are told when they do something else."""

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Completed
from moe_dualpipe.models.layers import Linear
from moe_dualpipe.overlap import Comm, Compute, Engine, PrepareComm, Segmented, WeightGrads, bind, in_layer


def doubled(x):
    return Completed((2 * x,))


class Twice(Segmented):
    """x -> 2 * a(x) + b(x), a(x) doubled on the way: a transfer whose backward doubles the gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def segments(self, x):
        y = yield Compute("a", self.a, x)
        arriving = yield Comm("double", doubled, doubled, y)
        z = yield Compute("b", self.b, x)
        return (yield Compute("add", torch.add, arriving, z))


def both(module, expected, *inputs):
    """The module and a plain function of the same parameters: outputs, gradients of parameters and inputs."""
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


def test_a_module_of_ones_own():
    module = Twice()
    both(module, lambda x: 2 * module.a(x) + module.b(x), torch.randn(4, 3))


def test_inputs_that_need_no_gradient():
    module = Twice()
    x = torch.randn(4, 3)
    module(x).sum().backward()
    ours = [p.grad for p in module.parameters()]
    module.zero_grad()
    (2 * module.a(x) + module.b(x)).sum().backward()
    for one, other in zip(ours, module.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


class Several(Segmented):
    """Several inputs and outputs, one of them an integer, one straight from an input, one that nobody uses."""

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


def test_a_frozen_module_gives_plain_tensors():
    module = Twice().requires_grad_(False)
    assert not module(torch.randn(1, 3)).requires_grad
    x = torch.randn(1, 3, requires_grad=True)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, (2 * module.a.weight + module.b.weight).sum(0)[None])


def test_no_gradients_no_tape():
    module = Twice()
    with torch.no_grad():
        y = module(torch.randn(2, 3))
    assert y.grad_fn is None


def test_outputs_that_the_loss_does_not_use():
    module = Several()
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    a, *_ = module(x, y, 0)
    a.sum().backward()
    assert y.grad is None
    torch.testing.assert_close(x.grad, module.w.detach().expand(2, 3))


def test_half_of_a_transfer_may_need_no_gradient():
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


# ---- Mistakes ----


def chunk(body):
    """A module whose `segments(self, x)` is `body`."""
    kind = type("Mine", (Segmented,), {"segments": body})
    module = kind()
    module.lin = nn.Linear(3, 3)
    return module


def test_computing_between_yields_is_refused():
    def segments(self, x):
        y = yield Compute("lin", self.lin, x)
        return (yield Compute("add", torch.add, y * 2, y))

    with pytest.raises(TypeError, match="between two yields, pass tensors on, but do not compute"):
        chunk(segments)(torch.randn(2, 3))


@pytest.mark.parametrize("kind", ["compute", "comm"])
def test_a_tensor_from_outside_is_refused(kind):
    def segments(self, x):
        if kind == "comm":
            return (yield Comm("double", doubled, doubled, self.lin(x)))
        return (yield Compute("lin", torch.sin, self.lin(x)))

    with pytest.raises(TypeError, match="is not the output of a segment"):
        chunk(segments)(torch.randn(2, 3))


def test_a_captured_tensor_is_found_out():
    """Taken from around the Compute, its gradient would come after its producer's backward, and be lost."""

    def segments(self, x):
        y = yield Compute("lin", self.lin, x)
        z = yield Compute("captures", lambda x: x + y, x)
        moved = yield Comm("double", doubled, doubled, z)
        w = yield Compute("sin", torch.sin, y)
        return (yield Compute("add", torch.add, moved, w))

    with pytest.raises(RuntimeError, match="a segment used a tensor that is not among its inputs"):
        chunk(segments)(torch.randn(2, 3)).sum().backward()


def test_a_module_without_segments_is_told():
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
    "during inner(F) of layer 7": lambda x: iter_of(Compute("inner", boom, x)),
    "during inner(B) of layer 7": lambda x: iter_of(Compute("inner", Fails.apply, x)),
    "during move(F) of layer 7": lambda x: iter_of(Comm("move", boom, doubled, x)),
    "during move(B) of layer 7": lambda x: iter_of(Comm("move", doubled, boom, x)),
    "during wait for move(F) of layer 7": lambda x: iter_of(Comm("move", lambda _: Waits(), doubled, x)),
    "during wait for move(B) of layer 7": lambda x: iter_of(Comm("move", doubled, lambda _: Waits(), x)),
    "during prepare plan(F) of layer 7": lambda x: iter_of(PrepareComm("plan", boom, x)),
}


def iter_of(segment):
    result = yield segment
    return (yield Compute("end", torch.sum, result))


@pytest.mark.parametrize("where", FAILURES)
def test_an_error_names_segment_and_layer(where):
    def segments(self, x):
        y = yield Compute("lin", self.lin, x)
        return (yield from in_layer(7, FAILURES[where](y)))

    with pytest.raises(ArithmeticError, match="boom") as error:
        chunk(segments)(torch.randn(2, 3)).sum().backward()
    assert where in error.value.__notes__


# ---- Weight gradients ----


class Tied(Segmented):
    """One matrix as embedding and as head, as models tie them."""

    def __init__(self):
        super().__init__()
        self.head = Linear(4, 6, 1.0)
        self.embedding = nn.Embedding(6, 4)
        self.embedding.weight = self.head.weight

    def segments(self, ids):
        x = yield Compute("embed", self.embedding, ids)
        moved = yield Comm("double", doubled, doubled, x)
        return (yield Compute("head", self.head, moved))


def test_tied_weights_are_counted_once():
    """Their two gradients are added up, also where one of them is computed later."""
    model, ids = Tied(), torch.tensor([[1, 2, 5]])
    expected = torch.nn.functional.linear(2 * model.embedding(ids), model.head.weight).square().sum()
    expected.backward()
    plain, model.head.weight.grad = model.head.weight.grad, None
    loss = model(ids).square().sum()
    Tied.overlapped_forward_backward(model, [ids], None, None, model, loss, None, None)
    torch.testing.assert_close(model.head.weight.grad, plain)
    assert len(model.weight_grads) == 0
    model.head.weight.grad = None
    grads = WeightGrads()
    bind(model, grads)
    loss = model(ids).square().sum()
    with grads.defer_to("later"):
        loss.backward()
    assert not torch.allclose(model.head.weight.grad, plain)  # a part is owed
    grads.run_deferred("later")
    torch.testing.assert_close(model.head.weight.grad, plain)


def test_deferral_is_bounded():
    layer, grads = Linear(3, 3, 1.0), WeightGrads(max_deferred=2)
    layer.weight_grads = grads
    ran = []
    for key in range(4):
        with grads.defer_to(key):
            layer(torch.randn(2, 3)).sum().backward()
            grads.defer(layer.weight, lambda key=key: ran.append(key) or torch.zeros(3, 3))
        assert len(grads) <= 2
    assert ran == [0, 1]
    for key in range(4):
        grads.run_deferred(key)  # those that were computed early are not computed again
    assert ran == [0, 1, 2, 3]
    assert len(grads) == 0
    with pytest.raises(KeyError):
        grads.run_deferred(0)
    with pytest.raises(ValueError, match="max_deferred must be at least 1, or None for no bound: got 0"):
        WeightGrads(max_deferred=0)


def test_layers_that_cannot_defer_compute_their_weight_gradients_with_the_backward():
    module, log = Twice(), []
    x = torch.randn(2, 3)
    loss = module(x).sum()
    engine = Engine(torch.device("cpu"), log=log)
    Twice.overlapped_forward_backward(module, [x], None, None, module, loss, None, None, engine=engine)
    assert not [label for label in log if label.endswith("(W)")]
    ours = [p.grad for p in module.parameters()]
    module.zero_grad()
    module(x).sum().backward()
    for one, other in zip(ours, module.parameters(), strict=True):
        assert torch.equal(one, other.grad)


def test_input_gradients_are_announced_before_the_last_weight_gradients():
    log = []

    class Hidden(Segmented):
        def __init__(self):
            super().__init__()
            self.first, self.second = Linear(4, 4, 1.0), Linear(4, 4, 1.0)

        def segments(self, x):
            y = yield Compute("first", self.first, x)
            moved = yield Comm("move", doubled, doubled, y)
            return (yield Compute("second", self.second, moved))

    module = Hidden()
    x = torch.randn(2, 4, requires_grad=True)
    loss = module(x).sum()

    def announced():
        assert x.grad is not None
        log.append("announced")

    engine = Engine(torch.device("cpu"), queued=True, log=log)
    Hidden.overlapped_forward_backward(
        module, [x.detach()], None, None, module, loss, None, None, on_input_grads=announced, engine=engine
    )
    assert log.index("announced") == log.index("first(B)") + 1
    assert log.index("announced") < log.index("first(W)")
