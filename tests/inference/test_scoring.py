"""The loss of a long text in windows: every token counts once, with the context that the stride promises."""

import dataclasses

import numpy as np
import pytest
import torch

from moe_dualpipe.data import BYTES
from moe_dualpipe.inference import stream_losses
from moe_dualpipe.inference.scoring import perplexity, windows
from moe_dualpipe.models import MoE, StageOptions, build_model
from tests.support.runs import MODEL


@pytest.mark.parametrize("num_tokens", [2, 3, 8, 9, 10, 33])
@pytest.mark.parametrize("seq_len,stride", [(1, 1), (4, 1), (4, 3), (4, 4), (7, 5), (40, 40)])
def test_windows_score_every_token_but_the_first_once(num_tokens, seq_len, stride):
    found = [*windows(num_tokens, seq_len, stride)]
    scored = [token + 1 for one in found for token in range(one.start + one.seen, one.stop)]
    assert scored == [*range(1, num_tokens)]
    assert {one.stop - one.start for one in found} == {min(seq_len, num_tokens - 1)}
    assert all(one.seen >= seq_len - stride for one in found[1:])


def text(number):
    return np.random.default_rng(0).integers(0, MODEL.vocab_size, number).astype(np.uint8)


@pytest.mark.parametrize("seq_len,stride", [(16, None), (16, 5), (16, 1), (200, None)])
@pytest.mark.parametrize("options", [StageOptions(), StageOptions(fused_loss=True)], ids=["", "fused_loss"])
@pytest.mark.quick("-16-5", "-200-None", "fused_loss-16-1")
def test_losses_are_those_of_the_models_logits(seq_len, stride, options):
    """Directly: token i after the tokens of its window, one window at a time."""
    model, tokens = build_model(dataclasses.replace(MODEL, mtp_layers=1), options=options), text(61)
    found = torch.cat([*stream_losses(model, tokens, seq_len, stride, batch_size=3)])
    expected = []
    for one in windows(len(tokens), seq_len, stride or seq_len):
        ids = torch.from_numpy(tokens[one.start : one.stop + 1].astype(np.int64))
        with torch.no_grad():
            log_probs = model.logits(model(ids[None, :-1]))[0].double().log_softmax(-1)
        expected += [-log_probs[i, ids[i + 1]].item() for i in range(one.seen, one.stop - one.start)]
    assert found.shape == (60,)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert model.training


@pytest.mark.parametrize("tokens,numbers,message", [
    (text(1), (16, None), "a text needs at least two tokens, of which all but the first are scored: got 1"),
    (text(9), (0, None), "seq_len must be at least 1: got 0"),
    (text(9), (4, 5), "stride must be at most 4: got 5"),
    (text(9), (4, 0), "stride must be at least 1: got 0"),
    (np.full(9, 256), (4, None), "token ids must be from 0 to 255, the vocabulary of the model: got 256"),
], ids=str)  # fmt: skip
def test_texts_that_cannot_be_scored(tokens, numbers, message):
    with pytest.raises(ValueError) as error:
        list(stream_losses(build_model(MODEL), tokens, *numbers))
    assert str(error.value) == message


def test_weights_that_are_not_finite_are_named():
    model = build_model(MODEL)
    name = "layers.1.mlp.router.logits.weight"
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = torch.nan
    with pytest.raises(ValueError, match=f"^the loss is nan: {name} is not finite$"):
        perplexity(model, BYTES, text(20), 16, 16, 2)


def test_a_score_says_how_evenly_the_experts_were_used():
    model = build_model(MODEL)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    with torch.no_grad():
        for layer in layers:
            layer.router.logits.weight.zero_()  # all scores are equal: each token takes the first two experts
    for layer in layers:
        layer.load_E[:] = 7  # what training has counted stays
    found = perplexity(model, BYTES, text(50), 16, 16, 2)
    routed = MODEL.routed_blocks()
    last = (
        f"expert loads: MaxVio 1.00, 1.00 in layer {routed[0]}; {2 * len(routed)} of {4 * len(routed)} experts got less"
    )
    assert found.expert_loads == f"{last} than 1% of the mean"
    assert found.expert_loads in str(found)
    assert all((layer.load_E == 7).all() for layer in layers)
    assert not any(layer.counts_all for layer in layers)
