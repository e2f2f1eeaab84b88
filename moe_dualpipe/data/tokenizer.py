"""Convert between text and token ids: bytes, a byte-level BPE, or ids whose tokenizer is unknown.

A model is useless without its tokenizer, so each tokenizer is one JSON document, written next to the token ids and
into every checkpoint. Bytes are the default and need no file. BPE uses the optional `tokenizers` library. Its
tokenizer.json is only parsed, so loading a file from an untrusted source runs no code.

Ids are those of transformers. The tokens that begin a text are in tokenizer.json. The one that ends a document may be
named only by a file beside it; then, a tokenizer_config.json is written beside each copy.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from ..messages import check_range, printable, quoted
from . import strict_json

TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
CONFIGS = ("config.json", "special_tokens_map.json", TOKENIZER_CONFIG)
END = "<|endoftext|>"
# End-of-document tokens of tokenizers without an eos_token: GPT-2 and others, Llama 3, DeepSeek, Llama 2, Gemma.
ENDS = (END, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")  # noqa: RUF001


class Tokenizer(ABC):
    """Maps text to token ids and back. `end_id` ends each document, -1 if unknown; `start_ids` begin each document.

    stop_ids: more tokens that end a generation, of the model from whose folder the tokenizer was read. end_text: the
    text of the end token in the tokenizer.json that other programs read. config: what tokenizer_config.json must say,
    because tokenizer.json does not.
    """

    vocab_size: int
    end_id: int
    end_text = ""
    start_ids: Sequence[int] = ()
    stop_ids: Sequence[int] = ()
    config: Mapping[str, str] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt: `start_ids`, then its text, in which special tokens (<|im_start|>) are one id."""
        return [*self.start_ids, *self.encode_batch([text], special_tokens=True)[0].tolist()]

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens` after `start_ids`.

        Ids outside the vocabulary become the replacement character or nothing.
        """

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], special_tokens: bool = False) -> list[np.ndarray]:
        """The ids of each text, as `dtype_for(vocab_size)`.

        special_tokens: whether special tokens in a text are one id each; otherwise, they are characters like others.
        """

    @abstractmethod
    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The ids of each text with its special tokens, and where each token starts and ends, in characters."""

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

    def encode_batch(self, texts: Sequence[str], special_tokens: bool = False) -> list[np.ndarray]:
        texts = [text.replace(END, "\0") for text in texts] if special_tokens else texts
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        found = []
        for text, ids_N in zip(texts, self.encode_batch(texts, special_tokens=True), strict=True):
            chars = text.replace(END, "\0")
            widths = np.array([len(END) if char == "\0" else 1 for char in chars], np.int64)
            ends, sizes = widths.cumsum(), [len(char.encode()) for char in chars]
            found.append((ids_N, (ends - widths).repeat(sizes), ends.repeat(sizes)))
        return found

    def to_json(self) -> bytes:
        return b'{"tokenizer": "bytes"}\n'

    def library_json(self) -> bytes:
        return json.dumps(_byte_level_json(), ensure_ascii=False).encode() + b"\n"

    def __str__(self) -> str:
        return "bytes"


class UnknownTokenizer(Tokenizer):
    """Used if the tokenizer is unknown. The text of a token is its number: "17 4" is [17, 4], and a blank text is [0].

    missing: the tokenizer.json that a published model should have; it has no blank texts.
    """

    def __init__(self, vocab_size: int, missing: str = "", end_id: int = -1):
        self.vocab_size, self._missing, self.end_id = vocab_size, missing, end_id

    def encode(self, text: str) -> list[int]:
        words = text.split() or ["0"] * (not self._missing)
        if not words or not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
            self.encode_batch([text])
        return [int(word) for word in words]

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" {token}" for token in tokens)

    def encode_batch(self, texts: Sequence[str], special_tokens: bool = False) -> list[np.ndarray]:
        unknown = "the tokenizer of these token ids is unknown:"
        reason = f"there is no {self._missing}: add it, or" if self._missing else unknown
        raise ValueError(f"cannot encode text: {reason} use token ids, such as '17 4' in a prompt")

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        self.encode_batch(texts)
        raise AssertionError

    def to_json(self) -> bytes:
        end = {"end_id": self.end_id} if self.end_id >= 0 else {}
        return json.dumps({"tokenizer": "ids", "vocab_size": self.vocab_size, **end}).encode() + b"\n"

    def __str__(self) -> str:
        return f"{self.vocab_size:,} token ids without a tokenizer"


class BPETokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library.

    config: the keys of CONFIGS, of which eos_token or else eos_token_id names the token that ends a document. As in
    transformers, the template in tokenizer.json says what begins a text, whatever add_bos_token is.
    """

    def __init__(self, content: bytes, where: str, config: Mapping[str, Any] | None = None):
        library, self._where = _library(), where
        self._tokenizer: Any = self._call("is not a tokenizer", lambda: library.Tokenizer.from_str(content.decode()))
        self._content = content
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if hasattr(self._tokenizer.model, "dropout"):
            self._tokenizer.model.dropout = None  # the same text has the same tokens, on every rank
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=0) + 1
        special = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        known = [special[name] for name in ENDS if name in special]
        ends = [*self._named_ends(config or {}), *known]
        if not ends:
            found = ", ".join(printable(name, 50) for name in list(special)[:8])
            raise ValueError(
                f"{where} has no end-of-document token: name one as eos_token in a {TOKENIZER_CONFIG} beside it, as in "
                f'{{"eos_token": "{END}"}}; its special tokens are {found or "none"}'
            )
        self.end_id = ends[0]
        self.end_text = self._tokenizer.id_to_token(self.end_id)
        encoded = self._call("is not a tokenizer", self._tokenizer.encode, self.end_text)
        in_text = zip(encoded.sequence_ids, encoded.ids, strict=True)
        self.start_ids = [token for _, token in takewhile(lambda pair: pair[0] is None, in_text)]
        self.config = {"eos_token": self.end_text} if ends[0] not in known[:1] else {}

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
        first = len(self.start_ids) if tokens[: len(self.start_ids)] == self.start_ids else 0
        return self._call("cannot decode tokens", self._tokenizer.decode, tokens[first:], skip_special_tokens=False)

    def encode_batch(self, texts: Sequence[str], special_tokens: bool = False) -> list[np.ndarray]:
        encode, self._tokenizer.encode_special_tokens = self._tokenizer.encode_batch_fast, not special_tokens
        found = self._call("cannot encode text", encode, list(texts), add_special_tokens=False)
        encoded = [np.array(one.ids, np.int64) for one in found]
        for text, ids in zip(texts, encoded, strict=True):
            ends = text.count(self.end_text) if special_tokens else 0
            if (ids >= self.vocab_size).any() or (ids == self.end_id).sum() > ends:
                raise ValueError(
                    f"{self._where} encodes text to its end-of-document token, or outside its vocabulary: use another "
                    f"tokenizer; the text starts with {quoted(text, 60)}"
                )
        return [ids.astype(dtype_for(self.vocab_size)) for ids in encoded]

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        self._tokenizer.encode_special_tokens = False
        found = self._call("cannot encode text", self._tokenizer.encode_batch, list(texts), add_special_tokens=False)
        dtype = dtype_for(self.vocab_size)
        spans = [np.array(one.offsets, np.int64).reshape(-1, 2) for one in found]
        return [(np.array(one.ids, dtype), both[:, 0], both[:, 1]) for one, both in zip(found, spans, strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        return BPETokenizer, (self._content, self._where, self.config)

    def _named_ends(self, config: Mapping[str, Any]) -> list[int]:
        """The end tokens that `config` names, by their texts or else by their ids."""
        name, numbers = config.get("eos_token"), config.get("eos_token_id")
        name = name.get("content") if isinstance(name, dict) else name
        found = [self._tokenizer.token_to_id(name)] if isinstance(name, str) else []
        numbers = [n for n in (numbers if isinstance(numbers, list) else [numbers]) if isinstance(n, int)]
        found += [n for n in numbers if 0 <= n < self.vocab_size and self._tokenizer.id_to_token(n)]
        return [token for token in found if token is not None]

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


def tokenizer_from_json(content: bytes, where: str, config: Mapping[str, Any] | None = None) -> Tokenizer:
    """Build a tokenizer from its JSON. Raises ValueError, naming `where`, if it is not a tokenizer.

    config: as for `BPETokenizer`.
    """
    try:
        fields = strict_json.parse(content)
    except ValueError as error:
        raise ValueError(f"{where} is not a tokenizer: {printable(error)}") from None
    match fields:
        case {"tokenizer": "bytes"}:
            return BYTES
        case {"tokenizer": "ids", "vocab_size": int(size), **rest} if 0 < size < 1 << 32 and size is not True:
            return UnknownTokenizer(size, end_id=int(rest.get("end_id", -1)))
        case {"model": dict()}:
            return BPETokenizer(content, where, config)
    raise ValueError(f"{where} is not a tokenizer: neither the tokenizers library nor moe-dualpipe wrote it")


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json and the CONFIGS beside it. Raises ValueError if it is missing or not a tokenizer."""
    config: dict[str, Any] = {}
    for beside in filter(Path.is_file, map(path.with_name, CONFIGS)):
        with strict_json.reading(beside):
            config |= strict_json.parse(strict_json.read_bytes(beside), allow_nan=True)
    return tokenizer_from_json(strict_json.read_bytes(path), printable(path), config)


def find_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder of token ids or of a checkpoint; BYTES if the folder has no tokenizer.json."""
    return read_tokenizer(folder / TOKENIZER_FILE) if (folder / TOKENIZER_FILE).is_file() else BYTES


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files that make `find_tokenizer` find `tokenizer` in a folder: file name -> content."""
    files = {} if isinstance(tokenizer, ByteTokenizer) else {TOKENIZER_FILE: tokenizer.to_json()}
    return files | ({TOKENIZER_CONFIG: json.dumps(tokenizer.config).encode()} if tokenizer.config else {})


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
    """A hash of the tokenizer's files; equal tokenizers have equal digests."""
    config = json.dumps(tokenizer.config, sort_keys=True).encode() if tokenizer.config else b""
    return hashlib.blake2b(tokenizer.to_json() + config, digest_size=16).hexdigest()


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned dtype for ids below `vocab_size`."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def num_bytes(tokenizer: Tokenizer, tokens: np.ndarray) -> int:
    """Bytes of the text of `tokens`, counting the end of a document as one byte, and its start as none."""
    if isinstance(tokenizer, ByteTokenizer):
        return len(tokens)
    ends = tokens == tokenizer.end_id
    text = tokens[~ends & ~np.isin(tokens, tokenizer.start_ids)]
    parts = (tokenizer.decode(text[i : i + (1 << 16)].tolist()) for i in range(0, len(text), 1 << 16))
    return int(ends.sum()) + sum(len(part.encode()) for part in parts)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError("BPE needs the tokenizers library: pip install 'moe-dualpipe[bpe]'") from None
    return tokenizers
