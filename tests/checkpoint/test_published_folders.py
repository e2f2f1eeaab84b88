"""Folders of published models that are damaged or contradictory: an error of one line, never a partly loaded model."""

import shutil

import pytest
import torch

from moe_dualpipe.checkpoint import open_model
from moe_dualpipe.checkpoint.huggingface import from_pretrained
from tests.support.mutations import check_message
from tests.support.published import change_tensors, configure, random_model, save

EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
LACKS, SURPLUS = "lacks tensors of the model that its config.json describes: ", "config.json does not have: "


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return save(random_model("mixtral"), tmp_path_factory.mktemp("published") / "saved")


def put(**tensors):
    return lambda folder: change_tensors(folder, lambda found: found.update(tensors))


def pop(*names):
    return lambda folder: change_tensors(folder, lambda found: [found.pop(name) for name in names])


FAULTS = [
    (put(**{"model.norm.weight": torch.zeros(24, 1)}), "norm.weight has shape [24, 1], but by config.json it must"),
    (put(**{EXPERT.format(3): torch.zeros(11, 24)}), "w2.weight has shape [11, 24], but by config.json it must"),
    (pop(EXPERT.format(1), EXPERT.format(2)), f"{LACKS}{EXPERT.format(1)} (and 1 like it)"),
    (put(**{EXPERT.format(4): torch.zeros(24, 11)}), f"{SURPLUS}{EXPERT.format(4)}"),
    (lambda folder: configure(folder, num_hidden_layers=2), f"{SURPLUS}model.layers.2."),
    (lambda folder: configure(folder, num_hidden_layers=4), f"{LACKS}model.layers.3."),
    (lambda folder: configure(folder, num_hidden_layers=5000), "its 5,000 layers of 4 experts and 3 heads do not fit"),
    (lambda folder: configure(folder, num_local_experts=10**9), "of 1,000,000,000 experts and 3 heads do not fit into"),
    (lambda folder: configure(folder, vocab_size=2**30), "do not fit into the "),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json: give the local folder of a published"),
    (lambda folder: (folder / "config.json").write_text("[1]"), "config.json: Expected `object`, got `array`"),
    (lambda folder: (folder / "tokenizer.json").write_bytes(b'{"a": '), "tokenizer.json: Expecting value"),
]  # fmt: skip


@pytest.mark.parametrize("damage,problem", FAULTS, ids=[problem[:40] for _, problem in FAULTS])
def test_a_folder_that_does_not_fit_together_is_refused(original, tmp_path, damage, problem):
    folder = shutil.copytree(original, tmp_path / "saved")
    damage(folder)
    with pytest.raises(ValueError) as error:
        from_pretrained(folder)
    check_message(error.value)
    assert str(folder) in str(error.value) and problem in str(error.value)


def test_a_published_model_has_no_custom_layers(original):
    with pytest.raises(ValueError, match=f"{original} has experts 'swiglu', not 'own:Experts': leave out --experts"):
        open_model(str(original), {"experts": "own:Experts"})
