"""Chats: rows of messages, the template that makes a text of them, and the parts of it that the assistant wrote.

A template is a program in Jinja's language that comes with a published model. It runs in Jinja's sandbox, with what
transformers gives to it. It may mark the assistant's parts with {% generation %}. Otherwise, they are found by
rendering prefixes of the messages: a part begins where the prompt for it ends, and ends where the chat up to it ends.
This is exact only if each prefix is rendered as the start of the whole chat, so every chat is checked.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..messages import plural, printable, quoted
from . import strict_json
from .tokenizer import TOKENIZER_CONFIG, Tokenizer

TEMPLATE_FILE, SPECIAL_TOKENS = "chat_template.jinja", "special_tokens_map.json"
FIELDS = ("messages", "conversations", "prompt", "completion", "tools")
NO_TEXT = re.compile("[\0\ud800-\udfff]")
_MARK = "\0"  # begins and ends an assistant's part in a rendered text; no text of a row contains it
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "observation": "tool",
}  # fmt: skip
"""What the roles in `conversations` mean."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PROBE = "\u2603"


class InvalidRowError(Exception):
    """A row has no valid text or chat. The message says why."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A row with a conversation. place: its file and row, for messages."""

    place: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    @property
    def text(self) -> str:
        """The content, for a hash. It does not depend on a template."""
        return json.dumps([self.messages, self.tools], ensure_ascii=False, sort_keys=True, default=str)


def is_chat(names: Sequence[str] | Mapping[str, Any]) -> bool:
    """Whether a row with these fields is a chat."""
    return "messages" in names or "conversations" in names or ("prompt" in names and "completion" in names)


def parse_chat(row: Mapping[str, Any], place: str) -> Chat:
    """The chat in a row: `messages` of {role, content}, `conversations` of {from, value}, or `prompt` and `completion`.

    A prompt and its completion are a message of the user and one of the assistant. Raises InvalidRowError.
    """
    name = next((name for name in FIELDS[:2] if row.get(name) is not None), "")
    if name:
        if not isinstance(row[name], list) or not row[name]:
            raise InvalidRowError(f"field {quoted(name)} must be a list of messages, and not empty")
        messages = [_message(each, f"{name}[{i}]") for i, each in enumerate(row[name])]
    else:
        texts = [(role, row.get(name)) for role, name in (("user", "prompt"), ("assistant", "completion"))]
        if not all(isinstance(text, str) for _, text in texts):
            raise InvalidRowError("`prompt` and `completion` must be strings; use `messages` for lists of messages")
        messages = [{"role": role, "content": text} for role, text in texts]
    tools = row.get("tools") or None
    if isinstance(tools, str):  # tables often store JSON
        try:
            tools = strict_json.parse(tools)
        except ValueError as error:
            raise InvalidRowError(f"tools: {printable(error)}") from None
    if tools is not None and not isinstance(tools, list):
        raise InvalidRowError(f"tools must be a list: got {type(tools).__name__}")
    if any(NO_TEXT.search(text) for text in _strings([messages, tools])):
        raise InvalidRowError("a message contains a zero character, or half of a character")
    return Chat(place, messages, tools)


def _message(value: Any, name: str) -> dict[str, Any]:
    """A message as transformers passes it to a template. Raises InvalidRowError."""
    if not isinstance(value, dict):
        raise InvalidRowError(f"{name} must be an object with a role and a content: got {type(value).__name__}")
    message = {key: item for key, item in value.items() if item is not None}
    if "from" in message and "role" not in message:
        role, content = message.pop("from"), message.pop("value", None)
        if role not in _ROLES:
            raise InvalidRowError(f"{name} is from {quoted(role, 40)}: expected one of {', '.join(_ROLES)}")
        message |= {"role": _ROLES[role], "content": content}
    if not isinstance(message.get("role"), str):
        raise InvalidRowError(f"{name} has no role; its fields are {', '.join(map(str, message)) or 'none'}")
    others = "tool_calls" in message or any(key in message for key in _REASONING)
    if not isinstance(message.get("content", "" if others else None), str | list):
        raise InvalidRowError(f"{name}: `content` must be a string: got {quoted(message.get('content'), 40)}")
    if (reasoning := next((message[key] for key in _REASONING if key in message), None)) is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _strings(item)


