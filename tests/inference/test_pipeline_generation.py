"""A pipeline generates the same tokens as the whole model; the command generates from a checkpoint."""

import dataclasses

import pytest
import torch

from moe_dualpipe.checkpoint import read_manifest
from moe_dualpipe.cli import main
from moe_dualpipe.inference import Sampling, generate, generate_through_pipeline
from moe_dualpipe.models import StageOptions, build_model
from moe_dualpipe.pipeline import Pipeline
from moe_dualpipe.schedule import build
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, settings, train, train_and_listen

PROMPTS = [torch.tensor(list(prompt)) for prompt in (b"hello pipeline", b"hello")]


def pipeline(ranks, name, window, fused_loss=False):
    schedule = build(name, ranks, 2 * ranks)
    return Pipeline(MODEL, schedule, (1, window), options=StageOptions(seed=5, fused_loss=fused_loss))


def generates_like_the_whole_model(_rank, ranks, name, fused_loss):
    model = build_model(MODEL, options=StageOptions(seed=5))
    for sampling, window, prompts in (
        (Sampling(0), 40, PROMPTS),
        (Sampling(0.8), 40, PROMPTS[:1]),
        (Sampling(1.5, 9, 0.9), 8, PROMPTS[:1]),  # the prompt is longer than max_length
    ):
        got = generate_through_pipeline(pipeline(ranks, name, window, fused_loss), prompts, 7, sampling, seed=9)
        choices = sampling.temperature, sampling.top_k, sampling.top_p
        assert torch.equal(got, generate(model, prompts, 7, window, *choices, seed=9))


@pytest.mark.parametrize("fused_loss,ranks,name", [
    (False, 1, "dualpipev"), (True, 2, "dualpipe"), (False, 2, "dualpipev"), (False, 2, "1f1b"),
])  # fmt: skip
@pytest.mark.quick("False-1-dualpipev", "True-2-dualpipe")
def test_a_pipeline_generates_the_tokens_of_the_whole_model(fused_loss, ranks, name):
    run_ranks(ranks, generates_like_the_whole_model, ranks, name, fused_loss)


@pytest.mark.long
def test_the_command_uses_the_newest_checkpoint_of_a_run(tmp_path, capsys):
    """The command prints the sample that the pipeline generated at the end of the run."""
    changes = {"steps": 2, "save_every": 1, "sample_tokens": 30, "prompt": "de\u00e9", "top_k": 5, "seed": 4}
    how = ["--prompt", "de\u00e9", "--sample-tokens", "30", "--top-k", "5", "--seed", "4", "--seq-len", "32"]
    said = run_ranks(2, train_and_listen, settings(tmp_path, **changes))[0]
    sample = said.partition("sample:\n")[2].partition("\nsaved ")[0]
    texts = []
    for words in ([str(tmp_path)], [str(tmp_path / "checkpoints" / "step-000001")], [str(tmp_path), "--num", "2"]):
        assert main(["generate", *words, *how]) == 0
        texts.append(capsys.readouterr().out)
    assert "".join(f"    | {line}\n" for line in texts[0][:-1].split("\n")) == f"{sample}\n"
    assert texts[0] != texts[1]
    first, second = texts[2].removeprefix("--- 1 of 2\n").split("--- 2 of 2\n")
    assert first.startswith("de\u00e9") and second.startswith("de\u00e9") and first != second

    saved = tmp_path / "checkpoints" / "step-000002"
    manifest = read_manifest(saved)
    for model, wrong, message in (
        ({}, ["--num", "0"], "--num must be at least 1: got 0"),
        ({}, ["--prompt", ""], "--prompt is empty"),
        ({}, ["--top-k", "-1"], "top_k must be at least 1: got -1"),
        ({}, ["--sample-tokens", "-1"], "--sample-tokens must be at least 0: got -1"),
        ({"experts": "antigravity:Class"}, [],
         "has custom experts 'antigravity:Class': if you trust this code, use --experts antigravity:Class"),
        ({"sides": 3}, [], "cannot build the model of"),
    ):  # fmt: skip
        (saved / "run.json").write_bytes(dataclasses.replace(manifest, model={**manifest.model, **model}).encode())
        assert main(["generate", str(saved), *wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "nothing")]) == 2
    assert "no checkpoint in" in capsys.readouterr().err


def test_a_text_ends_with_its_document(tmp_path, capsys, monkeypatch):
    run_ranks(1, train, settings(tmp_path, steps=1))
    calls = []
    monkeypatch.setattr(
        "moe_dualpipe.commands.generate.generate", lambda *a: calls.append(a) or torch.tensor([[72, 105, 7, 0, 0]])
    )
    assert main(["generate", str(tmp_path), "--prompt", ">", "--top-k", "0"]) == 0
    assert calls[0][5] is None  # --top-k 0 is no limit, as None
    assert capsys.readouterr().out == ">Hi\ufffd\n"
