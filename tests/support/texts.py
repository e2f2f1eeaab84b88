"""Texts that are hard to encode, tokenizers like published ones, and random damage to bytes."""

import json

TEXTS = ["grün ist die Wiese, ", "def f(x):\n    return x\n\n\n", "你好 <|endoftext|> ", "🜁", "a\tb  c\r\n"]


def with_special_tokens(content: bytes, first: int, begins: bool) -> bytes:
    """A tokenizer.json with <s>, <|end|>, <|im_start|> and <|im_end|>, numbered from `first`.

    begins: whether texts begin with <s>.
    """
    fields, names = json.loads(content), ("<s>", "<|end|>", "<|im_start|>", "<|im_end|>")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    fields["added_tokens"] += [{"id": first + i, "content": name, **flags} for i, name in enumerate(names)]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    fields["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text], "pair": [text],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [first], "tokens": ["<s>"]}},
    } if begins else None  # fmt: skip
    return json.dumps(fields).encode()


def corrupt(content: bytes, random) -> bytes:
    """Truncate `content`, flip one bit, repeat a part, or insert random bytes."""
    at, end = sorted(random.integers(0, len(content) + 1, 2).tolist())
    match random.integers(4):
        case 0:
            return content[:at]
        case 1:
            at = min(at, len(content) - 1)
            return content[:at] + bytes([content[at] ^ (1 << int(random.integers(8)))]) + content[at + 1 :]
        case 2:
            return content[:end] + content[at:]
    return content[:at] + random.bytes(int(random.integers(1, 9))) + content[at:]
