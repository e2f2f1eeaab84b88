"""Open what --data names: text, folders of token ids that `moe-dualpipe data prepare` wrote, or bare .bin files.

All sources of a run share one tokenizer. It comes from the token ids among the sources; without any, it is that of the
model from which the run starts, or text is bytes.
Text is read into memory and encoded at the start. Token ids stay on disk, so they may be larger than memory.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..messages import check_range, plural, printable
from . import stores
from .batches import Source, TextData
from .chats import NO_TEMPLATE, ChatOptions
from .documents import Documents, list_files
from .encode import EncodedDocument, Split, encode_documents, held_out_size
from .samples import Samples, Text
from .token_files import HELD_OUT_FILES, TRAIN_FILE, TokenFile, TokensOnDisk, TokenStream
from .tokenizer import BYTES, TOKENIZER_FILE, Tokenizer, UnknownTokenizer, digest, num_bytes

SAMPLE = 1 << 20
"""Tokens of held-out text that are decoded to find the bytes per token."""
_TRIES, _PAUSE_S = 10, 0.05
T = TypeVar("T")


def load_data(
    sources: str | Sequence[str], seq_len: int, vocab_size: int | None = None,
    field: str = "text", dtype: str = "uint16", tokenizer: Tokenizer = BYTES, special_tokens: bool = False,
    chats: ChatOptions = NO_TEMPLATE,
) -> TextData:  # fmt: skip
    """Open `sources`, each "SOURCE" or "SOURCE=WEIGHT".

    A source is text (a file, a folder, a glob, or "stdlib"), a folder that `prepare_data` wrote, or a .bin file.
    field: the key of the text in .jsonl lines. dtype: of .bin files without a sidecar. vocab_size: of the model; None
    accepts every tokenizer. tokenizer: of text, if no source has token ids. special_tokens:
    whether special tokens in a text are one id each; otherwise, they are characters. chats: the template of rows with
    chats, and how they become sequences.

    Raises ValueError if a source is empty, broken or shorter than one sequence of `seq_len`, if the sources have
    different tokenizers, or if `vocab_size` is too small.
    """
    entries = [split_weight(entry) for entry in ([sources] if isinstance(sources, str) else sources or [""])]
    places = {name: _locate(name) for name, _ in entries}
    opened = {name: _while_unchanged(_open_token_files, place, dtype) for name, place in places.items()}
    tokenizer = _common_tokenizer(opened, vocab_size or np.iinfo(dtype).max + 1, tokenizer)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ValueError(f"--data ({tokenizer}) needs model.vocab_size {tokenizer.vocab_size}: got {vocab_size}")
    options = field, tokenizer, special_tokens, chats
    texts = {name: _while_unchanged(_read_text, places[name], *options) for name, files in opened.items() if not files}
    splits = {
        are_chats: Split.of(
            (((d.hash, len(d.tokens_N)) for d in text) for _, text in texts.values() if _are_chats(text) == are_chats),
            shortest,
        )
        for are_chats, shortest in ((False, seq_len + 1), (True, 1))
    }  # fmt: skip
    loaded = []
    for name, weight in entries:
        if files := opened[name]:
            train, held_out = _sides_of_files(files, tokenizer, seq_len, chats)
            what, skipped = train.description, ""
        else:
            documents, text = texts[name]
            train, held_out = _sides_of_text(text, splits[_are_chats(text)], seq_len, chats)
            what, skipped = train.description or plural(len(text), "document"), documents.describe_skipped()
        size = _bytes_per_token(held_out, tokenizer, files[-1] if files else None)
        source = Source(name, weight, train, held_out, f"; {what}" * bool(what) + skipped, size)
        _check_length(source, seq_len, "bytes" if tokenizer is BYTES else "tokens")
        loaded.append(source)
    return TextData(tuple(loaded), tokenizer)


def read_stream(
    source: str, tokenizer: Tokenizer, field: str = "text", dtype: str = "uint16", special_tokens: bool = False,
    chats: ChatOptions = NO_TEMPLATE,
) -> tuple[TokenStream, TokenStream | None]:  # fmt: skip
    """All token ids of one source in order, each text followed by the end token, and the flags of chats (samples.py).

    Text is encoded with `tokenizer`. A folder that `prepare_data` wrote gives its held-out tokens. Other arguments are
    those of `load_data`. Raises ValueError if the source is empty or broken, and for token ids of another tokenizer.
    """
    source = _locate(source)
    if files := _while_unchanged(_open_token_files, source, dtype):
        file = files[-1] if os.path.isdir(source) else files[0]
        found = file.tokenizer(tokenizer.vocab_size)
        if digest(found) != digest(tokenizer):
            raise ValueError(f"{printable(file.path)} has the tokenizer {found}, but the model has {tokenizer}")
        file.scan_if_small(tokenizer.vocab_size)
        return file.tokens_N, file.flags_N
    _, encoded = _while_unchanged(_read_text, source, field, tokenizer, special_tokens, chats)
    flags = [document.flags_N for document in encoded if document.flags_N is not None]
    return np.concatenate([document.tokens_N for document in encoded]), np.concatenate(flags) if flags else None


def split_weight(entry: str) -> tuple[str, float]:
    """Split "notes=2.5" into ("notes", 2.5). An entry without a weight, or with the name of a file, has weight 1."""
    name, equals, weight = entry.rpartition("=")
    if not equals or os.path.lexists(entry):
        name, weight = entry, "1"
    try:
        number = float(weight)
    except ValueError:
        name, number = entry, 1.0  # the "=" is part of the name
    check_range(f"--data {printable(entry)}: the weight", number, 1e-9, 1e9)
    return name, number


def _locate(source: str) -> str:
    """The path of a source; of a file or folder at a URL, that of a copy, which the ranks of a machine share.

    Raises ValueError if there is nothing at the URL, or if it cannot be read.
    """
    if not stores.is_url(source):
        return source
    try:
        path = stores.local_path(source)
        if (url := stores.url_of(path)) is None:  # hf://
            return str(path)
        names = stores.open_folder(path, whole=True)
        return str(path if names else stores.fetch(stores.local_path(url.parent) / url.name))
    except stores.StorageError as error:
        raise ValueError(f"--data {error}") from None
    except OSError as error:
        reason = f"{error.strerror}: set TMPDIR to a folder with enough space"
        raise ValueError(f"--data {printable(source)} cannot be copied: {reason}") from None


def _while_unchanged(read: Callable[..., T], source: str, *options: Any) -> T:
    """`read(source, *options)`, again after an error, until the files of the source are as at the error before.

    At most _TRIES times. Without an error, files are not listed: of the standard library, this takes a second.
    """
    before = None
    for tries_left in range(_TRIES - 1, -1, -1):
        try:
            return read(source, *options)
        except ValueError:
            files = list_files(source) if source else before
            if files == before or not tries_left:
                raise
            before = files
            time.sleep(_PAUSE_S)  # one file may be replaced after another
    raise AssertionError


def _open_token_files(name: str, dtype: str) -> list[TokenFile]:
    """If `name` is token ids, the training file, and then the held-out file if there is one.

    Raises ValueError for a folder in which one of them is missing, rather than train on its JSON files as text.
    """
    path = Path(name)
    if os.path.isdir(path):
        if not any(map(_is_described, map(path.joinpath, (TRAIN_FILE, *HELD_OUT_FILES)))):
            return []
        path /= TRAIN_FILE
    elif path.suffix != ".bin" or not path.exists():
        return []
    beside = [path.with_name(other) for other in HELD_OUT_FILES if path.name == TRAIN_FILE]
    return [TokenFile.open(file, dtype) for file in (path, *[*filter(_is_described, beside)][:1])]


def _read_text(
    name: str, field: str, tokenizer: Tokenizer, special_tokens: bool, chats: ChatOptions
) -> tuple[Documents, list[EncodedDocument]]:
    """The documents of a source of text. Raises ValueError if there are none."""
    documents = Documents.find(name, field)
    if not (encoded := list(encode_documents(iter(documents), tokenizer, special_tokens, chats))):
        raise documents.empty_error()
    return documents, encoded


def _are_chats(encoded: Sequence[EncodedDocument]) -> bool:
    return encoded[0].flags_N is not None


def _sides_of_text(
    encoded: Sequence[EncodedDocument], split: Split, seq_len: int, options: ChatOptions
) -> list[Text | Samples]:
    """The documents to train on, and those that are held out."""
    found = list[Text | Samples]()
    for side in zip(*map(split.divide, encoded), strict=True):
        kept = [document for document in side if len(document.tokens_N)]
        flags = [document.flags_N for document in kept if document.flags_N is not None]
        if not kept and _are_chats(encoded):
            raise ValueError(f"{encoded[0].place}: only one chat: use at least two, of which one is held out")
        tokens_N = np.concatenate([document.tokens_N for document in side])
        place = [document.place for document in kept].__getitem__
        found.append(Samples(tokens_N, np.concatenate(flags), seq_len, options, place) if flags else Text(tokens_N))
    return found


def _is_described(path: Path) -> bool:
    """Whether there is a file of token ids at `path`, or the description of one."""
    return os.path.lexists(path) or os.path.lexists(path.with_name(f"{path.name}.json"))


def _common_tokenizer(opened: dict[str, list[TokenFile]], vocab_size: int, of_text: Tokenizer) -> Tokenizer:
    found = [(file.path, file.tokenizer(vocab_size)) for files in opened.values() for file in files]
    if not found:
        return of_text
    first, chosen = found[0]
    for path, tokenizer in found:
        if digest(tokenizer) != digest(chosen):
            raise ValueError(
                f"all of --data must have the same tokenizer: {printable(first)} has {chosen}, "
                f"{printable(path)} has {tokenizer}; prepare one with the other's {TOKENIZER_FILE}"
            )
    if isinstance(chosen, UnknownTokenizer) and not all(opened.values()):
        raise ValueError(f"cannot encode the text in --data: there is no {TOKENIZER_FILE} next to {printable(first)}")
    return chosen


def _sides_of_files(
    files: list[TokenFile], tokenizer: Tokenizer, seq_len: int, options: ChatOptions
) -> list[Text | Samples]:
    """The training and held-out tokens of a source of token ids."""
    for file in files:
        file.scan_if_small(tokenizer.vocab_size)
    if len(files) == 1 and files[0].flags_N is None:
        count, whole = len(files[0].tokens_N), (files[0].tokens_N.file, files[0].tokens_N.dtype)
        cut = count - held_out_size(count, seq_len + 1)
        return [Text(TokensOnDisk(*whole, 0, cut)), Text(TokensOnDisk(*whole, cut, count))]
    return [
        Text(file.tokens_N) if file.flags_N is None else Samples(
            file.tokens_N, file.flags_N, seq_len, options,
            lambda number, file=file: f"{printable(file.path)}: chat {number + 1}",
        )
        for file in (files[0], files[-1])
    ]  # fmt: skip


def _bytes_per_token(held_out: Text | Samples, tokenizer: Tokenizer, file: TokenFile | None) -> float | None:
    if isinstance(held_out, Samples):
        return None
    if file and file.sidecar:
        return file.sidecar.bytes / file.sidecar.tokens
    sample = held_out.streams[0][:SAMPLE]
    return None if isinstance(tokenizer, UnknownTokenizer) else num_bytes(tokenizer, sample) / max(len(sample), 1)


def _check_length(source: Source, seq_len: int, unit: str) -> None:
    train, held_out = source.train, source.held_out
    if min(train.num_places(seq_len), held_out.num_places(seq_len)) > 0:
        return
    name, shorter = printable(source.name), min(len(train), len(held_out)) - 1
    if isinstance(train, Samples):
        raise ValueError(f"--data {name}: all chats on one side are too long: use a larger --seq-len")
    raise ValueError(
        f"too little text in --data {name}: {len(train)} {unit} for training and {len(held_out)} held out, "
        f"but one sequence needs {seq_len + 1}; use more text{f' or --seq-len {shorter}' * (shorter > 0)}"
    )
