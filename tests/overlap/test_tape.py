"""The tape: transfers and their backward, outputs, and how long tensors live."""

import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from moe_dualpipe.expert_parallel import Completed, Loopback
from moe_dualpipe.models import next_token_loss
from moe_dualpipe.overlap import Comm, Compute
from tests.support.pairs import stage, tokens
from tests.support.segments import module_of


class Waited:
    """A transfer that records when it is waited for."""

    def __init__(self, log, name, *tensors):
        self.log, self.name, self.tensors = log, name, tensors

    def wait(self):
        self.log.append(self.name)
        return self.tensors


def test_the_arguments_of_a_comm_and_of_its_backward():
    seen = []

    def there(*tensors):
        assert not any(t.requires_grad for t in tensors)
        return Completed((tensors[0], tensors[0] + 1, torch.arange(3)))

    def back(*grads):
        seen.append([g if g is None else g.tolist() for g in grads])
        return Completed((grads[0] + grads[1],))

    def segments(self, x):
        y = yield Compute("mul", lambda x: x * self.w, x)
        arriving = yield Comm("three", there, back, y)
        return (yield Compute("first", lambda a, _b, n: a * n, arriving))

    module = module_of(segments, w=nn.Parameter(torch.ones(3)))
    module(torch.ones(3)).sum().backward()
    assert seen == [[[0, 1, 2], [0, 0, 0]]]  # zeros without a gradient; integer outputs have none
    assert module.w.grad.tolist() == [0, 1, 2]


def test_the_result_of_a_comm_may_be_used_twice():
    log = []

    def segments(self, x):
        y = yield Compute("lin", self.lin, x)
        z = yield Comm("double", lambda t: Waited(log, "F", 2 * t), lambda g: Waited(log, "B", 2 * g), y)
        a = yield Compute("sin", torch.sin, z)
        b = yield Compute("cos", torch.cos, z)
        return (yield Compute("add", torch.add, a, b))

    module = module_of(segments, lin=nn.Linear(3, 3))
    x = torch.randn(2, 3)
    module(x).sum().backward()
    assert log == ["F", "B"]
    ours, module.lin.weight.grad = module.lin.weight.grad, None
    y = 2 * module.lin(x)
    (y.sin() + y.cos()).sum().backward()
    torch.testing.assert_close(ours, module.lin.weight.grad)


def test_gradients_are_waited_for_in_the_order_in_which_they_were_sent():
    log = []

    def comm(name, x):
        return Comm(name, lambda t: Completed((t,)), lambda g: log.append(f"{name} sent") or Waited(log, name, g), x)

    def segments(self, x):
        y = yield Compute("mul", lambda x: x * self.w, x)
        a = yield comm("a", y)
        b = yield comm("b", y)
        return (yield Compute("add", torch.add, a, b))

    module_of(segments, w=nn.Parameter(torch.ones(3)))(torch.ones(3)).sum().backward()
    assert log == ["b sent", "a sent", "b", "a"]


def test_an_unused_comm_is_waited_for_and_has_a_backward():
    log = []

    def segments(self, x):
        y = yield Compute("lin", self.lin, x)
        yield Comm("move", lambda t: Waited(log, "F", t), lambda g: Waited(log, "B", g), y)
        return (yield Compute("sin", torch.sin, y))

    module = module_of(segments, lin=nn.Linear(3, 3))
    x = torch.randn(2, 3)
    module(x).sum().backward()
    assert log == ["F", "B"]
    ours, module.lin.weight.grad = module.lin.weight.grad, None
    module.lin(x).sin().sum().backward()
    torch.testing.assert_close(ours, module.lin.weight.grad)


@pytest.mark.parametrize("collective", [False, True])
def test_only_a_collective_transfer_has_a_backward_if_no_input_of_this_rank_needs_a_gradient(collective):
    """What precedes it may be trained on another rank, which waits for this one."""
    log = []

    def segments(self, x):
        there, back = (lambda t, name=name: Waited(log, name, t) for name in ("there", "back"))
        y = yield Comm("move", there, back, x, collective=collective)
        return (yield Compute("mul", lambda y: y * self.w, y))

    module_of(segments, w=nn.Parameter(torch.ones(3)))(torch.ones(3)).sum().backward()
    assert log == ["there", *["back"] * collective]


def test_a_backward_of_a_comm_that_returns_too_few_gradients_is_an_error():
    def segments(self, x):
        y = yield Compute("lin", self.lin, x)
        return (
            yield Compute(
                "end",
                torch.add,
                (yield Comm("two", lambda *t: Completed(t), lambda *_: Completed(()), y, y)),
            )
        )

    with pytest.raises(ValueError, match="the backward of a Comm returned 0 gradients for 2 inputs"):
        module_of(segments, lin=nn.Linear(3, 3))(torch.ones(1, 3)).sum().backward()


def test_the_backward_frees_the_route():
    class Thing: ...

    made = []

    def segments(self, x):
        thing = Thing()
        made.append(weakref.ref(thing))
        y = yield Compute("lin", self.lin, x)
        z = yield Comm("move", lambda t: Completed((t,)), lambda g, _thing=thing: Completed((g,)), y)
        return (yield Compute("sin", torch.sin, z))

    loss = module_of(segments, lin=nn.Linear(3, 3))(torch.randn(2, 3)).sum()
    loss.backward()
    assert made[0]() is None  # although the loss still exists


def test_outputs_are_a_tensor_or_a_flat_tuple_or_list():
    def segments(self, x):
        y = yield Compute("lin", self.lin, x)
        return [y, y] if self.kind == "list" else {"y": y} if self.kind == "dict" else (y, [y])

    module = module_of(segments, lin=nn.Linear(3, 3), kind="list")
    a, b = module(torch.ones(2, 3))
    (a + b).sum().backward()
    assert module.lin.weight.grad.tolist() == [[4.0] * 3] * 3
    for module.kind, name in (("dict", "dict"), ("nested", "tuple")):
        with pytest.raises(TypeError, match=f"must return a tensor or a flat tuple: got {name}"):
            module(torch.ones(2, 3))


def test_a_second_backward_is_an_error():
    model = stage()
    loss = next_token_loss(model(tokens(1)), tokens(1))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has already run"):
        loss.backward()


def test_activations_that_no_backward_needs_are_freed_in_the_forward():
    """The output of the experts is used only by the combine, and is not needed in backward."""
    model = stage(2, 0, ep=Loopback(8, 4))
    made = []
    for block in model.layers.values():
        run_experts = block.mlp.run_experts

        def watched(*arguments, run_experts=run_experts, **named):
            out = run_experts(*arguments, **named)
            made.append(StorageWeakRef(out.untyped_storage()))
            return out

        block.mlp.run_experts = watched
    loss = next_token_loss(model(tokens(1)), tokens(1))
    assert [t.expired() for t in made] == [True, True]
    loss.backward()
