"""Two chunks run overlapped give the same numbers as in sequence, bit for bit."""

import contextlib
import gc
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.plain_model import plain_forward
from moe_dualpipe.expert_parallel import Delayed, Link, Local, Loopback
from moe_dualpipe.models import TransformerStage, next_token_loss
from moe_dualpipe.overlap import Compute, WeightGrads, bind
from moe_dualpipe.overlap.engine import Engine
from tests.support.pairs import OVERLAPPED, assert_same, gradients, run_pair, stage, tokens
from tests.support.segments import module_of


def assert_pair(first, second, x0, x1, queued=False):
    expected = run_pair(first, second, x0, x1, overlapped=False)
    assert_same(run_pair(first, second, x0, x1, overlapped=True, queued=queued), expected)


BACKENDS = {
    "local": lambda: Local(8),
    "loopback": lambda: Loopback(8, 4),
    "slow loopback": lambda: Loopback(8, 4, Link(gb_per_s=0.001, latency_us=300)),
    "delayed": lambda: Delayed(Local(8), Link(latency_us=500)),
}


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_overlapped_equals_sequential(backend, queued):
    model = stage(ep=BACKENDS[backend]())
    assert_pair(model, model, tokens(1), tokens(2), queued)


recomputes = st.sampled_from(["none", "norms", "attention", "full"])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape(data):
    draw = data.draw
    layers = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    ranks, k = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 8))
    choices = {"experts_per_token": k, "num_shared_experts": draw(st.integers(0, 2))}
    chunks = [
        stage(n, draw(st.integers(0, n)), Loopback(8, ranks), seed=i, recompute=draw(recomputes), **choices)
        for i, n in enumerate(layers)
    ]
    shapes = [(draw(st.integers(1, 3)), draw(st.integers(1, 9))) for _ in chunks]
    x0, x1 = (tokens(i, *shape) for i, shape in enumerate(shapes))
    assert_pair(chunks[0], chunks[1], x0, x1, draw(st.booleans()))


@pytest.mark.parametrize("backend", ["local", "loopback"])
def test_the_tape_agrees_with_plain_autograd(backend):
    model = stage(ep=BACKENDS[backend]()).double()
    x, y = tokens(1), tokens(2)
    expected = next_token_loss(plain_forward(model, x), y)
    expected.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = next_token_loss(model(x), y)
    loss.backward()
    assert torch.equal(loss, expected)
    for ours, theirs in zip(gradients(model), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_gradients_are_accumulated_over_pairs():
    model = stage(ep=Loopback(8, 4))
    x, expected = [tokens(i) for i in range(4)], None
    for overlapped in (False, True):
        model.zero_grad()
        losses = [next_token_loss(model(x[0]), x[0])]
        for i in range(1, 4):
            if overlapped:
                losses.append(OVERLAPPED(model, [x[i]], next_token_loss, [x[i]], model, losses[-1], None, None)[1])
            else:
                losses.append(next_token_loss(model(x[i]), x[i]))
                losses[-2].backward()
        losses[-1].backward()
        result = [*(loss.detach() for loss in losses), *gradients(model)]
        expected = expected or result
        assert_same(result, expected)


@pytest.mark.parametrize("recompute", ["none", "norms", "full"])
def test_a_pair_frees_all_activations_without_the_garbage_collector(recompute):
    model = stage(ep=Loopback(8, 4), recompute=recompute)
    made = []
    for module in model.modules():
        module.register_forward_hook(
            lambda _module, _inputs, output: made.extend(
                StorageWeakRef(t.untyped_storage())
                for t in (output if isinstance(output, tuple) else (output,))
                if t.is_floating_point()
            )
        )
    gc.collect()
    gc.disable()  # so that a reference cycle would keep activations alive, and fail below
    try:
        loss1 = next_token_loss(model(tokens(1)), tokens(1))
        first, made = made, []
        assert len(first) > 20
        assert not all(t.expired() for t in first)
        loss0 = OVERLAPPED(model, [tokens(2)], next_token_loss, [tokens(2)], model, loss1, None, None)[1]
        del loss1
        assert all(t.expired() for t in first)
        assert not all(t.expired() for t in made)
        loss0.backward()
        del loss0
        assert all(t.expired() for t in made)
    finally:
        gc.enable()


def test_two_interleaved_forwards():
    model = stage(ep=Loopback(8, 4))
    with torch.no_grad():
        pair = TransformerStage.interleaved_forward(model, [tokens(1)], model, [tokens(2, 1, 9)])
        assert_same(pair, [model(tokens(1)), model(tokens(2, 1, 9))])
    pair = TransformerStage.interleaved_forward(model, [tokens(1)], model, [tokens(2)])
    torch.stack([next_token_loss(logits, tokens(3)) for logits in pair]).sum().backward()  # with gradients, too
    ours = gradients(model)
    model.zero_grad()  # sets them to None
    torch.stack([next_token_loss(model(x), tokens(3)) for x in (tokens(1), tokens(2))]).sum().backward()
    for one, other in zip(ours, gradients(model), strict=True):
        torch.testing.assert_close(one, other)


# ---- Inputs, outputs and frozen parameters ----


@pytest.mark.parametrize("overlapped", [False, True])
def test_gradients_of_several_inputs(overlapped):
    def segments(_self, n, x, _ids, y):
        return (yield Compute("mul", lambda x, y: x * y * n, x, y))

    module = module_of(segments)
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    out = module(2, x, torch.arange(3), y)
    if overlapped:
        OVERLAPPED(module, [2, x.detach(), None, y.detach()], None, None, module, None, [out], [torch.ones(3)])
    else:
        out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * y.detach())
    torch.testing.assert_close(y.grad, 2 * x.detach())


