"""Generation with experts spread over ranks, with copies, and through a pipeline: the texts of one process."""

import dataclasses
import os
import re
import shutil
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.checkpoint import find_checkpoint, find_model, load_spread_model, open_model, read_manifest
from moe_dualpipe.cli import main
from moe_dualpipe.commands import generate as generate_command
from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.inference import Sampling, generate, generate_through_pipeline
from moe_dualpipe.inference.spread import _place, open_spread
from moe_dualpipe.models import MoE, StageOptions, build_model
from moe_dualpipe.pipeline import Numerics, Pipeline
from moe_dualpipe.runtime.world import World
from moe_dualpipe.schedule import build
from moe_dualpipe.training.config import OptimizerConfig
from tests.support.ranks import run_ranks, started
from tests.support.runs import MODEL, ROOT, SHALLOW, settings, torchrun, train, train_and_listen

SPREAD = dataclasses.replace(SHALLOW, num_layers=3, num_experts=6, experts_per_token=2, router_bias=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spread")
    run_ranks(1, train, settings(folder / "run", model=SPREAD, steps=2, seq_len=16, eval_sequences=1))
    without = shutil.copytree(find_checkpoint(str(folder / "run")), folder / "without loads")
    (without / "expert_loads.json").unlink()
    return folder


TOKENS, NUMBER = 12, 3


def spread_texts(rank, path, copies):
    """The tokens of this rank's texts, the slots in its layers, and the rows of their tables; 0: there is none."""
    world = World(rank, 2, torch.device("cpu"))
    rows = -(-NUMBER // 2)
    model, tokenizer, together = open_spread(path, {}, world, rows, 32, copies)
    prompts = torch.tensor([tokenizer.encode("def ")] * NUMBER)[rank * rows :][:rows]
    texts = generate(model, prompts, TOKENS, 32, seed=5, first=rank * rows, ranks=together).tolist()
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    placed = [len(layer.slots.slots_EC) if layer.slots else 0 for layer in layers]
    return texts, [len(layer.experts.down) for layer in layers], placed


@pytest.mark.parametrize("folder,copies", [
    pytest.param("run", 2, marks=pytest.mark.long), ("run", 6), ("run", 0),
])  # fmt: skip
def test_texts_do_not_depend_on_ranks_and_copies(run, folder, copies):
    model, tokenizer = open_model(str(run / "run"))
    prompts = torch.tensor([tokenizer.encode("def ")] * NUMBER)
    expected = generate(model, prompts, TOKENS, 32, seed=5).tolist()
    seen = run_ranks(2, spread_texts, str(run / folder), copies)
    assert [text for texts, *_ in seen for text in texts][:NUMBER] == expected
    for _, numbers, placed in seen:
        assert numbers == [3 + copies // 2] * 2
        assert placed == [7 if copies else 0] * 2


def test_copies_on_one_rank_have_the_same_weights(run):
    folder, config = find_model(str(run / "run"))
    model = load_spread_model(
        folder, config, Local(9), {1: (0, 1, 2, 3, 4, 5, 0, 1, 0), 2: (5, 5, 5, 5, 4, 3, 2, 1, 0)}
    )
    whole, _ = open_model(str(run / "run"))
    tokens = torch.arange(60).view(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), whole(tokens))


def test_what_cannot_be_copied_is_refused_in_one_line(run, tmp_path, refused):
    checkpoint = find_checkpoint(str(run / "run"))
    (tmp_path / "expert_loads.json").write_text('{"loads": [[1, 2]]}')
    folder, config = find_model(str(checkpoint))
    for call, message in (
        (lambda: _place(checkpoint, SPREAD, 2, 1, 1),
         "6 experts and 1 copies cannot be divided evenly over 2 processes: use --copies 0 or 2, or another number of"),
        (lambda: _place(checkpoint, SPREAD, 2, 8, 1),
         "--copies 8 is too many for 2 processes: use at most 6, 1 of each expert"),
        (lambda: _place(run / "without loads", SPREAD, 2, 2, 1),
         f"--copies needs the loads of a training run: {run / 'without loads'} has no expert_loads.json"),
        (lambda: _place(tmp_path, SPREAD, 2, 2, 1), "is for another model: this one has 6 experts"),
        (lambda: load_spread_model(folder, config, Local(8), {1: (0, 1, 2, 3, 4, 5, 0, 1), 3: (0,)}),
         "copies are placed for layers 1, 3, but its model has experts in layers 1, 2"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            call()
        assert "\n" not in str(error.value)
    several = "--copies 2 needs several processes: start them with torchrun\n"
    assert refused("generate", run / "run", "--copies", 2) == several


@pytest.mark.long
def test_the_commands_under_torchrun_print_what_one_process_prints(run, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("def \nclass Layer:\nx\n")
    words = ["--num", "1", "--sample-tokens", "8", "--prompts", str(tmp_path / "prompts.txt"), "--device", "cpu"]
    arguments = ["generate", str(run / "run"), *words]
    assert main(arguments) == 0
    expected = capsys.readouterr().out
    assert expected.startswith("--- 1 of 3\ndef ") and "--- 3 of 3\nx" in expected
    program = "--nproc-per-node", 2, "-m", "--", "moe_dualpipe.cli"  # torchrun has options like --num
    for more, micro_batches in (
        (["--ep-backend", "all_to_all"], "2 micro-batches"), (["--copies", 2, "--batch-size", 1], "1 micro-batch"),
    ):  # fmt: skip
        ended = torchrun(*program, *arguments, *more, folder=ROOT)
        assert (ended.returncode, ended.stdout) == (0, expected)
        assert re.findall("dispatch and combine: .*; (.*) at a time\n", ended.stderr) == [micro_batches]
    ended = torchrun(*program, *arguments, "--copies", 1, folder=ROOT)
    assert ended.returncode == 1 and ended.stderr.count("moe-dualpipe: error: 6 experts and 1 copies cannot be") == 1

    data = ["--data", str(tmp_path / "prompts.txt"), "--seq-len", "4", "--device", "cpu"]
    arguments = ["eval", str(run / "run"), *data]
    assert main(arguments) == 0
    expected = capsys.readouterr().out
    ended = torchrun(*program, *arguments, "--ep-backend", "all_to_all", folder=ROOT)
    assert ended.returncode == 0 and ended.stderr.count("; 2 micro-batches at a time\n") == 1
    speed = re.compile(r"[\d,]+ tokens/s")
    assert speed.sub("", ended.stdout) == speed.sub("", expected)


def generate_until(number, rank, folder, port, log):
    """A process of `generate` under torchrun. Rank 1 sends itself a signal before its texts."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    sys.argv = ["moe-dualpipe", "generate"]
    if rank == 1:
        generate_command.generate = lambda *_: os.kill(os.getpid(), number)
    words = ["--num", "2", "--sample-tokens", "4", "--device", "cpu", "--timeout", "4", "--ep-backend", "all_to_all"]
    sys.exit(main(["generate", str(folder), *words]))


@pytest.mark.parametrize("number,why", [(signal.SIGSTOP, "no sign of life for 2 s"), (signal.SIGKILL, "its process")])
def test_a_process_that_dies_or_stops_ends_the_others_with_one_line(run, tmp_path, number, why):
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    logs = [tmp_path / "0", tmp_path / "1"]
    arguments = [(number, rank, run / "run", store.port, log) for rank, log in enumerate(logs)]
    with started(generate_until, arguments) as (first, _):
        first.join(60)
        assert first.exitcode == 1
    *_, line = logs[0].read_text().splitlines()
    assert line.startswith("moe-dualpipe: rank 0 stops: rank 1 vanished") and why in line
    assert "Traceback" not in logs[0].read_text()


def test_only_a_newline_ends_a_prompt(run, tmp_path, capsys):
    """A file from Windows, with its byte order mark; a form feed and U+2028 are part of a prompt."""
    (tmp_path / "prompts.txt").write_bytes("\ufeffa\fb\r\nc\u2028d\n".encode())
    words = ["--prompts", str(tmp_path / "prompts.txt"), "--sample-tokens", "0", "--device", "cpu"]
    assert main(["generate", str(run / "run"), *words]) == 0
    assert capsys.readouterr().out == "--- 1 of 2\na\ufffdb\n--- 2 of 2\nc\ufffdd\n"


def test_options_that_need_several_processes_or_other_texts(run, tmp_path, refused):
    (tmp_path / "empty.txt").write_text("a\n\nb\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\n")
    for words, message in (
        (["generate", "--ep-backend", "shared"], "--ep-backend shared needs several processes: start them with"),
        (["eval", "--data", "x", "--ep-backend", "all_to_all"], "--ep-backend all_to_all needs several processes"),
        (["generate", "--prompts", str(tmp_path / "empty.txt")], "empty.txt has an empty line: use at least one"),
        (["generate", "--prompts", str(tmp_path / "none.txt")], f"cannot read {tmp_path / 'none.txt'}: No such file"),
        (["generate", "--prompts", str(tmp_path / "bytes.txt")], "bytes.txt: 'utf-8' codec can't decode"),
        (["generate", "--record-routes", "r", "--batch-size", "2"], "needs texts of one prompt in one batch"),
        (["generate", "--prompt", "a", "--prompts", "file"], "--prompts stands for --prompt: use one of them"),
        (["generate", "--batch-size", "0"], "--batch-size must be at least 1: got 0"),
    ):  # fmt: skip
        assert message in refused(words[0], run / "run", *words[1:])


# ---- Pipelines ----


PROMPTS = [torch.tensor(list(prompt)) for prompt in (b"hello pipeline", b"hello")]


def pipeline(ranks, name, window, fused_loss=False):
    schedule = build(name, ranks, 2 * ranks)
    return Pipeline(
        MODEL, schedule, (1, window), numerics=Numerics(options=StageOptions(seed=5, fused_loss=fused_loss))
    )


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
def test_the_command_uses_the_newest_checkpoint_of_a_run(tmp_path, capsys, refused):
    """The command prints the sample that the pipeline generated at the end of the run."""
    changes = {"steps": 2, "save_every": 1, "sample_tokens": 30, "prompt": "de\u00e9", "top_k": 5, "seed": 4}
    changes["optim"] = OptimizerConfig(lr=0.1, warmup_steps=0)
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
        assert message in refused("generate", saved, *wrong)
    assert "no checkpoint in" in refused("generate", tmp_path / "nothing")


def test_a_text_ends_with_its_document(tmp_path, capsys, monkeypatch):
    run_ranks(1, train, settings(tmp_path, steps=1))
    calls = []
    monkeypatch.setattr(
        "moe_dualpipe.commands.generate.generate", lambda *a: calls.append(a) or torch.tensor([[72, 105, 7, 0, 0]])
    )
    assert main(["generate", str(tmp_path), "--prompt", ">", "--top-k", "0"]) == 0
    assert calls[0][5] is None  # --top-k 0 is no limit, as None
    assert capsys.readouterr().out == ">Hi\ufffd\n"
