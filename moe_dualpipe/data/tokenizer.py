"""Text to token ids and back: bytes, a learned byte-level BPE, or ids whose text is not known.

A model is worth nothing without the tokenizer of its data, so every tokenizer is one JSON document that is written
beside the tokens and into each checkpoint. Bytes are the default and need nothing; BPE is the `tokenizers` library's,
an optional dependency, whose JSON is data for its parser: reading one that somebody else wrote runs no code.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

FILE = "tokenizer.json"
END = "<|endoftext|>"
# What published tokenizers end a document with: GPT-2 and its kin, Llama 3, DeepSeek, Llama 2 and Mixtral, Gemma.
ENDS = (END, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")  # noqa: RUF001


class Tokenizer(Protocol):
    """Token ids for text. `end_id` ends every document, and no text encodes to it; -1 where it is not known."""

    vocab_size: int
    end_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; ids past the vocabulary become the replacement character, or nothing."""
        ...

    def arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, in the smallest dtype that holds the vocabulary."""
        ...

    def to_bytes(self) -> bytes:
        """The JSON that `from_bytes` makes the same tokenizer of."""
        ...

    def __str__(self) -> str: ...


class Bytes:
    """UTF-8 itself, 256 tokens; a zero byte, which no text file has, ends a document."""

    vocab_size, end_id = 256, 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return b"".join(bytes([t]) if t < 256 else "\ufffd".encode() for t in tokens).decode(errors="replace")

    def arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def to_bytes(self) -> bytes:
        return b'{"tokenizer": "bytes"}\n'

    def __str__(self) -> str:
        return "bytes"


class Ids:
    """Tokens of an unknown tokenizer: the text of a token is its number. "17 4" is [17, 4]; other text is [0]."""

    end_id = -1

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in re.findall(r"[0-9]{1,9}", text)] or [0]

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" {token}" for token in tokens)

    def arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise ValueError("the tokenizer of these token ids is not known, so no text can be added to them")

    def to_bytes(self) -> bytes:
        return json.dumps({"tokenizer": "ids", "vocab_size": self.vocab_size}).encode() + b"\n"

    def __str__(self) -> str:
        return f"{self.vocab_size:,} token ids without a tokenizer"


class BPE:
    """A tokenizer of the `tokenizers` library, as its tokenizer.json has it. Special tokens are never made of text."""

    def __init__(self, content: bytes, where: str):
        library = _library()
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{where} is no tokenizer: {error}") from None
        self._content = content
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is thirteen characters
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=0) + 1
        special = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        ends = [special[name] for name in ENDS if name in special]
        if not ends:
            raise ValueError(
                f"{where} has no special token that ends a document: one of {', '.join(ENDS)} must be among its "
                f"added_tokens, with special true; there are: {', '.join(list(special)[:8]) or 'none'}"
            )
        self.end_id = ends[0]
        self._dtype = dtype_for(self.vocab_size)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPE":
        """Learn byte-level BPE, with GPT-2's way to cut a text into words; the same texts give the same tokenizer.

        Keeps the words of `texts`, not the texts. Fewer tokens than `vocab_size` come of a text too small for them.
        """
        if vocab_size < 257:
            raise ValueError(
                f"--vocab-size must be at least 257, 256 bytes and the end of a document: got {vocab_size}"
            )
        library = _library()
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = library.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(
            texts,
            trainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
        )
        return cls(tokenizer.to_str(pretty=True).encode(), "the trained tokenizer")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, self._dtype) for one in encoded]

    def to_bytes(self) -> bytes:
        return self._content

    def __str__(self) -> str:
        return f"BPE of {self.vocab_size:,} tokens"


BYTES = Bytes()


def from_bytes(content: bytes, where: str) -> Tokenizer:
    """The tokenizer that a tokenizer.json holds. Raises ValueError, naming `where` it stands, if it holds none."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no tokenizer: {error or 'nested too deep'}") from None
    match fields:
        case {"tokenizer": "bytes"}:
            return BYTES
        case {"tokenizer": "ids", "vocab_size": int(size)} if size > 0:
            return Ids(size)
        case {"model": dict()}:
            return BPE(content, where)
    raise ValueError(f"{where} is no tokenizer: neither one of the tokenizers library nor one written here")


def read(path: Path) -> Tokenizer:
    """The tokenizer in a file. Raises ValueError if there is none."""
    try:
        return from_bytes(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer in a folder of tokens, or in a checkpoint's; bytes if there is none in it."""
    return read(folder / FILE) if (folder / FILE).is_file() else BYTES


def files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What has to lie in a folder so that `tokenizer_of` finds `tokenizer` there: file name -> content."""
    return {} if isinstance(tokenizer, Bytes) else {FILE: tokenizer.to_bytes()}


def digest(tokenizer: Tokenizer) -> str:
    """A short name by which equal tokenizers are known: a hash of the JSON."""
    return hashlib.blake2b(tokenizer.to_bytes(), digest_size=16).hexdigest()


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest little-endian dtype whose numbers suffice."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def num_bytes(tokenizer: Tokenizer, tokens: np.ndarray) -> int:
    """Bytes of text in `tokens`, where the end of a document counts as one byte, as it is with bytes."""
    if isinstance(tokenizer, Bytes):
        return len(tokens)
    ends = tokens == tokenizer.end_id
    text = tokens[~ends]
    pieces = (tokenizer.decode(text[i : i + (1 << 16)].tolist()) for i in range(0, len(text), 1 << 16))
    return int(ends.sum()) + sum(len(piece.encode()) for piece in pieces)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError("BPE needs the tokenizers library: pip install 'moe-dualpipe[bpe]'") from None
    return tokenizers