def test_a_criterion_without_labels_and_outputs_without_gradients():
    def segments(self, x):
        return (yield Compute("both", lambda x: (self.lin(x), (x > 0).float()), x))

    module = module_of(segments, lin=nn.Linear(3, 3))
    x = torch.randn(2, 3)
    outputs = module(x)
    roots = None, list(outputs), [torch.ones(2, 3)] * 2
    _, loss = OVERLAPPED(module, [x], lambda a, b: (a * b).sum(), None, module, *roots)
    assert loss.requires_grad
    assert module.lin.weight.grad is not None


@pytest.mark.parametrize("trained", ["experts", "head", "router", "layers.2", "shared"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_partly_frozen_models(trained, overlapped):
    model = stage(ep=Loopback(8, 4)).double()
    for name, p in model.named_parameters():
        p.requires_grad_(trained in name)
    next_token_loss(plain_forward(model, tokens(1)), tokens(2)).backward()
    expected = gradients(model)
    model.zero_grad()
    loss = next_token_loss(model(tokens(1)), tokens(2))
    if overlapped:
        OVERLAPPED(model, [tokens(3)], next_token_loss, [tokens(3)], model, loss, None, None)
    else:
        loss.backward()
    for ours, theirs in zip(gradients(model), expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-10)


def test_a_pair_with_nothing_to_differentiate_is_a_forward():
    model, called = stage().requires_grad_(False), []
    out = model(tokens(1))
    roots = None, [out], [out]
    logits, _ = OVERLAPPED(model, [tokens(2)], None, None, model, *roots, on_input_grads=lambda: called.append(1))
    assert torch.equal(logits, model(tokens(2)))
    assert called == [1]


# ---- Chunks inside a larger graph ----


def test_layers_before_and_after_the_chunk_get_their_gradients():
    """Computed inputs and a criterion with parameters, in a plain backward and in a pair."""
    model = stage(2, 0, Loopback(8, 2), embedding=False, head=False)
    before, after = nn.Linear(16, 16), nn.Linear(16, 1)
    x, results = torch.randn(1, 3, 16), []
    for overlapped in (False, True):
        for module in (model, before, after):
            module.zero_grad()
        loss = after(model(before(x))).sum()
        if overlapped:
            OVERLAPPED(model, [x], None, None, model, loss, None, None)
        else:
            loss.backward()
        results.append(gradients(model, before, after))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


# ---- Failures ----


def test_a_loss_without_a_chunk_is_an_error():
    model = stage()
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="forward of this TransformerStage did not produce with gradients"):
        OVERLAPPED(model, [tokens(1)], None, None, model, (x * 2).sum(), None, None)


def test_a_chunk_of_another_module_is_an_error():
    one, other = stage(1, 0), stage(1, 0)
    loss = next_token_loss(one(tokens(1)), tokens(1))
    with pytest.raises(TypeError, match="the forward of this TransformerStage did not produce"):
        OVERLAPPED(other, [tokens(1)], None, None, other, loss, None, None)


def test_a_pair_that_fails_in_any_segment_drops_its_deferred_weight_gradients(monkeypatch):
    model = stage(2, 0, Loopback(8, 4))
    bind(model, WeightGrads(max_deferred=3))
    expected = next_token_loss(model(tokens(1)), tokens(1))
    OVERLAPPED(model, [tokens(2)], None, None, model, expected, None, None)
    clean = gradients(model)
    annotate, deferred = Engine.annotate, []
    for failing in itertools.count():
        started = itertools.count()

        def fail(engine, *args, started=started, failing=failing, **options):
            if next(started) == failing:
                deferred.append(len(model.weight_grads))
                raise ArithmeticError("boom")
            return annotate(engine, *args, **options)

        model.zero_grad()
        loss = next_token_loss(model(tokens(1)), tokens(1))
        with monkeypatch.context() as patch, contextlib.suppress(ArithmeticError):
            patch.setattr(Engine, "annotate", fail)
            OVERLAPPED(model, [tokens(2)], None, None, model, loss, None, None)
            break
        assert len(model.weight_grads) == 0, failing
        model.zero_grad()
        loss = next_token_loss(model(tokens(1)), tokens(1))
        OVERLAPPED(model, [tokens(2)], None, None, model, loss, None, None)
        assert_same(gradients(model), clean)
    assert max(deferred) > 0 and failing > 30
