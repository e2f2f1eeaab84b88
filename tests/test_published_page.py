"""docs/checkpoints.md, published models: the commands run, on a small model; the sizes are right."""

import json
import math
import os
import re
import runpy
import shlex
import sys

import pytest
import torch

from moe_dualpipe import cli
from moe_dualpipe.checkpoint.huggingface import ARCHITECTURES, find_architecture, from_pretrained
from moe_dualpipe.checkpoint.huggingface.architectures import ALIASES
from moe_dualpipe.checkpoint.huggingface.save import plan_export
from moe_dualpipe.data.tokenizer import BPETokenizer
from moe_dualpipe.models import PRESETS, split
from tests.support.published import random_model, save
from tests.support.ranks import exits_and_logs
from tests.support.runs import ROOT

PAGE = (ROOT / "docs" / "checkpoints.md").read_text()
SECTION = PAGE[PAGE.index("\n## Published models\n") :]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
PYTHON = [block for language, block in BLOCKS if language == "python"]
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]
NOTE = "Checkpoints are folders. A checkpoint of step {} has weights and moments.\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a random OLMoE, some text, and train.py."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("train.py", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "notes").mkdir()
    for i in range(20):
        (folder / "notes" / f"{i}.md").write_text("".join(NOTE.format(7 * i + k) for k in range(40)))
    texts = [path.read_text() for path in sorted((folder / "notes").iterdir())]
    tokenizer = BPETokenizer.train(texts, 300)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 16}
    model = random_model("olmoe", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.end_id, **sizes)
    save(model, folder / "OLMoE")
    (folder / "OLMoE" / "tokenizer.json").write_bytes(tokenizer.to_json())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "OLMoE" / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def run_rank(rank, folder, words, log):
    """One rank of `torchrun --nproc-per-node 2 SCRIPT ...`."""
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), number)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29717"}
    torch.set_num_threads(1)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


@pytest.mark.long
def test_the_commands_of_the_page_run_in_their_order(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert COMMANDS[0].startswith("hf download ")  # from the network: not run
    for line in COMMANDS[1:]:
        program, *words = shlex.split(line)
        if program == "torchrun":
            assert words[:2] == ["--nproc-per-node", "2"]
            words += ["--seq-len", "64", "--sample-tokens", "20", "--set", "metrics.eval_sequences=8"]
            logs = [folder / f"rank {rank}.txt" for rank in range(2)]
            exits, texts = exits_and_logs(run_rank, [(rank, folder, words[2:], logs[rank]) for rank in range(2)], logs)
            assert exits == [0, 0], texts
        elif program == "python":
            monkeypatch.setattr(sys, "argv", words)
            monkeypatch.syspath_prepend(os.path.dirname(words[0]))
            runpy.run_path(words[0], run_name="__main__")
        else:
            assert program == "moe-dualpipe" and cli.main(words) == 0, line
    for code in PYTHON:
        exec(code, {})
    assert (folder / "OLMoE" / "tokenizer.json").read_bytes() == (folder / "notes-hf" / "tokenizer.json").read_bytes()
    models = {
        name: from_pretrained(folder / name) for name in ("OLMoE", "notes-hf", "notes-bf16", "OLMoE-copy", "merged")
    }
    weights = {name: model.state_dict() for name, model in models.items()}
    for name, tensor in weights["notes-hf"].items():
        assert torch.equal(tensor.bfloat16(), weights["notes-bf16"][name])
        assert torch.equal(weights["OLMoE"][name], weights["OLMoE-copy"][name])
    for trained in ("notes-hf", "merged"):
        assert not torch.equal(weights["OLMoE"]["embedding.weight"], weights[trained]["embedding.weight"])


def test_the_table_of_architectures_is_complete():
    assert re.findall(r"^\| `(\w+)` \| \w", SECTION, re.MULTILINE)[1:] == [*ARCHITECTURES, *ALIASES]


LAYOUTS = {
    "olmoe-1b-7b": (2, 8), "qwen3-30b-a3b": (4, 8), "mixtral-8x7b": (4, 8), "deepseek-v2-lite": (2, 8),
    "deepseek-v3": (16, 64),
}  # fmt: skip


def held(name, model, stage, expert_ranks):
    """Whether the first expert rank of a stage holds a tensor."""
    kind, _, rest = name.partition(".")
    if kind == "layers":
        layer, _, rest = rest.partition(".")
        local = ".experts." not in f".{rest}" or int(rest.rpartition(".")[2]) < model.num_experts // expert_ranks
        return int(layer) in stage.layers and local
    return stage.embedding if kind == "embedding" else stage.head


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_table_of_sizes(name):
    model, (ranks, expert_ranks) = PRESETS[name], LAYOUTS[name]
    plan = plan_export(model, lambda _: torch.empty(0), dtype=torch.bfloat16)
    assert plan.layout.architecture is find_architecture(model)
    sizes = {target.name: math.prod(target.shape) for target in plan.layout.targets()}
    stages = split(model, ranks)
    read = [sum(size for key, size in sizes.items() if held(key, model, one, expert_ranks)) for one in stages]
    most = max(first + second for first, second in zip(read, reversed(read), strict=True))
    total = sum(sizes.values())
    cells = (
        name, f"{total / 1e9:.1f} B", f"{sum(plan.sizes.values()) / 1e9:,.0f} GB", f"{12 * total / 1e9:,.0f} GB",
        f"{ranks} x {expert_ranks}", f"{2 * most / 1e9:.1f} GB",
    )  # fmt: skip
    assert f"| {' | '.join(cells)} |" in SECTION
