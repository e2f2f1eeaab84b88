"""What a tape, an engine and deferral do in their corners: odd inputs and outputs, frozen parts, failures."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from moe_dualpipe.expert_parallel import Completed, Delayed, Link, Local, Loopback
from moe_dualpipe.models import next_token_loss
from moe_dualpipe.models.block import add_up
from moe_dualpipe.models.layers import Linear
from moe_dualpipe.models.recompute import recompute_saved
from moe_dualpipe.overlap import Comm, Compute, Engine, Segmented, WeightGrads, bind
from tests.support.pairs import CONFIG, gradients, saved_bytes, stage, tokens
from tests.support.plain_model import plain_forward

PAIR = Segmented.overlapped_forward_backward


class Waited:
    """A transfer that says when it is waited for."""

    def __init__(self, log, name, *tensors):
        self.log, self.name, self.tensors = log, name, tensors

    def wait(self):
        self.log.append(self.name)
        return self.tensors


def module_of(body, **parts) -> Any:
    module = type("Mine", (Segmented,), {"segments": body})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def test_what_arrives_may_be_used_twice():
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


@pytest.mark.parametrize("overlapped", [False, True])
def test_gradients_reach_the_right_inputs(overlapped):
    def segments(_self, n, x, _ids, y):
        return (yield Compute("mul", lambda x, y: x * y * n, x, y))

    module = module_of(segments)
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    out = module(2, x, torch.arange(3), y)
    if overlapped:
        PAIR(module, [2, x.detach(), None, y.detach()], None, None, module, None, [out], [torch.ones(3)])
    else:
        out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * y.detach())
    torch.testing.assert_close(y.grad, 2 * x.detach())


def test_what_a_transfer_is_given():
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
    assert seen == [[[0, 1, 2], [0, 0, 0]]]  # zeros where nothing came, nothing for what is no float
    assert module.w.grad.tolist() == [0, 1, 2]


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


def test_an_output_that_needs_no_gradient_says_so():
    def segments(self, x, c):
        return (yield Compute("lin", self.lin, x)), c

    a, c = module_of(segments, lin=nn.Linear(3, 3))(torch.randn(2, 3), torch.randn(2))
    assert a.requires_grad
    assert not c.requires_grad


def test_after_a_pair_its_backward_has_run():
    def segments(self, x):
        return (yield Compute("lin", self.lin, x))

    module = module_of(segments, lin=nn.Linear(3, 3))
    x = torch.randn(2, 3)
    out = module(x)
    PAIR(module, [x], None, None, module, None, [out], [torch.ones(2, 3)])
    with pytest.raises(RuntimeError, match="has already run"):
        out.backward(torch.ones(2, 3))


def test_a_criterion_without_labels_and_outputs_without_gradients():
    def segments(self, x):
        return (yield Compute("both", lambda x: (self.lin(x), (x > 0).float()), x))

    module = module_of(segments, lin=nn.Linear(3, 3))
    x = torch.randn(2, 3)
    outputs = module(x)
    _, loss = PAIR(module, [x], lambda a, b: (a * b).sum(), None, module, None, list(outputs), [torch.ones(2, 3)] * 2)
    assert loss.requires_grad
    assert module.lin.weight.grad is not None


def test_a_route_is_let_go_in_the_backward():
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
    assert made[0]() is None  # though the loss is still there


def test_the_first_weight_gradients_hide_the_first_transfer():
    def segments(self, x):
        y = yield Compute("first", self.a, x)
        z = yield Comm("move", lambda t: Completed((t,)), lambda g: Completed((g,)), y)
        return (yield Compute("last", self.b, z))

    module, log = module_of(segments, a=Linear(3, 3, 1.0), b=Linear(3, 3, 1.0)), []
    x = torch.randn(2, 3)
    loss = module(x).sum()
    engine = Engine(torch.device("cpu"), queued=True, log=log)
    PAIR(module, [x], None, None, module, loss, None, None, engine=engine)
    assert log[:5] == ["loss(B)", "last(B)", "move(B)", "last(W)", "first(F)"]


def test_clear_forgets_what_was_computed_early():
    layer, grads = Linear(3, 3, 1.0), WeightGrads(max_deferred=1)
    layer.weight_grads = grads
    for key in range(2):
        with grads.defer_to(key):
            layer(torch.randn(2, 3)).sum().backward()
    grads.clear()
    with pytest.raises(KeyError):
        grads.run_deferred(0)


def test_a_key_is_used_once():
    grads = WeightGrads()
    with grads.defer_to(1):
        pass
    with pytest.raises(RuntimeError, match="weight gradients for 1 are already being deferred"), grads.defer_to(1):
        pass


def test_bind_leaves_other_attributes_alone():
    module = nn.Sequential(nn.Linear(1, 1), Linear(1, 1, 1.0))
    module[0].weight_grads = "mine"
    bind(module, WeightGrads())
    assert module[0].weight_grads == "mine"
    assert isinstance(module[1].weight_grads, WeightGrads)


def test_delayed_starts_without_waiting_and_carries_bytes():
    log = []

    class Backend(Local):
        def dispatch(self, x_TD, route, weights_TK=None):
            return WaitedFor(log, super().dispatch(x_TD, route, weights_TK))

    late = Delayed(Backend(8), Link(gb_per_s=1.0))
    pending = late.dispatch(torch.ones(4, 250), late.prepare(torch.zeros(4, 1, dtype=torch.int64)))
    assert late.timer.busy_seconds == pytest.approx(4e-6)
    assert log == []
    pending.wait()
    assert log == ["waited"]


class WaitedFor:
    def __init__(self, log, pending):
        self.log, self.pending = log, pending

    def wait(self):
        self.log.append("waited")
        return self.pending.wait()


# ---- Parts that need no gradient ----


@pytest.mark.parametrize("trained", ["experts", "head", "router", "layers.2", "shared"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_partly_frozen(trained, overlapped):
    model = stage(ep=Loopback(8, 4)).double()
    for name, p in model.named_parameters():
        p.requires_grad_(trained in name)
    next_token_loss(plain_forward(model, tokens(1)), tokens(2)).backward()
    expected = gradients(model)
    model.zero_grad()
    loss = next_token_loss(model(tokens(1)), tokens(2))
    if overlapped:
        PAIR(model, [tokens(3)], next_token_loss, [tokens(3)], model, loss, None, None)
    else:
        loss.backward()
    for ours, theirs in zip(gradients(model), expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-10)


def test_a_pair_with_nothing_to_differentiate_is_a_forward():
    model, called = stage().requires_grad_(False), []
    out = model(tokens(1))
    logits, _ = PAIR(model, [tokens(2)], None, None, model, None, [out], [out], on_input_grads=lambda: called.append(1))
    assert torch.equal(logits, model(tokens(2)))
    assert called == [1]


def test_a_transfer_that_nobody_uses_is_waited_for_and_goes_back():
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


# ---- What a module returns ----


def test_a_list_is_as_good_as_a_tuple_and_anything_else_is_refused():
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


def test_gradients_cannot_be_differentiated_again():
    module = stage(1, 0, embedding=False, head=False)
    x = torch.randn(1, 2, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_a_transfer_back_that_loses_gradients_is_found_out():
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


# ---- Pairs in a larger graph ----


def test_what_is_before_and_after_the_chunk_gets_its_gradients():
    """Inputs that were computed, and a criterion with parameters of its own; in one backward, or beside a forward."""
    model = stage(2, 0, Loopback(8, 2), embedding=False, head=False)
    before, after = nn.Linear(16, 16), nn.Linear(16, 1)
    x, results = torch.randn(1, 3, 16), []
    for overlapped in (False, True):
        for module in (model, before, after):
            module.zero_grad()
        loss = after(model(before(x))).sum()
        if overlapped:
            PAIR(model, [x], None, None, model, loss, None, None)
        else:
            loss.backward()
        results.append(gradients(model, before, after))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_chunks_that_follow_each_other_in_one_graph():
    first, second = (stage(1, 0, Loopback(8, 2), embedding=False, head=False, seed=s) for s in (1, 2))
    x, results = torch.randn(1, 3, 16), []
    for overlapped in (False, True):
        first.zero_grad()
        second.zero_grad()
        out = second(first(x))
        if overlapped:
            PAIR(second, [x], None, None, second, None, [out], [torch.ones_like(out)])
        else:
            out.sum().backward()
        results.append(gradients(first, second))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_the_chunk_must_be_the_modules_own():
    one, other = stage(1, 0), stage(1, 0)
    loss = next_token_loss(one(tokens(1)), tokens(1))
    with pytest.raises(TypeError, match="the forward of this TransformerStage did not produce"):
        PAIR(other, [tokens(1)], None, None, other, loss, None, None)


def test_a_pair_that_failed_leaves_nothing_to_add_later():
    model = stage(2, 0, Loopback(8, 4))
    bind(model, WeightGrads(max_deferred=3))
    expected = next_token_loss(model(tokens(1)), tokens(1))
    PAIR(model, [tokens(2)], None, None, model, expected, None, None)
    clean = gradients(model)
    model.zero_grad()

    def fail(*_):
        raise ArithmeticError("boom")

    loss = next_token_loss(model(tokens(1)), tokens(1))
    hook = model.layers["0"].mlp.experts.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        PAIR(model, [tokens(2)], None, None, model, loss, None, None)
    hook.remove()
    assert len(model.weight_grads) == 0
    model.zero_grad()
    loss = next_token_loss(model(tokens(1)), tokens(1))
    PAIR(model, [tokens(2)], None, None, model, loss, None, None)
    for ours, theirs in zip(gradients(model), clean, strict=True):
        assert torch.equal(ours, theirs)


def test_rows_that_arrived_are_not_kept_for_their_ids():
    ep = Loopback(8, 4)
    route = ep.prepare(torch.tensor([[0, 5], [3, 1]]))
    received = ep.dispatch(torch.randn(2, 6), route, torch.rand(2, 2)).wait()
    rows = StorageWeakRef(received.x_ND.untyped_storage())
    assert route.order.expert_offsets.tolist() == [0, 1, 4]
    del received
    assert rows.expired()


# ---- Norms ----


@pytest.mark.parametrize("recompute", ["none", "norms", "attention", "full"])
def test_normalised_copies_are_not_kept(recompute):
    model = stage(2, 1, Loopback(8, 4), recompute=recompute)
    made = []
    for block in model.layers.values():
        for norm in (block.attention_norm, block.mlp_norm):

            def watched(x, forward=norm.forward):
                y = forward(x)
                made.append(StorageWeakRef(y.untyped_storage()))
                return y

            norm.forward = watched
    loss = next_token_loss(model(tokens(1)), tokens(1))
    kept = [not t.expired() for t in made]
    # In "full" the shared experts run again as a whole, so what they keep is their input.
    assert kept == {"none": [True] * 4, "full": [False] * 3 + [True]}.get(recompute, [False] * 4)
    loss.backward()


def test_norms_keeps_neither_the_copy_nor_what_made_it():
    copy = 4 * 32 * CONFIG.hidden_size * 4
    assert saved_bytes("none") - saved_bytes("norms") > 10 * copy  # 8 norms: what they return, and what they save


def test_loads_are_counted_in_training_only():
    model = stage(2, 0)
    with torch.no_grad():
        model(tokens(1))
    assert model.layers["0"].mlp.take_load().sum() == 0


def test_the_residual_stream_is_added_last():
    assert add_up(torch.tensor([1.0]), torch.tensor([1e8]), torch.tensor([-1e8])).item() == 1


@pytest.mark.parametrize("part", [lambda y: y[:1], lambda y: y.T, lambda y: y.view(2, 8)])
def test_only_the_tensor_itself_is_forgotten(part):
    y, made = torch.randn(4, 4), []

    def again():
        made.append(1)
        return y.clone()

    w = torch.randn_like(part(y)).requires_grad_()
    with recompute_saved(y, again):
        out = part(y) * w
    out.sum().backward()
    assert torch.equal(w.grad, part(y))
