"""`moe-dualpipe export --to huggingface`: the folder works in transformers, whatever the run was."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

import moe_dualpipe
from moe_dualpipe.checkpoint import destinations, find_checkpoint, load_model, start_tokenizer
from moe_dualpipe.checkpoint.huggingface import companion_files, find_architecture, from_pretrained, save_pretrained
from moe_dualpipe.checkpoint.huggingface.companions import read_companions
from moe_dualpipe.cli import main
from moe_dualpipe.data import find_tokenizer
from moe_dualpipe.data.tokenizer import BPETokenizer
from moe_dualpipe.inference import printable_text
from moe_dualpipe.models import preset
from moe_dualpipe.training.options import parse_arguments
from tests.support.published import random_model, save, transformers_model
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, TEXT, change, make_run, settings, train, train_each
from tests.support.texts import with_special_tokens

transformers = pytest.importorskip("transformers")
PLAIN = dataclasses.replace(MODEL, num_shared_experts=0, num_dense_layers=0)
TINY = dataclasses.replace(
    preset("tiny"), hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, dense_size=64, expert_size=32,
    num_experts=4, init_std=0.1,
)  # fmt: skip
TEXTS = ("def f():\n    return 'ü — 中文'\n", " \t  a\r\n\n\n  b  ", "ĀāĊ Ġ\u00a0\u200b", "<|end", "")


def export(run, out, *options):
    return main(["export", str(run), "--out", str(out), *options])


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("bytes") / "run"
    run_ranks(2, train, settings(run, model=TINY, steps=2))
    return run


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory):
    base = tmp_path_factory.mktemp("bpe")
    assert main(["data", "prepare", TEXT, "--out", str(base / "corpus"), "--vocab-size", "300"]) == 0
    model = dataclasses.replace(PLAIN, vocab_size=300)
    run_ranks(1, train, settings(base / "run", model=model, steps=1, data=(str(base / "corpus"),)))
    return base / "run"


def test_our_own_presets_are_of_a_published_architecture_or_the_nearest_is_named():
    for name in ("tiny", "small"):
        assert find_architecture(preset(name)).model_type == "glm4_moe"
    problem = "the nearest, glm4_moe, cannot express router_score 'softmax', only 'sigmoid'"
    with pytest.raises(ValueError, match=problem):
        find_architecture(dataclasses.replace(preset("tiny"), router_score="softmax"))


def test_transformers_computes_the_logits_of_a_run(byte_run, tmp_path, capsys):
    assert export(byte_run, tmp_path / "out", "--max-shard-size", "100KB", "--dtype", "float32") == 0
    model = load_model(find_checkpoint(str(byte_run)))
    tokens = torch.randint(256, (2, 17))
    with torch.no_grad():
        ours, theirs = model.logits(model(tokens)), transformers_model(tmp_path / "out", torch.float32)(tokens).logits
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    shards = len([*(tmp_path / "out").glob("model-*")])
    assert shards > 2 and f": 89 tensors, 0.33 MB in {shards} safetensors files\n" in capsys.readouterr().out


def check_tokenizer(folder, tokenizer):
    """transformers encodes and decodes as the run did, and ends texts with the same token."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ids == tokenizer.encode(text), text
        assert theirs.decode(ids) == text
    generation = transformers.GenerationConfig.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert theirs.eos_token_id == generation.eos_token_id == config.eos_token_id == tokenizer.end_id
    assert config.bos_token_id is None and config.pad_token_id is None


@pytest.mark.parametrize("kind", ["byte_run", "bpe_run"])
def test_transformers_loads_the_tokenizer_of_a_run(kind, request, tmp_path):
    run = request.getfixturevalue(kind)
    assert export(run, tmp_path / "out") == 0
    tokenizer = find_tokenizer(find_checkpoint(str(run)))
    check_tokenizer(tmp_path / "out", tokenizer)
    if kind == "bpe_run":
        content = (find_checkpoint(str(run)) / "tokenizer.json").read_bytes()
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == content
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x3000, 0x10000)]))
    assert theirs.encode(every) == tokenizer.encode(every)
    assert theirs.encode("a<|endoftext|>b") == [97, 0, 98]
    assert theirs.decode([97, 0, 98], skip_special_tokens=True) == "ab"
    assert theirs.decode([0xC3, 65]) == tokenizer.decode([0xC3, 65])


