"""Two chunks of the reference model: whatever is hidden behind what, every number is the same, bit for bit."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from moe_dualpipe.expert_parallel import Delayed, Link, Local, Loopback
from moe_dualpipe.models import StageOptions, TransformerStage, next_token_loss
from tests.support.pairs import CONFIG, OVERLAPPED, assert_same, gradients, run_pair, saved_bytes, stage, tokens
from tests.support.plain_model import plain_forward


def assert_pair(first, second, x0, x1, queued=False):
    expected = run_pair(first, second, x0, x1, overlapped=False)
    assert_same(run_pair(first, second, x0, x1, overlapped=True, queued=queued), expected)


# ---- Bit for bit ----

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


@pytest.mark.parametrize("recompute", ["norms", "attention", "full"])
@pytest.mark.parametrize("shared", [0, 1])
def test_recompute_changes_no_bit(recompute, shared):
    results = []
    for level in ("none", recompute):
        model = stage(ep=Loopback(8, 4), recompute=level, num_shared_experts=shared)
        for overlapped in (False, True):
            results.append(run_pair(model, model, tokens(1), tokens(2), overlapped))
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize(
    "layers,dense", [((1, 4), (0, 1)), ((4, 1), (1, 0)), ((3, 2), (3, 0)), ((2, 3), (0, 3)), ((2, 2), (2, 2))]
)
@pytest.mark.parametrize("queued", [False, True])
def test_chunks_of_different_length_and_kind(layers, dense, queued):
    first = stage(layers[0], dense[0], Loopback(8, 2))
    second = stage(layers[1], dense[1], Loopback(8, 4), embedding=False, head=False, seed=3)
    hidden = torch.randn(2, 5, CONFIG.hidden_size)
    assert_pair(first, second, tokens(1), hidden, queued)
    assert_pair(second, first, hidden, tokens(2), queued)


def test_a_stage_between_others_passes_gradients_through():
    middle = stage(2, 0, Loopback(8, 2), embedding=False, head=False)
    assert_pair(middle, middle, torch.randn(2, 3, 16), torch.randn(1, 7, 16))


@pytest.mark.parametrize("queued", [False, True])
def test_an_expert_with_all_tokens_and_experts_with_none(queued):
    model = stage(2, 0, Loopback(8, 4), experts_per_token=1)
    with torch.no_grad():
        for block in model.layers.values():
            block.mlp.router.logits.weight.zero_()  # ties: all tokens choose alike
    expected = run_pair(model, model, tokens(1), tokens(2), overlapped=False)
    assert_same(run_pair(model, model, tokens(1), tokens(2), True, queued), expected)
    loads = model.layers["0"].mlp.take_load()
    assert loads.max() == loads.sum() > 0


@settings(max_examples=30, deadline=None, derandomize=True)
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


recomputes = st.sampled_from(["none", "norms", "attention", "full"])


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


# ---- The order ----

LAYER = "attn(F) mlp(B) dispatch(F) dispatch(B) mlp(W) mlp(F) attn(B) attn(W) combine(F)"
EAGER_LAYER = "attn(F) dispatch(F) mlp(B) dispatch(B) mlp(W) mlp(F) combine(F) attn(B)"


def order(first, second, queued):
    log = []
    hidden = torch.randn(1, 4, 16)
    x0, x1 = (tokens(1) if module.spec.embedding else hidden for module in (first, second))
    run_pair(first, second, x0, x1, True, queued, log)
    return " ".join(log)


def bare(layers, ep=None):
    return stage(layers, 0, ep or Loopback(8, 2), embedding=False, head=False, num_shared_experts=0)


def test_the_order_is_deepseeks():
    """Layer by layer, as the annotations of their published training trace have it."""
    assert order(bare(3), bare(3), queued=True) == (
        f"add(B) combine(B) {LAYER} combine(B) {LAYER} combine(B) {LAYER} add(F)"
    )


def test_where_compute_blocks_transfers_start_as_soon_as_they_can():
    assert order(bare(2), bare(2), queued=False) == (
        f"add(B) combine(B) {EAGER_LAYER} combine(B) attn(W) {EAGER_LAYER} attn(W) add(F)"
    )


def test_a_transfer_that_is_there_at_once_hides_nothing():
    """Without expert parallelism the backward goes first, so that its gradient can leave, then the forward."""
    assert order(bare(2, Local(8)), bare(1, Local(8)), queued=False) == (
        "add(B) combine(B) mlp(B) dispatch(B) mlp(W) attn(B) attn(W) "
        "attn(F) dispatch(F) mlp(F) combine(F) attn(F) dispatch(F) mlp(F) combine(F) add(F)"
    )


@pytest.mark.parametrize("layers", [(1, 1), (2, 3), (3, 1), (4, 4)])
def test_both_orders_agree_on_each_lane(layers):
    lanes = []
    for queued in (True, False):
        log = order(bare(layers[0]), bare(layers[1]), queued).split()
        transfers = [label for label in log if label.startswith(("dispatch", "combine"))]
        lanes.append((transfers, [label for label in log if label not in transfers]))
    assert lanes[0] == lanes[1]


def test_when_one_side_has_fewer_layers_the_other_goes_on_alone():
    assert order(bare(1), bare(2), queued=True) == (
        f"add(B) combine(B) {LAYER} combine(B) add(F) mlp(B) dispatch(B) mlp(W) attn(B) attn(W)"
    )
    assert order(bare(2), bare(1), queued=True) == (
        f"add(B) combine(B) {LAYER} attn(F) dispatch(F) mlp(F) combine(F) add(F)"
    )


def test_the_shared_experts_run_where_they_hide_a_transfer():
    model = stage(1, 0, embedding=False, head=False)
    assert order(model, model, queued=True) == (
        "add(B) combine(B) attn(F) mlp(B) mlp(B) dispatch(F) dispatch(B) mlp(W) mlp(W) mlp(F) mlp(F) attn(B) attn(W) "
        "combine(F) add(F)"
    )
    moe, order_seen = model.layers["0"].mlp, []
    moe.expert_parallel = Watched(order_seen)
    moe.shared.register_forward_hook(lambda *_: order_seen.append("shared"))
    with torch.no_grad():
        model(torch.randn(1, 3, 16))
    assert order_seen == ["dispatch sent", "shared", "dispatch arrived", "combine sent", "combine arrived"]


class Watched(Local):
    """Says when a transfer is started and when it is waited for."""

    def __init__(self, seen, name=""):
        super().__init__(8)
        self.seen, self.name = seen, name

    def dispatch(self, *arguments):
        return self._watch("dispatch", super().dispatch(*arguments))

    def combine(self, *arguments):
        return self._watch("combine", super().combine(*arguments))

    def _watch(self, name, pending):
        seen, name = self.seen, self.name + name
        seen.append(f"{name} sent")

        class Pending:
            def wait(self):
                seen.append(f"{name} arrived")
                return pending.wait()

        return Pending()


def test_a_transfer_is_waited_for_where_its_data_is_used_and_no_earlier():
    """Between the start of each transfer and the wait for it, the other chunk computes."""
    seen = []
    first, second = bare(2, ep=Watched(seen, "F ")), bare(2, ep=Watched(seen, "B "))
    for module in (first, second):
        for block in module.layers.values():
            block.attention.register_forward_hook(lambda *_: seen.append("computed"))
            block.attention.register_full_backward_hook(lambda *_: seen.append("computed"))
            block.mlp.experts.register_forward_hook(lambda *_: seen.append("computed"))
            block.mlp.experts.register_full_backward_hook(lambda *_: seen.append("computed"))
    hidden = torch.randn(1, 4, 16)
    outputs = second(hidden)
    seen.clear()
    OVERLAPPED(first, [hidden], None, None, second, None, [outputs], [outputs.detach()])
    starts = [i for i, event in enumerate(seen) if event.endswith("sent")]
    assert len(starts) == 8
    for i in starts:
        kind = seen[i].removesuffix(" sent")
        j = seen.index(f"{kind} arrived", i)
        assert "computed" in seen[i:j], seen


def test_the_engine_labels_its_work_for_profilers():
    model = stage()
    with torch.profiler.profile() as profile:
        run_pair(model, model, tokens(1), tokens(2), True)
    names = {event.name for event in profile.events() or ()}
    assert names >= {f"{name}({kind})" for name in ("attn", "mlp", "dispatch", "combine") for kind in "FB"}
    assert {"mlp(W)", "attn(W)"} <= names


# ---- Lifetimes ----


@pytest.mark.parametrize("recompute", ["none", "norms", "full"])
def test_nothing_outlives_a_pair(recompute):
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
    gc.disable()  # a cycle would be found below
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


def test_activations_that_no_backward_needs_are_let_go_in_the_forward():
    """What the experts return is needed by the combine only, and what it returns by the next sum only."""
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


def test_recompute_saves_memory_level_by_level():
    none, norms, attention, full = (saved_bytes(level) for level in ("none", "norms", "attention", "full"))
    assert none > norms > attention > full > 0
    assert full < none / 2


# ---- Two forwards ----


def test_two_forwards_side_by_side():
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


# ---- Mistakes ----


def test_a_backward_that_the_stage_did_not_make_is_refused():
    model = stage()
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="forward of this TransformerStage did not produce with gradients"):
        OVERLAPPED(model, [tokens(1)], None, None, model, (x * 2).sum(), None, None)


def test_a_backward_can_be_walked_once():
    model = stage()
    loss = next_token_loss(model(tokens(1)), tokens(1))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has already run"):
        loss.backward()


def test_unknown_recompute_is_refused():
    with pytest.raises(ValueError, match="recompute must be one of none, norms, attention, full: got 'some'"):
        StageOptions(recompute="some")  # type: ignore[arg-type]
