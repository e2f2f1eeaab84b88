# ruff: noqa: RUF001, E501
"""Chats: token ids and masks as in transformers, samples packed into sequences, and errors that name file and row."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("jinja2")

from moe_dualpipe.data import BYTES, load_data, prepare_data, samples
from moe_dualpipe.data.chats import ChatOptions, ChatTemplate, InvalidRowError, parse_chat
from moe_dualpipe.data.tokenizer import BPETokenizer
from moe_dualpipe.schedule import build
from tests.support.texts import with_special_tokens
from tests.support.updates import MODEL, assert_equal, update

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}" + PROMPT
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + PROMPT
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}{% else %}{{ '<｜Assistant｜>' + m.content + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
OLMOE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}"
    "{{ '<|message|>' + m.content + ('<s>' if loop.last and m.role == 'assistant' else '<|end|>') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
THINKING = CHATML.replace("m.content +", "(m.content if loop.last else m.content.split('</think>')[-1]) +")
TOOLS = "{% if tools %}{{ tools | tojson(indent=1) }}\n{% endif %}" + GENERATION
EXACT = {"chatml": CHATML, "generation": GENERATION, "deepseek": DEEPSEEK, "olmoe": OLMOE, "tools": TOOLS}
ANSWERS = "grün ist die Wiese", "", "def f(x):\n    return x < 2 && '你好'"
CHATS = [
    [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": ANSWERS[0]}],
    [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好?"},
        {"role": "assistant", "content": ANSWERS[1]}, {"role": "user", "content": "And?"},
        {"role": "assistant", "content": ANSWERS[2], "name": None},
    ],
]  # fmt: skip
TOOL = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]


@pytest.fixture(scope="module")
def tokenizer():
    content = BPETokenizer.train(["Hi there, def f(x): return x\n"] * 3, 300).to_json()
    return BPETokenizer(
        with_special_tokens(content, len(json.loads(content)["model"]["vocab"]) + 0, False),
        "it",
        {"eos_token": "<|end|>"},
    )


def template_of(source, tokenizer):
    config = {"chat_template": source, "bos_token": "<s>", "eos_token": {"content": "<|end|>"}}
    return ChatTemplate.find({"tokenizer_config.json": json.dumps(config)}, tokenizer)


@pytest.mark.parametrize("name", EXACT)
def test_token_ids_and_masks_are_those_of_transformers(name, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_json())
    source, options = EXACT[name], {"return_assistant_tokens_mask": True, "return_dict": True, "tokenize": True}
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="<|end|>"
    )
    tools = TOOL if name == "tools" else None
    chats = [parse_chat({"messages": chat, "tools": tools}, "row") for chat in CHATS]
    found = [*ChatOptions(template_of(source, tokenizer)).encode(chats, tokenizer)]
    for chat, (text, ids, labeled) in zip(CHATS, found, strict=True):
        expected = theirs.apply_chat_template(chat, tools=tools, chat_template=source, **options)
        assert text == theirs.apply_chat_template(chat, tools=tools, chat_template=source, tokenize=False)
        assert ids.tolist() == expected["input_ids"]
        if "generation" in source and "endgeneration" in source:
            assert labeled.astype(int).tolist() == expected["assistant_masks"] and labeled.any()
        parts = np.split(ids, np.flatnonzero(np.diff(labeled)) + 1)[1 if not labeled[0] else 0 :: 2]
        answers = [m["content"] for m in chat if m["role"] == "assistant"]
        assert len(parts) == len(answers)
        for part, answer in zip(parts, answers, strict=True):
            decoded = tokenizer.decode(part.tolist())
            assert decoded.removeprefix(answer) in ("<|im_end|>", "<|end|>"), decoded


@pytest.mark.parametrize("source", [HARMONY, THINKING], ids=["harmony", "thinking"])
def test_a_template_whose_prefixes_are_not_exact_is_refused(source, tokenizer):
    options = ChatOptions(template_of(source, tokenizer))
    ((_, ids, labeled),) = options.encode(
        [parse_chat({"prompt": "Hi", "completion": "Yes"}, "a:1")], tokenizer
    )  # one turn
    assert "Yes" in tokenizer.decode(ids[labeled].tolist())
    turns = [{"role": "assistant" if i % 2 else "user", "content": "<think>a</think>b"} for i in range(4)]
    with pytest.raises(ValueError, match=r"^a:2: the chat template does not render the first messages as the start"):
        options.parts(parse_chat({"messages": turns}, "a:2"))
    assert ChatOptions(options.template, "all").parts(parse_chat({"messages": turns}, "a:2"))[1]


def test_the_fields_of_rows():
    expected = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for row in (
        {"messages": expected}, {"prompt": "a", "completion": "b", "tools": "[]"},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ):  # fmt: skip
        assert parse_chat(row, "").messages == expected
    for row, problem in (
        ({"messages": []}, "must be a list of messages, and not empty"), ({"messages": ["a"]}, r"messages\[0\] must be"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] has no role; its fields are content"),
        ({"messages": [{"role": "user", "content": 3}]}, "`content` must be a string: got"),
        ({"conversations": [{"from": "me", "value": "a"}]}, "is from 'me': expected one of human"),
        ({"prompt": ["a"], "completion": "b"}, "must be strings"), ({"messages": expected, "tools": "{"}, "tools: it is"),
        ({"messages": [{"role": "user", "content": "\0"}]}, "contains a zero character"),
    ):  # fmt: skip
        with pytest.raises(InvalidRowError, match=problem):
            parse_chat(row, "")


# ---- From files to sequences ----

SIMPLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def options(**changes):
    return ChatOptions(ChatTemplate.find({"chat_template.jinja": SIMPLE}, BYTES), **changes)


@pytest.fixture
def chats(tmp_path):
    path, random = tmp_path / "chat.jsonl", np.random.default_rng(3)
    rows = [{"prompt": f"q{i}", "completion": "x" * int(random.integers(0, 40)) + str(i)} for i in range(80)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_pass_has_each_chat_once_in_an_order_of_its_own(chats):
    text = load_data(str(chats), 96, chats=options())
    train = text.sources[0].train
    assert isinstance(train, samples.Samples)
    count = len(train.sequences)
    steps = [[train.drawn(seed, turn * count + i, 0) for i in range(count)] for seed, turn in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == [*range(count)] for order in steps) and len({*map(tuple, steps)}) == 3
    inputs, labels, documents = text.batch(0, 0, count, 96)
    seen = sorted(bytes(row[row != 0].tolist()).count(b"<user>") for row in inputs)
    assert sum(seen) == len(train.firsts_D) and max(seen) > 1
    assert ((documents < 0) | (documents < 96)).all() and (labels[documents < 0] == -100).all()
    answers = labels[labels >= 0].tolist()
    assert answers.count(0) == len(train.firsts_D) and bytes(answers).replace(b"x", b"").replace(b"\0", b"").isdigit()
    assert all(map(torch.equal, text.batch(0, 1, 4, 96, range(2, 4)), text.batch(0, 1, 4, 96).rows(2, 4)))


def test_groups_fit_and_have_every_item_once():
    assert samples.pack([3, 5, 2, 4], 7) == [[1, 2], [3, 0]]
    sizes = np.random.default_rng(0).integers(1, 50, 9000).tolist()
    groups = samples.pack(sizes, 64)
    assert sorted(i for group in groups for i in group) == [*range(9000)]
    assert all(sum(sizes[i] for i in group) <= 64 for group in groups) and len(groups) * 64 < 1.03 * sum(sizes)


def test_a_long_chat_is_an_error_is_cut_or_is_dropped(chats):
    with pytest.raises(
        ValueError, match=rf"^{chats}:\d+: \d+ tokens do not fit into --seq-len 40: use --seq-len 60, or"
    ):
        load_data(str(chats), 40, chats=options())
    for choice in ("cut", "drop"):
        text = load_data(str(chats), 40, chats=options(too_long=choice))
        assert f"too long, {'cut' if choice == 'cut' else 'dropped'}" in text.description
        assert (text.batch(0, 0, 8, 40).labels >= 0).any(1).all()


def test_prepared_chats_are_those_that_are_encoded_at_the_start(chats, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(SIMPLE)
    prepare_data([str(chats)], tmp_path / "out", "bytes", 1, "text", chat_template=template)
    one, other = load_data(str(chats), 96, chats=options()), load_data(str(tmp_path / "out"), 96)
    for step in range(3):
        assert all(map(torch.equal, one.batch(0, step, 5, 96), other.batch(0, step, 5, 96)))
    assert all(map(torch.equal, one.held_out_batch(0, 6, 6, 96), other.held_out_batch(0, 6, 6, 96)))
    with pytest.raises(
        ValueError, match=r"train.bin: chat 1: prepared for train_on=assistant: prepare the chats again"
    ):
        load_data(str(tmp_path / "out"), 96, chats=options(train_on="all"))
    flags = tmp_path / "out" / "train.bin.flags"
    flags.write_bytes(bytes([flags.read_bytes()[0] ^ 1]) + flags.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"train.bin.flags has changed in tokens 0 to"):
        load_data(str(tmp_path / "out"), 96)
    described = tmp_path / "out" / "train.bin.json"
    values = json.loads(described.read_text())
    del values["flags_crc32"]
    described.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"train.bin.flags is not described beside it: prepare the chats again"):
        load_data(str(tmp_path / "out"), 96)


@pytest.mark.parametrize("row, problem", [
    ('{"messages": [{"role": "user", "content": "a"}]}', ":81: no message has the role assistant"),
    ('{"text": "a"}', ":80: this row is a chat, but others of its source are text"), ('{"prompt": "a"}', ":81: no field 'text'"),
])  # fmt: skip
def test_a_wrong_row_is_named(chats, row, problem):
    with chats.open("a") as file:
        file.write(row + "\n")
    with pytest.raises(ValueError, match=problem):
        load_data(str(chats), 96, chats=options())


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize("row, what", [
    *(({"messages": [{"role": "critic", "content": text}, *CHATS[0]]}, "message 1, of role 'critic'")
      for text in ("No!", "Hi", CHATS[0][1]["content"])),  # the last two stand elsewhere, too
    ({"messages": CHATS[0], "tools": TOOL}, "the tools"),
    ({"messages": [CHATS[0][0], CALL, CHATS[0][1]]}, "the tool_calls of message 2"),
])  # fmt: skip
def test_what_the_template_leaves_out_is_named(row, what, tokenizer):
    source = "{% for m in messages %}{% if m.role != 'critic' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match=f"^a:3: the chat template leaves out {what}: change the row or the template"):
        ChatOptions(template_of(source, tokenizer)).parts(parse_chat(row, "a:3"))


def test_a_template_that_needs_every_message_leaves_none_out(tokenizer):
    source = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('!') }}{% endif %}{{ m.content | upper }}{% endfor %}"
    assert ChatOptions(template_of(source, tokenizer)).parts(parse_chat({"messages": CHATS[1][1:]}, "a:4"))[1]


def test_what_is_not_a_template_is_refused(tokenizer):
    for value in (5, [{"name": "default", "template": 3}], {"default": 3}):
        with pytest.raises(ValueError, match=r"^cannot read the chat template: it must be text: got "):
            ChatTemplate.find({"tokenizer_config.json": json.dumps({"chat_template": value})}, tokenizer)
    with pytest.raises(
        ValueError, match=r"^a:1: the chat template cannot render its first 0 messages alone, to find the"
    ):
        ChatOptions(template_of("{{ messages[0].role }}", tokenizer)).parts(
            parse_chat({"messages": CHATS[0][1:]}, "a:1")
        )


@pytest.mark.parametrize("source, ending", [
    (CHATML, "<|im_end|>"), (OLMOE, "<|end|>"), ("{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}", "\n\n### user:"),
    ("{% for m in messages %}{{ m.content }} {% endfor %}", ""), ("{{ raise_exception('no') }}", ""),
])  # fmt: skip
def test_an_answer_ends_with_the_text_that_follows_it(source, ending, tokenizer):
    assert template_of(source, tokenizer).ending() == ending


@pytest.mark.parametrize("library", ["pyarrow", "datasets"])
def test_a_table_and_a_dataset_by_name_have_the_chats_of_jsonl(tmp_path, monkeypatch, library):
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "b"}]} for i in range(30)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + os.linesep for row in rows))
    if library == "datasets":
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        other = f"hf:{tmp_path}"
    else:
        from pyarrow import parquet

        parquet.write_table(module.Table.from_pylist(rows), other := f"{tmp_path}/b.parquet")
    one, other = (load_data(data, 32, chats=options()) for data in (f"{tmp_path}/a.jsonl", other))
    assert one.fingerprint() == other.fingerprint()


def test_packing_changes_neither_the_loss_nor_the_gradients(chats):
    """Of a pass over all chats: one mean over the labeled tokens, in fp64."""
    model, found = replace(MODEL, mtp_layers=1, vocab_size=256), []
    for packing in (True, False):
        text = load_data(str(chats), 64, chats=options(packing=packing))
        train = text.sources[0].train
        assert isinstance(train, samples.Samples)
        batch = text.batch(0, 0, len(train.sequences), 64)
        assert (batch.documents is not None) == packing
        found.append((len(batch.inputs), update(model, build("1f1b", 1, len(batch.inputs)), batch, size=1)))
    (few, packed), (many, alone) = found
    assert few < many == 75
    assert_equal(packed, alone)