# ---- Templates ----


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template. sources: by name; "tool_use" is for chats with tools. tokens: what it may insert, by name."""

    sources: dict[str, str]
    tokens: dict[str, str] = field(default_factory=dict)

    @classmethod
    def find(cls, files: Mapping[str, str], tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template among the texts of the files of a model, by file name; None if there is none.

        Raises ValueError for one that is not a template.
        """
        config = strict_json.parse_one(files, SPECIAL_TOKENS) | strict_json.parse_one(files, TOKENIZER_CONFIG)
        sources: Any = files.get(TEMPLATE_FILE, config.get("chat_template"))
        if isinstance(sources, list):
            sources = {str(each.get("name")): each.get("template") for each in sources if isinstance(each, dict)}
        elif not isinstance(sources, dict):
            sources = {"default": sources}
        if sources.get("default") is None:
            return None
        named = {key: each.get("content") if isinstance(each, dict) else each for key, each in config.items()}
        tokens = {key: text for key, text in named.items() if key.endswith("_token") and isinstance(text, str)}
        for source in sources.values():
            if not isinstance(source, str):
                raise ValueError(f"cannot read the chat template: it must be text: got {quoted(source, 60)}")
            _compiled(source)
        return cls(sources, tokens if TOKENIZER_CONFIG in files else {"eos_token": tokenizer.end_text} | tokens)

    def render(self, chat: Chat, number: int | None = None, prompt: bool = False) -> str:
        """The text of a chat, in which marks divide the assistant's parts from others.

        number: of its first messages. prompt: whether a message of the assistant follows. Raises ValueError.
        """
        source = self.sources["tool_use" if chat.tools and "tool_use" in self.sources else "default"]
        values = {"tools": chat.tools, "documents": None, "add_generation_prompt": prompt, **self.tokens}
        try:
            return _compiled(source).render(messages=chat.messages[:number], **values)
        except Exception as error:  # of any type: a template is a program
            reason = printable(str(error) or type(error).__name__)
            what = (
                "this chat" if number is None else f"its first {plural(number, 'message')} alone, to find the answers"
            )
            raise ValueError(f"{chat.place}: the chat template cannot render {what}: {reason}") from None

    def parts(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and the ranges of characters that the assistant wrote.

        Raises ValueError, with the place of the chat, if the ranges are not exact.
        """
        pieces = self.render(chat).split(_MARK)
        ends = [*accumulate(map(len, pieces))]
        if any(map(_GENERATION.search, self.sources.values())):
            return "".join(pieces), [*pairwise(ends)][::2]
        (text,), parts = pieces, []
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before, after = self.render(chat, number, prompt=True), self.render(chat, number + 1)
            if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
                raise ValueError(
                    f"{chat.place}: the chat template does not render the first messages as the start of the whole "
                    f"chat (message {number + 1}), so the assistant's tokens cannot be told: mark them with "
                    "{% generation %} in a copy of it (batch.chat_template), or use train_on=all"
                )
            parts.append((len(before), len(after)))
        return text, parts

    def text(self, chat: Chat, prompt: bool = False) -> str:
        """The text of a chat, without marks. prompt: as for `render`."""
        return self.render(chat, prompt=prompt).replace(_MARK, "")

    def ending(self) -> str:
        """The text that follows an answer, or else the start of the next turn; "" if there is none."""
        turns = ("user", "-"), ("assistant", _PROBE), ("user", _PROBE)
        for number in (2, 3):
            chat = Chat("", [{"role": role, "content": content} for role, content in turns[:number]])
            if ending := (self._text_or_none(chat) or "").partition(_PROBE)[2].partition(_PROBE)[0].rstrip():
                return ending
        return ""

    def stops(self, tokenizer: Tokenizer) -> list[int]:
        """The tokens that end an answer: those of the tokenizer, and the special token that follows one here."""
        special, plain = (
            tokenizer.encode_batch([self.ending().lstrip()], special_tokens=one)[0] for one in (True, False)
        )
        return [tokenizer.end_id, *tokenizer.stop_ids, *map(int, special[:1][special[:1] != plain[:1]])]

    def check_messages(self, chat: Chat, text: str) -> None:
        """Raise ValueError if the template leaves out tools, calls of them, or a message, as of an unknown role."""
        contents, at = [message.get("content") for message in chat.messages], 0
        parts = [content.strip() for content in contents if isinstance(content, str)]
        in_order = all((at := text.find(part, at) + len(part)) >= len(part) for part in parts)
        for what, rest in _shorter(chat, with_messages=not in_order):
            if self._text_or_none(rest) == text:
                raise ValueError(f"{chat.place}: the chat template leaves out {what}: change the row or the template")

    def _text_or_none(self, chat: Chat) -> str | None:
        with suppress(ValueError):  # it does not render this chat
            return self.text(chat)


def _shorter(chat: Chat, with_messages: bool) -> Iterator[tuple[str, Chat]]:
    """The chat without its tools, without the calls of them in each message, and without each message."""
    if chat.tools:
        yield "the tools", replace(chat, tools=None)
    for number, message in enumerate(chat.messages):
        before, after, name = chat.messages[:number], chat.messages[number + 1 :], f"message {number + 1}"
        if message.get("tool_calls"):
            silent = {**message, "tool_calls": []}
            yield f"the tool_calls of {name}", replace(chat, messages=[*before, silent, *after])
        if with_messages:
            yield f"{name}, of role {quoted(message['role'], 40)}", replace(chat, messages=before + after)


def template_file(file: Path | None) -> dict[str, str]:
    """The text of a file with a chat template, by the name that `ChatTemplate.find` reads. Raises ValueError."""
    return {} if file is None else {TEMPLATE_FILE: strict_json.read_text(file)}


def read_template(tokenizer: str, file: Path | None) -> dict[str, str]:
    """The texts of the files beside the tokenizer.json at `tokenizer` that `ChatTemplate.find` reads.

    file: the template to take instead. Raises ValueError.
    """
    names = SPECIAL_TOKENS, TOKENIZER_CONFIG, TEMPLATE_FILE
    return strict_json.read_texts(Path(tokenizer).parent, names) | template_file(file)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """Raises ValueError without the library, or for a text that is not a template."""
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("chat templates need the jinja2 library: pip install 'moe-dualpipe[chat]'") from None

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as in the base class

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = nodes.Output([nodes.TemplateData(_MARK)])
            return [mark, nodes.Scope(body).set_lineno(line), mark]

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": fail, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        if _MARK in source:
            raise ValueError("it contains a zero character")
        return environment.from_string(source)
    except (jinja2.TemplateError, ValueError) as error:
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ValueError(f"cannot read the chat template: {line}{printable(error)}") from None


# ---- Tokens ----


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How chats become samples. packing, too_long: see samples.py."""

    template: ChatTemplate | None = None
    train_on: Literal["assistant", "all"] = "assistant"
    packing: bool = True
    too_long: Literal["error", "cut", "drop"] = "error"

    def parts(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and its ranges of characters to train on. Raises ValueError, with its place."""
        if self.template is None:
            raise ValueError(
                f"{chat.place}: this row is a chat, but the model has no chat template: use --set "
                "batch.chat_template=FILE (train.py) or --chat-template FILE (data prepare, eval)"
            )
        if self.train_on == "all":
            text = self.template.text(chat)
            parts = [(0, len(text))]
        else:
            text, parts = self.template.parts(chat)
            if not parts:
                raise ValueError(f"{chat.place}: no message has the role assistant, so there is nothing to train on")
        self.template.check_messages(chat, text)
        return text, parts

    def encode(self, chats: Sequence[Chat], tokenizer: Tokenizer) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """For each chat its text, its token ids, and whether to train on each. Raises ValueError, with its place.

        A token counts if it has a character of the assistant. Without marks in the template, an answer ends with the
        token that ends it, and not with the white space that follows.
        """
        found = [self.parts(chat) for chat in chats]
        assert self.template is not None
        exact = self.train_on == "all" or any(map(_GENERATION.search, self.template.sources.values()))
        stops = [] if exact else self.template.stops(tokenizer)
        encoded = tokenizer.encode_offsets([text for text, _ in found])
        for (text, parts), (ids_N, starts_N, ends_N) in zip(found, encoded, strict=True):
            labeled_N = np.zeros(len(ids_N), np.bool_)
            for begin, end in parts:
                first, stop = int(np.searchsorted(ends_N, begin, "right")), int(np.searchsorted(starts_N, end))
                last = first + np.flatnonzero(np.isin(ids_N[first:stop], stops))[-1:]
                if len(last) and not text[ends_N[last[0]] : end].strip():
                    stop = last[0] + 1
                labeled_N[first:stop] = begin < end
            yield text, ids_N, labeled_N


NO_TEMPLATE = ChatOptions()
