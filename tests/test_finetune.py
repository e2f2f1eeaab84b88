"""docs/finetune.md, from its first command to its last, on a tiny model that transformers has made."""

import importlib
import io
import json
import os
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from moe_dualpipe import cli
from moe_dualpipe.checkpoint import open_model
from moe_dualpipe.commands.train import main as train
from moe_dualpipe.data.tokenizer import BPETokenizer
from moe_dualpipe.inference import generate
from tests.support.published import random_model, save, transformers_model

PAGE = (Path(__file__).parents[1] / "docs" / "finetune.md").read_text()
COMMANDS = re.findall(r"^((?:python train\.py|moe-dualpipe (?:generate|export)) .*)$", PAGE, re.MULTILINE)
(ROW,) = re.findall(r"```json\n(.+)\n```", PAGE)
SMALLER = {"--seq-len": "64", "--steps": "3"}
FEWER = ["--sample-tokens", "0", "--batch-size", "4", "--set", "metrics.eval_sequences=4"]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the model and the chats, in which the commands of the page have run."""
    folder = tmp_path_factory.mktemp("finetune")
    content = BPETokenizer.train([ROW * 3], 270).to_json()
    model = random_model("olmoe", vocab_size=300, eos_token_id=0, rms_norm_eps=1e-5)  # that of llama.cpp
    save(model, folder / "OLMoE")
    (folder / "OLMoE/tokenizer.json").write_bytes(content)
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "OLMoE/tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat.jsonl").write_text("".join(ROW.replace("Which", f"{i}. Which") + "\n" for i in range(60)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in dict.fromkeys(COMMANDS):  # the page shows one of them twice
            patch.setattr("sys.stdin", io.StringIO("Which schedule?\n"))
            words = shlex.split(line)
            for option, value in SMALLER.items():
                if option in words:
                    words[words.index(option) + 1] = value
            if words[0] == "python":
                short = [] if "--steps" in words else ["--steps", "3", "--seq-len", "64"]
                train([*words[2:], *short, *FEWER])
            else:
                assert not cli.main([*words[1:], *(["--sample-tokens", "4"] if "generate" in words else [])]), line
    return folder


def test_the_page_has_commands_of_every_kind():
    assert [line.split()[1] for line in COMMANDS].count("train.py") == 2
    assert sum("export" in line for line in COMMANDS) >= 4 and any("--chat" in line for line in COMMANDS)


def test_transformers_generates_the_tokens_of_the_merged_model(folder):
    model, tokenizer = open_model(str(folder / "olmoe-chat"))
    theirs = transformers_model(folder / "olmoe-chat", torch.float32)
    ids = torch.tensor(tokenizer.encode("Which schedule?"))
    ours = generate(model, [ids], 8, 64, 0.0)[0].tolist()
    found = theirs.generate(ids[None], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert found[0, len(ids) :].tolist()[: len(ours)] == ours
    assert (folder / "olmoe-chat/tokenizer_config.json").is_file()


@pytest.mark.long
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP does not name a folder with its sources")
def test_llama_cpp_generates_the_tokens_of_the_merged_model(folder, monkeypatch):
    """Its converter knows the tokenizers of published models by a hash, so it is told of which kind this one is."""
    library = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    source, file = Path(os.environ["LLAMA_CPP"]), folder / "olmoe-chat.gguf"
    monkeypatch.syspath_prepend(source)
    reader = importlib.import_module("conversion.base")
    monkeypatch.setattr(reader.TextModel, "get_vocab_base_pre", lambda *_: "gpt-2")
    words = ["convert_hf_to_gguf.py", str(folder / "olmoe-chat"), "--outfile", str(file), "--outtype", "f32"]
    monkeypatch.setattr("sys.argv", words)
    runpy.run_path(str(source / words[0]), run_name="__main__")
    theirs = library.Llama(str(file), n_ctx=64, logits_all=True, n_threads=1, verbose=False)
    model, tokenizer = open_model(str(folder / "olmoe-chat"))
    ids = tokenizer.encode("Which schedule?")
    assert theirs.tokenize(b"Which schedule?", add_bos=False) == ids
    ours = generate(model, [torch.tensor(ids)], 16, 64, 0.0)[0].tolist()
    theirs.eval(ids)
    for token in ours:
        assert int(theirs.scores[theirs.n_tokens - 1].argmax()) == token
        theirs.eval([token])


def test_peft_loads_the_adapter(folder):
    import peft  # takes seconds

    base = transformers_model(folder / "OLMoE", torch.float32)
    ids = torch.arange(20)[None]
    before = base(ids).logits
    adapted = peft.PeftModel.from_pretrained(base, folder / "olmoe-adapter")(ids).logits
    model, _ = open_model(str(folder / "runs/olmoe-chat"))
    expected = model(ids)
    assert (adapted - expected).norm() < 1e-5 * expected.norm() < 1e-2 * (before - expected).norm()
