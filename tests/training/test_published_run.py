"""Runs that start from a published model: they use its model, tokenizer and files, and export them again."""

import dataclasses
import json

import pytest
import torch
import transformers

from moe_dualpipe import TrainConfig, train
from moe_dualpipe.checkpoint import find_checkpoint, load_model
from moe_dualpipe.data.tokenizer import BPETokenizer
from moe_dualpipe.models import preset
from moe_dualpipe.training.options import parse_arguments
from tests.support.published import random_model, save, transformers_model
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, change, settings

VOCAB = 300
TOKENS_BS = torch.randint(VOCAB, (2, 19), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A published model with a tokenizer and other files."""
    folder = tmp_path_factory.mktemp("published") / "Random-3x"
    save(random_model("qwen3_moe", vocab_size=VOCAB), folder)
    texts = ["def text(self):\n    return self.words\n"] * 9 + [str(number) for number in range(99)]
    (folder / "tokenizer.json").write_bytes(BPETokenizer.train(texts, VOCAB).to_json())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def started(folder, out, **changes):
    """The options of a run that starts from `folder` with its model."""
    config = change(settings(out, steps=2, weights=str(folder)), **changes)
    return dataclasses.replace(config, model=TrainConfig(checkpoint=config.checkpoint).model)


def train_on_ranks(_rank, *configs):
    for config in configs:
        train(config, verbose=False)


@pytest.mark.long
def test_it_trains_on_two_ranks_resumes_and_is_exported_with_its_files(published, tmp_path):
    first = started(published, tmp_path / "run")
    later = change(first, weights=None, resume=str(tmp_path / "run"), steps=3, export=str(tmp_path / "out"))
    run_ranks(2, train_on_ranks, first, later)
    exported = tmp_path / "out"
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (published, exported))
    assert after["max_position_embeddings"] == before["max_position_embeddings"] == 64
    assert (exported / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (exported / "tokenizer.json").read_bytes() == (published / "tokenizer.json").read_bytes()
    model = load_model(find_checkpoint(str(tmp_path / "run")))
    with torch.no_grad():
        ours, theirs = model.logits(model(TOKENS_BS)), transformers_model(exported, torch.float32)(TOKENS_BS).logits
        untrained = transformers_model(published, torch.float32)(TOKENS_BS).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (theirs - untrained).abs().max() > 1e-3
    text = "def words(self): return 17"
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_start_chooses_the_model_unless_an_option_does(published, tmp_path):
    weights = ["--weights", str(published)]
    model = parse_arguments(weights).model
    assert (model.vocab_size, model.num_layers, model.qk_norm, model.dense_layers) == (VOCAB, 3, "head", (0, 2))
    changed = parse_arguments([*weights, "--set", "model.sequence_loss=0.01"]).model
    assert changed == dataclasses.replace(model, sequence_loss=0.01)
    tiny = preset("tiny")
    assert parse_arguments([*weights, "--preset", "tiny"]).model == parse_arguments([]).model == tiny
    assert parse_arguments(weights).name == "Random-3x"
    train(settings(tmp_path / "run", model=MODEL, steps=1), verbose=False)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000001"):
        config = parse_arguments(["--resume", str(path)])
        assert config.model == MODEL
        assert config.name == "run"
    assert parse_arguments(["--resume", str(tmp_path / "missing")]).model == tiny
