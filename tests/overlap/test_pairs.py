"""Two chunks run overlapped give the same numbers as in sequence, bit for bit."""

import contextlib
import gc
import itertools
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_dualpipe.expert_parallel import Link, Local, Loopback
from moe_dualpipe.models import RECOMPUTE, TransformerStage, next_token_loss
from moe_dualpipe.overlap import Engine, WeightGrads, bind
from tests.support.delayed import Delayed
from tests.support.kernels import needs_onednn, small_products_in_onednn
from tests.support.pairs import OVERLAPPED, assert_same, gradients, run_pair, stage, tokens
from tests.support.plain_model import plain_forward
from tests.support.properties import HealthCheck, given, settings, st

BACKENDS = [
    *(partial(Loopback, 8, ranks) for ranks in (1, 2, 4, 8)),
    lambda: Local(8),
    lambda: Loopback(8, 4, Link(gb_per_s=0.001, latency_us=300)),
    lambda: Delayed(Local(8), Link(latency_us=500)),
]


@pytest.fixture(params=["mkl", pytest.param("onednn", marks=needs_onednn)])
def library(request, monkeypatch):
    if request.param == "onednn":
        small_products_in_onednn(monkeypatch)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.usefixtures("library")
def test_overlapped_equals_sequential(data):
    draw = data.draw
    backend, queued = draw(st.sampled_from(BACKENDS)), draw(st.booleans())
    choices = {"experts_per_token": draw(st.integers(1, 8)), "num_shared_experts": draw(st.integers(0, 2))}
    chunks, inputs = [], []
    for i in range(2):
        layers, recompute = draw(st.integers(1, 3)), draw(st.sampled_from(RECOMPUTE))
        chunks.append(stage(layers, draw(st.integers(0, layers)), backend(), seed=i, recompute=recompute, **choices))
        inputs.append(tokens(i, draw(st.integers(1, 3)), draw(st.integers(1, 9))))
    expected = run_pair(*chunks, *inputs, overlapped=False)
    assert_same(run_pair(*chunks, *inputs, overlapped=True, queued=queued), expected)
    pair = TransformerStage.interleaved_forward(chunks[0], [inputs[0]], chunks[1], [inputs[1]])
    assert_same(pair, [chunk(x) for chunk, x in zip(chunks, inputs, strict=True)])


@pytest.mark.parametrize("recompute", ["none", "full"])
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


@pytest.mark.parametrize("trained", ["", "experts", "head", "router", "layers.2", "shared"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_whole_and_partly_frozen_models_have_the_gradients_of_plain_autograd(trained, overlapped):
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


# ---- Failures ----


def test_a_chunk_of_another_module_is_an_error():
    one, other = stage(1, 0), stage(1, 0)
    loss = next_token_loss(one(tokens(1)), tokens(1))
    with pytest.raises(TypeError, match="the forward of this TransformerStage did not produce"):
        OVERLAPPED(other, [tokens(1)], None, None, other, loss, None, None)


def test_a_pair_that_fails_in_any_segment_drops_its_deferred_weight_gradients(monkeypatch):
    model = stage(1, 0, Loopback(8, 4))
    bind(model, WeightGrads(max_deferred=3))
    annotate, deferred, grads = Engine.annotate, [], []

    def run():
        model.zero_grad()
        loss = next_token_loss(model(tokens(1)), tokens(1))
        OVERLAPPED(model, [tokens(2)], next_token_loss, [tokens(2)], model, loss, None, None)

    for failing in itertools.count():
        run()
        grads.append(gradients(model))
        assert_same(grads[-1], grads[0])
        started = itertools.count()

        def fail(engine, *args, started=started, failing=failing, **options):
            if next(started) == failing:
                deferred.append(len(model.weight_grads))
                raise ArithmeticError("boom")
            return annotate(engine, *args, **options)

        with monkeypatch.context() as patch, contextlib.suppress(ArithmeticError):
            patch.setattr(Engine, "annotate", fail)
            run()
            break
        assert len(model.weight_grads) == 0, failing
    assert max(deferred) > 0 and failing > 20
