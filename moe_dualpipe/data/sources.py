"""Open what --data names: text, folders of token ids that `moe-dualpipe data prepare` wrote, or bare .bin files.

All sources of a run share one tokenizer. It comes from the token ids among the sources; without any, text is bytes.
Text is read into memory and encoded at the start. Token ids stay on disk, so they may be larger than memory.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .batches import Source, TextData, TokenStream
from .documents import JSONL, Documents, held_out_tail, is_held_out
from .token_files import HELD_OUT_FILES, SCAN_LIMIT, TRAIN_FILE, TokenFile, TokensOnDisk
from .tokenizer import BYTES, TOKENIZER_FILE, Tokenizer, UnknownTokenizer, digest, num_bytes


def load_data(
    sources: str | Sequence[str], seq_len: int, vocab_size: int | None = None,
    field: str = "text", dtype: str = "uint16",
) -> TextData:  # fmt: skip
    """Open `sources`, each "SOURCE" or "SOURCE=WEIGHT".

    A source is text (a file, a folder, a glob, or "stdlib"), a folder that `prepare_data` wrote, or a .bin file.
    field: the key of the text in .jsonl lines. dtype: of .bin files without a sidecar. vocab_size: of the model; None
    accepts every tokenizer. Raises ValueError if a source is empty, broken or shorter than one sequence of `seq_len`,
    if the sources have different tokenizers, or if `vocab_size` is too small.
    """
    entries = [split_weight(entry) for entry in ([sources] if isinstance(sources, str) else sources or [""])]
    opened = {name: list(_open_token_files(name, dtype)) for name, _ in entries}
    tokenizer = _common_tokenizer(opened, vocab_size or np.iinfo(dtype).max + 1)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ValueError(f"--data ({tokenizer}) needs --model.vocab-size {tokenizer.vocab_size}: got {vocab_size}")
    loaded = (
        _open_tokens(name, weight, opened[name], tokenizer, seq_len)
        if opened[name]
        else _encode_text(name, weight, Documents.find(name, field), tokenizer, seq_len)
        for name, weight in entries
    )
    return TextData(tuple(loaded), tokenizer)


def split_weight(entry: str) -> tuple[str, float]:
    """Split "notes=2.5" into ("notes", 2.5). An entry without a weight, or with the name of a file, has weight 1."""
    name, equals, weight = entry.rpartition("=")
    if not equals or Path(entry).exists():
        name, weight = entry, "1"
    try:
        number = float(weight)
    except ValueError:
        name, number = entry, 1.0  # the "=" is part of the name
    if not 0 < number < math.inf:
        raise ValueError(f"--data {entry}: the weight must be a positive number: got {weight}")
    if not name:
        raise ValueError('--data is empty: name a file, a folder, a glob, or "stdlib"')
    return name, number


def _open_token_files(name: str, dtype: str) -> Iterator[TokenFile]:
    """If `name` is token ids, yield the training file, and then the held-out file if there is one."""
    path = Path(name) / TRAIN_FILE if os.path.isfile(Path(name) / TRAIN_FILE) else Path(name)
    if path.suffix == ".bin" and os.path.isfile(path):
        yield TokenFile.open(path, dtype)
        held_out = [other for name in HELD_OUT_FILES if os.path.isfile(other := path.with_name(name))]
        if path.name == TRAIN_FILE and held_out:
            yield TokenFile.open(held_out[0], dtype)


def _common_tokenizer(opened: dict[str, list[TokenFile]], vocab_size: int) -> Tokenizer:
    found = [(file.path, file.tokenizer(vocab_size)) for files in opened.values() for file in files]
    if not found:
        return BYTES
    first, chosen = found[0]
    for path, tokenizer in found:
        if digest(tokenizer) != digest(chosen):
            raise ValueError(
                f"all of --data must have the same tokenizer: {first} has {chosen}, {path} has {tokenizer}; "
                f"prepare one with the other's {TOKENIZER_FILE}"
            )
    if isinstance(chosen, UnknownTokenizer) and not all(opened.values()):
        raise ValueError(f"cannot encode the text in --data: there is no {TOKENIZER_FILE} next to {first}")
    return chosen


def _open_tokens(name: str, weight: float, files: list[TokenFile], tokenizer: Tokenizer, seq_len: int) -> Source:
    for file in files:
        if file.tokens_N.file.size <= SCAN_LIMIT:
            file.scan(tokenizer.vocab_size)
    streams = [file.tokens_N for file in files]
    train, held_out = streams if len(streams) == 2 else _split_tail(streams[0], seq_len)
    _check_length(name, train, held_out, seq_len, "tokens")
    bytes_per_token = None
    if sidecar := files[-1].sidecar:
        bytes_per_token = sidecar.bytes / sidecar.tokens
    elif not isinstance(tokenizer, UnknownTokenizer):
        sample = held_out[: 1 << 20]
        bytes_per_token = num_bytes(tokenizer, sample) / len(sample)
    description = f"{len(train):,} tokens, {len(held_out):,} held out"
    return Source(name, weight, train, held_out, description, bytes_per_token)


def _encode_text(name: str, weight: float, documents: Documents, tokenizer: Tokenizer, seq_len: int) -> Source:
    encoded = list(_encode_documents(documents, tokenizer))
    if not encoded:
        raise documents.empty_error()
    training = [tokens for i, tokens in enumerate(encoded) if not is_held_out(i, len(encoded))]
    validation = [tokens for i, tokens in enumerate(encoded) if is_held_out(i, len(encoded))]
    stream, unit = np.concatenate(training), "bytes" if tokenizer is BYTES else "tokens"
    amount = f"{len(stream) / 1e6:.1f} MB" if tokenizer is BYTES else f"{len(stream):,} tokens"
    if validation:
        train, held_out, last = stream, np.concatenate(validation), f"{len(validation)}"
    else:
        train, held_out = _split_tail(stream, seq_len)
        last = f"the last {len(held_out)} {unit}"
    _check_length(name, train, held_out, seq_len, unit)
    what = "documents" if any(path.suffix == JSONL for path in documents.files) else "files"
    description = f"{len(training)} {what} ({amount}), {last} held out{documents.describe_skipped()}"
    return Source(name, weight, train, held_out, description, num_bytes(tokenizer, held_out[:]) / len(held_out))


def _encode_documents(documents: Documents, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the token ids of each document, with the end-of-document id."""
    chunks: list[np.ndarray] = []
    for chunk in documents:
        chunks += tokenizer.encode_batch([chunk.text])
        if chunk.ends_document:
            yield np.append(np.concatenate(chunks), chunks[0].dtype.type(tokenizer.end_id))
            chunks = []


def _split_tail(stream: TokenStream, seq_len: int) -> tuple[TokenStream, TokenStream]:
    cut = len(stream) - held_out_tail(len(stream), seq_len)
    return stream.split(cut) if isinstance(stream, TokensOnDisk) else (stream[:cut], stream[cut:])


def _check_length(name: str, train: TokenStream, held_out: TokenStream, seq_len: int, unit: str) -> None:
    shortest = min(len(train), len(held_out))
    if shortest < seq_len + 1:
        raise ValueError(
            f"too little text in --data {name}: {len(train)} {unit} for training and {len(held_out)} held out, "
            f"but one sequence needs {seq_len + 1}; use more text or --seq-len {max(shortest - 1, 1)}"
        )
