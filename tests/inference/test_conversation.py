"""Chats with a model: an answer is that of `generate`, a conversation keeps its history, and eval scores each chat."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("jinja2")

from moe_dualpipe.cli import main
from moe_dualpipe.data import BYTES
from moe_dualpipe.data.chats import ChatTemplate
from moe_dualpipe.data.samples import LABEL, START
from moe_dualpipe.inference import Sampling, conversation, generate
from moe_dualpipe.inference.scoring import perplexity
from moe_dualpipe.models import ModelConfig, StageOptions, build_model, next_token_loss

MODEL = ModelConfig(
    vocab_size=256, hidden_size=16, num_layers=2, num_dense_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    dense_size=24, expert_size=12, num_experts=4, experts_per_token=2, init_std=0.5,
)  # fmt: skip
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"  # noqa: E501
SMALLER = ["--num-layers", "2", "--set", "model.hidden_size=32", "model.head_dim=8", "metrics.eval_sequences=2"]


@pytest.fixture
def model():
    return build_model(MODEL, options=StageOptions(seed=2))


@pytest.fixture
def template():
    return ChatTemplate.find({"chat_template.jinja": TEMPLATE}, BYTES)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_told_as_they_are_drawn_up_to_a_stop(model, temperature):
    prompt, told = torch.tensor([60, 70, 80]), []
    drawing = {"temperature": temperature, "seed": 4, "on_tokens": lambda next_B: told.append(int(next_B[0]))}
    whole = generate(model, [prompt], 20, 12, **drawing)[0].tolist()
    assert told == whole
    told.clear()
    generate(model, [prompt], 20, 12, stop=[whole[9]], **drawing)
    assert told == whole[: whole.index(whole[9]) + 1]


def test_a_conversation_keeps_its_history_and_ctrl_c_ends_only_an_answer(model, template, monkeypatch, capsys):
    prompts, answers = [], iter([b"one", b"two", b"three"])

    def generated(_model, prompts_1S, *drawing, on_tokens):
        prompts.append(bytes(prompts_1S[0].tolist()).decode())
        for token in (*next(answers), drawing[-1][0]):
            if token == ord("w"):
                raise KeyboardInterrupt
            on_tokens(torch.tensor([token]))

    lines = iter(["a", KeyboardInterrupt, "", "b\udc80", "c", "/exit", "never read"])  # a byte that is not UTF-8

    def read(_):
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(conversation, "generate", generated)
    conversation.converse(model, BYTES, template, 9, 64, Sampling(), 0, read)
    assert capsys.readouterr().out == "one\n\nt\nthree\n" and next(lines) == "never read"
    assert prompts == [
        "<user>a", "<user>a<assistant>one\0<user>b\ufffd", "<user>a<assistant>one\0<user>b\ufffd<assistant>t\0<user>c",
    ]  # fmt: skip


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n### End\n{% endfor %}"


@pytest.mark.parametrize("says, shown", [
    ("one\n### End\nuser: more", "one\n"), ("# one ##", "# one ##\n"), ("\n\n### End", "\n\n"),
    ("1\n### E", "1\n### E\n"), ("one\nuser: ### End", "one\nuser: ### End\n"),
])  # fmt: skip
def test_an_answer_ends_where_the_template_ends_it_with_plain_text(model, monkeypatch, capsys, says, shown):
    def generated(_model, _prompts, *_drawing, on_tokens):
        for token in says.encode():
            on_tokens(torch.tensor([token]))

    template = ChatTemplate.find({"chat_template.jinja": PLAIN}, BYTES)
    monkeypatch.setattr(conversation, "generate", generated)
    drawing = torch.tensor([60]), 99, 64, Sampling(), 0, template.stops(BYTES), template.ending()
    assert conversation.answer(model, BYTES, *drawing) + "\n" == capsys.readouterr().out == shown


def test_each_chat_is_scored_alone(model):
    lengths, random = (9, 2, 30, 5), np.random.default_rng(0)
    chats = [torch.from_numpy(random.integers(1, 256, length)) for length in lengths]
    flags = [random.integers(0, 2, length).astype(np.uint8) * LABEL for length in lengths]
    for flag in flags:
        flag[0], flag[-1] = START, LABEL
    found = perplexity(
        model, BYTES, np.concatenate(chats), 32, 32, 3, flags_N=np.concatenate(flags)
    )  # fmt: skip
    labels = [chat[1:].where(torch.from_numpy(flag[1:] > 0), -100) for chat, flag in zip(chats, flags, strict=True)]
    counts = [int((each >= 0).sum()) for each in labels]
    with torch.no_grad():
        losses = [next_token_loss(model(c[None, :-1]), y[None]) for c, y in zip(chats, labels, strict=True)]
    expected = sum(loss.item() * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert found.tokens == sum(counts) and found.loss == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match=r"^these tokens have no answer to score"):
        perplexity(model, BYTES, np.concatenate(chats)[:5], 32, 32, 3, flags_N=np.full(5, START, np.uint8))


def test_a_run_is_evaluated_and_talks_with_its_own_template(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text(TEMPLATE + "{% if add_generation_prompt %}<assistant>{% endif %}")
    rows = [json.dumps({"prompt": f"Say {i}.", "completion": f"{i}"}) for i in range(40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows))
    start = ["train", "--data", "chat.jsonl", "--set", "batch.chat_template=chat.jinja", "--seq-len", "64"]
    size = ["--steps", "1", "--batch-size", "2", "--sample-tokens", "0", "--out", "run", "--device", "cpu"]
    main([*start, *size, *SMALLER])
    printed = capsys.readouterr().out
    assert "% padding before packing and " in printed
    (tmp_path / "chat.jinja").unlink()
    assert main(["eval", "run", "--data", "chat.jsonl", "--json", "--device", "cpu", "--seq-len", "64"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == sum(len(str(i)) + 1 for i in range(40))
    lines = iter(["hello"])
    monkeypatch.setattr(conversation.converse, "__defaults__", (lambda _: next(lines, None) or _end(),))
    assert main(["generate", "run", "--chat", "--sample-tokens", "3", "--device", "cpu"]) == 0


def _end():
    raise EOFError


def test_what_cannot_talk_is_one_line(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jinja").write_text("{% for %}")
    (tmp_path / "text.txt").write_text("abc " * 200)
    size = ["--steps", "1", "--seq-len", "16", "--batch-size", "2", "--sample-tokens", "0", "--device", "cpu"]
    main(["train", "--data", "text.txt", "--out", "run", *size, *SMALLER])
    for arguments, problem in (
        ("--chat", "has no chat template: name one, --chat-template"), ("--chat --num 2", "--chat is for one process"),
        ("--chat --chat-template bad.jinja", "cannot read the chat template: line 1: "),
        ("--chat --chat-template none.jinja", "cannot read none.jinja: No such file or directory"),
        ("--chat-template none.jinja", "--chat-template is for a conversation: use --chat"),
    ):  # fmt: skip
        assert problem in refused("generate", "run", "--device", "cpu", *arguments.split())
