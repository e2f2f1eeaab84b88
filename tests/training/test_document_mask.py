"""Runs with a document mask: equal losses in every layout, and other losses than without the mask."""

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import losses, settings, train_each


@pytest.mark.long
def test_every_layout_trains_alike_with_a_document_mask(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(200):
        (text / f"{i}.txt").write_text(f"{i * i} is the square of {i}."[: 5 + i % 17])
    common = {"data": str(text), "steps": 2, "document_mask": True, "eval_sequences": 2}

    def runs(ranks, *changes):
        names = [tmp_path / f"{ranks}-{i}" for i in range(len(changes))]
        configs = [settings(name, **common | change) for name, change in zip(names, changes, strict=True)]
        return [(losses(run), losses(run, "validation_loss")) for run in run_ranks(ranks, train_each, configs)[0]]

    whole, plain = runs(1, {}, {"document_mask": False})
    apart = {"pp": 1, "ep": 2}
    first, sequential, recomputed, spread = runs(2, {}, {"overlap": False}, {"recompute": "full"}, apart)
    assert first == sequential == recomputed
    for ours, expected in zip(first, whole, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
    assert spread[1][0] == pytest.approx(whole[1][0], rel=1e-5)
    assert abs(plain[1][0] - whole[1][0]) > 1e-4
