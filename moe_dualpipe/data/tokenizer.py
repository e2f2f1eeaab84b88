"""Convert between text and token ids: bytes, a byte-level BPE, or ids whose tokenizer is unknown.

A model is useless without its tokenizer, so each tokenizer is one JSON document, written next to the token ids and
into every checkpoint. Bytes are the default and need no file. BPE uses the optional `tokenizers` library. Its
tokenizer.json is only parsed, so loading a file from an untrusted source runs no code.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..messages import check_range, printable, quoted
from . import strict_json
from .files import DataFile

TOKENIZER_FILE = "tokenizer.json"
END = "<|endoftext|>"
# End-of-document tokens of published tokenizers: GPT-2 and others, Llama 3, DeepSeek, Llama 2 and Mixtral, Gemma.
ENDS = (END, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")  # noqa: RUF001


class Tokenizer(ABC):
    """Maps text to token ids and back. `end_id` ends each document, and no text encodes to it; -1 if unknown.

    end_text: the text of the end token in the tokenizer.json that other programs read.
    """

    vocab_size: int
    end_id: int
    end_text = ""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`. Ids outside the vocabulary become the replacement character or nothing."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, as `dtype_for(vocab_size)`."""

    @abstractmethod
    def to_json(self) -> bytes:
        """The JSON from which `tokenizer_from_json` builds the same tokenizer."""

    def library_json(self) -> bytes:
        """The tokenizer.json that other programs read, if the tokenizer is known.

        They map a text to the same ids, except that they encode the text of the end-of-document token to that token.
        """
        return self.to_json()


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as 256 tokens. A zero byte, which text never contains, ends a document."""

    vocab_size, end_id, end_text = 256, 0, END

    def decode(self, tokens: list[int]) -> str:
        return b"".join(bytes([t]) if t < 256 else "\ufffd".encode() for t in tokens).decode(errors="replace")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def to_json(self) -> bytes:
        return b'{"tokenizer": "bytes"}\n'

    def library_json(self) -> bytes:
        return json.dumps(_byte_level_json(), ensure_ascii=False).encode() + b"\n"

    def __str__(self) -> str:
        return "bytes"


class UnknownTokenizer(Tokenizer):
    """Used if the tokenizer is unknown. The text of a token is its number: "17 4" is [17, 4]. No number gives [0]."""

    end_id = -1

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in re.findall(r"[0-9]{1,9}", text)] or [0]

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" {token}" for token in tokens)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise ValueError("cannot encode text: the tokenizer of these token ids is unknown")

    def to_json(self) -> bytes:
        return json.dumps({"tokenizer": "ids", "vocab_size": self.vocab_size}).encode() + b"\n"

    def __str__(self) -> str:
        return f"{self.vocab_size:,} token ids without a tokenizer"


class BPETokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library. Text is never encoded to special tokens."""

    def __init__(self, content: bytes, where: str):
        library, self._where = _library(), where
        self._tokenizer: Any = self._call("is not a tokenizer", lambda: library.Tokenizer.from_str(content.decode()))
        self._content = content
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if hasattr(self._tokenizer.model, "dropout"):
            self._tokenizer.model.dropout = None  # the same text has the same tokens, on every rank
        self._tokenizer.encode_special_tokens = True  # encode "<|endoftext|>" in a text as ordinary characters
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=0) + 1
        special = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        ends = [special[name] for name in ENDS if name in special]
        if not ends:
            found = ", ".join(printable(name, 50) for name in list(special)[:8])
            raise ValueError(
                f"{where} has no end-of-document token: its added_tokens must contain one of {', '.join(ENDS)} with "
                f'"special": true; its special tokens are {found or "none"}'
            )
        self.end_id = ends[0]
        self.end_text = self._tokenizer.id_to_token(self.end_id)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Train byte-level BPE with GPT-2's pre-tokenizer; the same texts give the same tokenizer.

        Memory holds the distinct words, not the texts. A short text may give fewer tokens than `vocab_size`.
        """
        check_range("--vocab-size", vocab_size, 257, hint="; 256 bytes and the end of a document")
        library = _library()
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = library.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        options: Any = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], **options)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str(pretty=True).encode(), "the trained tokenizer")

    def decode(self, tokens: list[int]) -> str:
        return self._call("cannot decode tokens", self._tokenizer.decode, tokens, skip_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encode = self._tokenizer.encode_batch_fast
        found = self._call("cannot encode text", encode, list(texts), add_special_tokens=False)
        encoded = [np.array(one.ids, np.int64) for one in found]
        for text, ids in zip(texts, encoded, strict=True):
            if ((ids >= self.vocab_size) | (ids == self.end_id)).any():
                raise ValueError(
                    f"{self._where} encodes text to its end-of-document token, or outside its vocabulary: use another "
                    f"tokenizer; the text starts with {quoted(text, 60)}"
                )
        return [ids.astype(dtype_for(self.vocab_size)) for ids in encoded]

    def __reduce__(self) -> tuple[Any, ...]:
        return BPETokenizer, (self._content, self._where)

    def _call(self, failure: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the library, whose errors are plain Exceptions, and whose bugs derive from BaseException."""
        try:
            return function(*arguments, **options)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            raise ValueError(f"{self._where} {failure}: {printable(error)}") from None

    def to_json(self) -> bytes:
        return self._content

    def __str__(self) -> str:
        return f"BPE of {self.vocab_size:,} tokens"


