"""What follows the last label of a sequence is padding: it counts in no loss, gradient, expert load or bias."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from moe_dualpipe.models import RouterLayer, attach
from moe_dualpipe.pipeline.labels import Batch, step_labels
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.schedule import build
from tests.support.updates import COUNT, MODEL, PLAIN, assert_equal, update

SHORT, LONG = 8, 20


class MeanRouter(RouterLayer):
    """Top-k of a softmax, with a custom loss: a mean over positions."""

    def __init__(self, config):
        super().__init__()
        self.k, self.score = config.experts_per_token, nn.Linear(config.hidden_size, config.num_experts)

    def forward(self, x):
        logits_BSE = self.score(x).double()
        weights_TK, ids_TK = logits_BSE.flatten(0, 1).softmax(-1).topk(self.k)
        squares_BS, weights_BS = logits_BSE.square().sum(-1), self.weights_BS
        means_B = squares_BS.mean(1) if weights_BS is None else (weights_BS * squares_BS).sum(1)
        return attach(weights_TK, 0.1 * means_B.mean()), ids_TK


def short_batch(lengths=(SHORT,) * COUNT):
    """Inputs and labels. The first two labels, of a prompt, are ignored; they do count as tokens of experts."""
    tokens = torch.randint(31, (COUNT, SHORT + 1), generator=torch.Generator().manual_seed(3))
    labels = tokens[:, 1:].clone()
    labels[:, :2] = -100
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return tokens[:, :-1], labels


def padded(inputs, labels, pads_with):
    def widen(tensor, value):
        return torch.cat([tensor, torch.full((COUNT, LONG - SHORT), value)], dim=1)

    return widen(inputs, pads_with), widen(labels, -100)


CHANGES = {
    "router losses": ({}, {}),
    "softmax": ({"router_score": "softmax", "router_bias": False}, {}),
    "groups": ({"expert_groups": 2, "top_groups": 1, "experts_per_token": 1}, {}),
    "balanced": ({"router": "balanced"}, {}),
    "MTP": ({"mtp_layers": 2}, {}),
    "recompute": ({}, {"recompute": "full"}),
    "fused loss": ({"mtp_layers": 1}, {"fused_loss": True, "recompute": "attention"}),
    "custom router": ({"router": MeanRouter, "router_bias": False, "sequence_loss": 0.0, "z_loss": 0.0}, {}),
}


@pytest.mark.parametrize(("changes", "options"), CHANGES.values(), ids=CHANGES)
@pytest.mark.quick("router losses", "groups", "balanced", "fused loss", "custom router")
def test_padding_changes_nothing(changes, options):
    model, batch = replace(MODEL, **changes), short_batch()
    expected = update(model, PLAIN, batch, **options)
    assert expected["loads"].sum(1).tolist() == [COUNT * SHORT * model.experts_per_token] * 3 + [
        COUNT * (SHORT - k) * model.experts_per_token for k in range(1, 1 + model.mtp_layers)
    ]
    assert_equal(update(model, PLAIN, padded(*batch, 17), **options), expected)


def test_unequal_lengths_count_as_sequences_alone():
    """Each sequence alone, cut off after its last label, against all in one batch."""
    model, (inputs, labels) = replace(MODEL, router_bias=False, mtp_layers=1), short_batch((8, 5, 8, 3, 0, 6, 8, 4))
    found = update(model, PLAIN, padded(inputs, labels, 9))
    lengths = [8, 5, 8, 3, 6, 8, 4]
    rows = [row for row in range(COUNT) if row != 4]
    alone = [
        update(model, build("1f1b", 1, 1), (inputs[row : row + 1, :n], labels[row : row + 1, :n]), size=1)
        for row, n in zip(rows, lengths, strict=True)
    ]
    assert torch.equal(found["loads"], sum(each["loads"] for each in alone))
    for name in ("sequence_loss", "z_loss"):  # rounded to 6 digits
        expected = [each[name] * 4 for each in alone]  # of 3 layers and the MTP module
        counts = [4] * len(alone)
        assert found[name].item() == pytest.approx(torch.stack(expected).sum().item() / sum(counts), abs=2e-6), name


def test_the_weights_of_positions_are_means_over_sequences():
    """Example: lengths 2, 0 and 4 of 4: two of three sequences have labels, so each counts 3/2."""
    labels = torch.full((3, 4), -100)
    labels[0, 1], labels[2, 3] = 5, 6
    found = step_labels(Batch(labels, labels), 1, Layout(1, 1, 1, 0), depths=1)
    assert found.micro_batches == [[1.5, 1.5], [0.0, 0.0], [1.5, 1.5]]
    assert found.positions is not None
    assert found.positions[0].tolist() == [[0.75, 0.75, 0, 0], [0] * 4, [0.375] * 4]
    assert found.positions[1].tolist() == [[1.5, 0, 0], [0] * 3, [0.5] * 3]
    assert all(a is not b for a, b in pairwise(found.positions))
