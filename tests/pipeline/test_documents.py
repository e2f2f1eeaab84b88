"""Documents that share a sequence: each counts as if it were a sequence of its own."""

from dataclasses import replace

import pytest
import torch

from moe_dualpipe.pipeline.labels import Batch
from moe_dualpipe.schedule import build
from tests.pipeline.test_padding import MeanRouter
from tests.support.updates import MODEL, PLAIN, assert_equal, update

LENGTHS = (5, 1, 6), (9, 3), (12,), (2, 2, 2, 2), (7,), (1, 11), (4, 8), (3, 3, 3, 3)
"""Of the documents in each of 8 sequences of 16 positions; what follows them is padding."""
S = 16


def documents_alone():
    """The inputs and labels of each document. The first label of a longer one is ignored, as of a prompt."""
    random, found = torch.Generator().manual_seed(5), []
    for length in (length for row in LENGTHS for length in row):
        tokens = torch.randint(MODEL.vocab_size, (length + 1,), generator=random)
        labels = tokens[1:].clone()
        labels[: length > 2] = -100
        found.append((tokens[:-1], labels))
    return found


def one_by_one():
    """Each document in a sequence of its own, up to 24 sequences, the last of which have none."""
    batch = Batch(torch.full((24, S), 9), torch.full((24, S), -100))
    for row, (inputs, labels) in enumerate(documents_alone()):
        batch.inputs[row, : len(inputs)], batch.labels[row, : len(labels)] = inputs, labels
    return batch


def packed():
    shape, alone = (len(LENGTHS), S), iter(documents_alone())
    batch = Batch(torch.full(shape, 17), torch.full(shape, 5), torch.full(shape, -1))  # labels of padding do not count
    for row, lengths in enumerate(LENGTHS):
        first = 0
        for number, length in enumerate(lengths):
            part = slice(first, first + length)
            batch.inputs[row, part], batch.labels[row, part] = next(alone)
            batch.documents[row, part], first = 2 * number, part.stop  # any numbers that differ
    return batch


CASES = {
    "router losses": ({}, {}),
    "softmax": ({"router_score": "softmax", "router_bias": False}, {}),
    "MTP": ({"mtp_layers": 2}, {}),
    "latent attention": ({"attention": "mla", "kv_rank": 16, "rope_dim": 4, "value_dim": 12, "num_kv_heads": 2}, {}),
    "recompute": ({"mtp_layers": 1}, {"recompute": "full", "fused_loss": True}),
    "custom router": ({"router": MeanRouter, "router_bias": False, "sequence_loss": 0.0, "z_loss": 0.0}, {}),
    "no losses": ({"sequence_loss": 0.0, "z_loss": 0.0}, {}),
}


@pytest.mark.parametrize(("changes", "options"), CASES.values(), ids=CASES)
@pytest.mark.quick("router losses", "latent attention", "recompute", "custom router")
def test_packed_documents_count_as_documents_alone(changes, options):
    """Losses, gradients, loads, router losses and biases, in fp64."""
    model = replace(MODEL, **changes)
    expected = update(model, build("1f1b", 1, 12), one_by_one(), **options)
    assert_equal(update(model, PLAIN, packed(), **options), expected)


def test_a_document_does_not_see_the_others():
    batch = packed()
    for tensor in (batch.inputs, batch.labels):
        tensor[0, 5] = 3  # the second of three documents, of one token
    batch.labels[:, 6:], batch.labels[1:] = -100, -100
    before = batch.labels[0, 5].item()
    batch.labels[0, :5] = -100
    found = update(MODEL, PLAIN, batch)["loss"].item()
    batch.inputs[0, :5], batch.inputs[0, 6:], batch.inputs[1:] = 1, 2, 3
    assert before == 3 and update(MODEL, PLAIN, batch)["loss"].item() == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("wrong", [-2, S])
def test_numbers_of_documents_are_below_the_length(wrong):
    batch = packed()
    batch.documents[3, 2] = wrong
    with pytest.raises(ValueError, match=f"documents must be numbers from 0 to 15, or -1 for padding: got {wrong}"):
        update(MODEL, PLAIN, batch)