BYTES = ByteTokenizer()


def tokenizer_from_json(content: bytes, where: str) -> Tokenizer:
    """Build a tokenizer from its JSON. Raises ValueError, naming `where`, if it is not a tokenizer."""
    try:
        fields = strict_json.parse(content)
    except ValueError as error:
        raise ValueError(f"{where} is not a tokenizer: {printable(error)}") from None
    match fields:
        case {"tokenizer": "bytes"}:
            return BYTES
        case {"tokenizer": "ids", "vocab_size": int(size)} if 0 < size < 1 << 32 and size is not True:
            return UnknownTokenizer(size)
        case {"model": dict()}:
            return BPETokenizer(content, where)
    raise ValueError(f"{where} is not a tokenizer: neither the tokenizers library nor moe-dualpipe wrote it")


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises ValueError if it is missing or not a tokenizer."""
    with DataFile(path) as file:
        return tokenizer_from_json(bytes(file.read(0, file.size)), printable(path))


def find_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder of token ids or of a checkpoint; BYTES if the folder has no tokenizer.json."""
    return read_tokenizer(folder / TOKENIZER_FILE) if (folder / TOKENIZER_FILE).is_file() else BYTES


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files that make `find_tokenizer` find `tokenizer` in a folder: file name -> content."""
    return {} if isinstance(tokenizer, ByteTokenizer) else {TOKENIZER_FILE: tokenizer.to_json()}


def _byte_level_json() -> dict[str, Any]:
    """Bytes as a byte-level BPE without merges. It names bytes as GPT-2 does: 65 is "A", and 10 is "\u010a"."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    names[ByteTokenizer.end_id] = END  # also for unknown tokens, which include the name of a zero byte
    end = {"id": ByteTokenizer.end_id, "content": END, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [end | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "unk_token": END, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "vocab": {names[byte]: byte for byte in range(256)}, "merges": [],
        },
    }  # fmt: skip


def digest(tokenizer: Tokenizer) -> str:
    """A hash of the tokenizer's JSON; equal tokenizers have equal digests."""
    return hashlib.blake2b(tokenizer.to_json(), digest_size=16).hexdigest()


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned dtype for ids below `vocab_size`."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def num_bytes(tokenizer: Tokenizer, tokens: np.ndarray) -> int:
    """Bytes of the text of `tokens`, counting the end of a document as one byte."""
    if isinstance(tokenizer, ByteTokenizer):
        return len(tokens)
    ends = tokens == tokenizer.end_id
    text = tokens[~ends]
    parts = (tokenizer.decode(text[i : i + (1 << 16)].tolist()) for i in range(0, len(text), 1 << 16))
    return int(ends.sum()) + sum(len(part.encode()) for part in parts)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError("BPE needs the tokenizers library: pip install 'moe-dualpipe[bpe]'") from None
    return tokenizers
