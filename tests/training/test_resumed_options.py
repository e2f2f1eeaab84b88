"""Train, stop, and resume with no other option: bit for bit the run without a stop, and a line for all that changed."""

import contextlib
import hashlib
import io
import json

import numpy as np
import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.training.step import Trainer
from tests.support.runs import ROOT, SMALL, records, without_clocks

LAYERS = ROOT / "examples" / "layers"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Data of each kind, by its name: what to type."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    texts = [" ".join(map(str, random.integers(0, 999, 400))) for _ in range(20)]
    (folder / "text").mkdir()
    for index, text in enumerate(texts):
        (folder / "text" / f"{index}.md").write_text(text)
    rows = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (folder / "rows.jsonl").write_text(rows)
    random.integers(0, 256, 20_000).astype("<u4").tofile(folder / "ids.bin")
    prepare = ("data", "prepare", folder / "text", "--out", folder / "prepared", "--tokenizer", "bytes")
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*map(str, prepare)]) == 0
    return {
        "text": ("--data", f"{folder}/text/*.md"),
        "jsonl": ("--data", folder / "rows.jsonl", "--set", "batch.data_field=body"),
        "ids": ("--data", folder / "ids.bin", "--set", "batch.data_dtype=uint32"),
        "prepared": ("--data", folder / "prepared", "--document-mask"),
        "mixture": ("--data", f"{folder}/text/*.md=2", f"{folder}/prepared=0.5"),
        "stdlib": ("--data", "stdlib"),
    }


RUNS = {
    "text, adamw": ("text", "--lr-schedule", "wsd", "--freeze", "embedding.weight", "--dtype", "bfloat16"),
    "jsonl, muon": ("jsonl", "--optimizer", "muon", "--seed", 7, "--set", "optim.momentum=0.8", "model.mtp_layers=1"),
    "ids, experts": ("ids", "--experts", LAYERS / "squared_relu.py:SquaredReLUExperts", "--set", "bias_rate=0.1"),
    "prepared, attention": (
        "prepared", "--optimizer", "muon", "--attention", LAYERS / "sliding_window.py:SlidingWindow",
        "--set", "model.attention_options.window=8",
    ),
    "mixture, router": ("mixture", "--router", "examples.layers.top_p:TopP", "--set", "model.router_options.p=0.7"),
    "stdlib, block": ("stdlib", "--block", LAYERS / "parallel_block.py:ParallelBlock", "--recompute", "attention"),
}  # fmt: skip


def run(*arguments, stop=None):
    """A run on the command line, which is asked to stop in the step with this number. Returns what it prints."""
    step = Trainer.step

    def stopping(trainer, number):
        trainer.stop.requested |= number + 1 == stop
        return step(trainer, number)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(Trainer, "step", stopping)
        main(["train", "--device", "cpu", *map(str, arguments)])
    return printed.getvalue()


def outcome(folder):
    """The metrics of a run, but for the validation at a resume, and hashes of the tensors of its last checkpoint."""
    last = max((folder / "checkpoints").iterdir())
    tensors = hashlib.sha256((last / "rank-0-0.safetensors").read_bytes()).hexdigest()
    found = without_clocks(records(folder))
    return [one for one in found if "loss" in one], found[-1], tensors


def start(data, *options):
    small = [*SMALL[:-2], *("--steps", 4, "--warmup-steps", 1, "--sample-tokens", 0, "--batch-size", 6)]
    return [*small, *data, *options]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.quick("prepared, attention", "mixture, router")
def test_a_run_that_is_stopped_and_resumed_is_the_run_without_a_stop(tmp_path, data, name):
    kind, *options = RUNS[name]
    run(*start(data[kind], *options), "--out", tmp_path / "whole")
    run(*start(data[kind], *options), "--out", tmp_path / "run", stop=2)
    assert max((tmp_path / "run" / "checkpoints").iterdir()).name == "step-000002"
    printed = run("--resume", tmp_path / "run")
    assert "steps 3 to 4 of" in printed and "changed:" not in printed
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def text_of(folder):
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.md").write_text(f"the text of {name} " * 400)
    return "--data", f"{folder}/*.md"


def test_a_refused_start_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as under torchrun, whose launchers leave marks
    data = text_of(tmp_path / "text")
    with pytest.raises(SystemExit, match="2"):
        run(*start(data), "--out", tmp_path / "run", "--freeze", "*")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    run(*start(data), "--out", tmp_path / "run")
    assert {"launchers", "run.toml"} < {path.name for path in (tmp_path / "run").iterdir()}