def test_the_files_of_a_published_model_stay_as_they_are_and_its_config_is_written_last(bpe_run, tmp_path, monkeypatch):
    save(random_model("olmoe"), tmp_path / "saved")
    texts = {
        "tokenizer.json": (find_checkpoint(str(bpe_run)) / "tokenizer.json").read_text(),
        "tokenizer_config.json": '{"eos_token": "<|endoftext|>", "model_max_length": 77, "chat_template": "ü"}',
        "generation_config.json": '{"eos_token_id": [3, 4], "temperature": 0.6}', "chat_template.jinja": "{{ 中 }}\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / "saved" / name).write_text(text, "utf-8")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config |= {"eos_token_id": 5, "max_position_embeddings": 1234}
    del config["pad_token_id"]
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    written, write = [], destinations.write_synced
    monkeypatch.setattr(
        destinations, "write_synced", lambda file, *data: (written.append(file.name), write(file, *data))
    )
    save_pretrained(from_pretrained(tmp_path / "saved"), tmp_path / "again")
    assert {*texts} < {*written} and written[-1] == "config.json"
    assert {name: (tmp_path / "again" / name).read_text("utf-8") for name in texts} == texts
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["eos_token_id"] == 5 and again["max_position_embeddings"] == 1234 and "pad_token_id" not in again


# ---- Runs that start from a published model: they use its model, tokenizer and files, and export them again ----


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


def test_text_begins_as_in_transformers_in_generation_evaluation_and_training(tmp_path, capsys):
    """With <s>, as greedy text, the loss of a document and what a run trains on have it there."""
    folder, text = tmp_path / "model", tmp_path / "a.txt"
    save(random_model("mixtral", vocab_size=VOCAB + 4), folder)
    trained = BPETokenizer.train([str(number) for number in range(999)], VOCAB).to_json()
    (folder / "tokenizer.json").write_bytes(with_special_tokens(trained, VOCAB, begins=True))
    text.write_text("12 <|im_start|> 345")
    theirs, tokenizer = transformers_model(folder, torch.float32), transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("1<|im_start|>2", return_tensors="pt").input_ids
    assert prompt[0, 0] == VOCAB and VOCAB + 2 in prompt
    options = ["--prompt", "1<|im_start|>2", "--temperature", "0", "--sample-tokens", "9", "--device", "cpu"]
    assert main(["generate", str(folder), *options]) == 0
    expected = theirs.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=0)[0]
    assert capsys.readouterr().out == printable_text(tokenizer.decode(expected[1:])) + "\n"
    for option in ([], ["--special-tokens"]):
        evaluate = ["eval", str(folder), "--data", str(text), "--json", "--device", "cpu", *option]
        assert main(evaluate) == 0
        ids = tokenizer(text.read_text(), split_special_tokens=not option, return_tensors="pt").input_ids
        with torch.no_grad():
            ids = torch.cat([ids, torch.tensor([[0]])], 1)
            loss = theirs(ids, labels=ids).loss.item()
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(loss, 1e-5)
    (tmp_path / "rows.jsonl").write_text('{"text": "12 <|im_start|> 345"}\n' * 99)
    config = started(folder, tmp_path / "run", data=(str(tmp_path / "rows.jsonl"),), special_tokens=True)
    inputs_BS, labels_BS, _ = make_run(config).text.batch(0, 0, 64, 8)
    assert {VOCAB, VOCAB + 2} < {*inputs_BS.flatten().tolist()} == {*labels_BS.flatten().tolist()}


@pytest.mark.parametrize("files", [
    {"generation_config.json": [1, 3]}, {"config.json": [3, 1]}, {"config.json": 5, "generation_config.json": [3, 1]},
], ids=lambda files: " ".join(files))  # fmt: skip
def test_each_end_token_ends_a_generation_as_in_transformers(published, tmp_path, capsys, files):
    """Numbers are of positions in the text without an end. A run that started from the model has the same tokens."""
    folder, prompt = Path(shutil.copytree(published, tmp_path / "model")), "word 12"
    ids_BS = torch.tensor([find_tokenizer(folder).encode(prompt)])

    def theirs():
        return transformers_model(folder, torch.float32).generate(ids_BS, max_new_tokens=9, do_sample=False)[0].tolist()

    whole = theirs()[ids_BS.shape[1] :]
    (folder / "generation_config.json").unlink()
    for name, at in files.items():
        before = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        ends = {"eos_token_id": whole[at] if isinstance(at, int) else [whole[i] for i in at]}
        (folder / name).write_text(json.dumps(before | ends))
    (checkpoint := tmp_path / "checkpoint").mkdir()
    for name, content in companion_files(read_companions(folder)).items():
        (checkpoint / name).write_bytes(content)
    shutil.copy(folder / "tokenizer.json", checkpoint)
    ends = start_tokenizer(folder, VOCAB).stop_ids
    assert start_tokenizer(checkpoint, VOCAB).stop_ids == ends and len(ends) == 2
    options = ["--prompt", prompt, "--temperature", "0", "--sample-tokens", "9", "--device", "cpu"]
    assert main(["generate", str(folder), *options]) == 0
    expected = theirs()
    assert len(expected) == ids_BS.shape[1] + 2 and expected[-1] in ends
    assert capsys.readouterr().out == printable_text(find_tokenizer(folder).decode(expected[:-1])) + "\n"


def started(folder, out, **changes):
    """The options of a run that starts from `folder` with its model."""
    config = change(settings(out, steps=2, weights=str(folder)), **changes)
    return dataclasses.replace(config, model=moe_dualpipe.TrainConfig(checkpoint=config.checkpoint).model)


@pytest.mark.long
def test_it_trains_on_two_ranks_resumes_and_is_exported_with_its_files(published, tmp_path):
    first = started(published, tmp_path / "run")
    later = change(first, weights=None, resume=str(tmp_path / "run"), steps=3, export=str(tmp_path / "out"))
    run_ranks(2, train_each, [first, later])
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
    moe_dualpipe.train(settings(tmp_path / "run", model=MODEL, steps=1), verbose=False)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000001"):
        config = parse_arguments(["--resume", str(path)])
        assert config.model == MODEL
        assert config.name == "run"
    assert parse_arguments(["--resume", str(tmp_path / "missing")]).model == tiny
