"""Encode text into a folder of token ids, once, instead of at the start of every run."""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from .documents import Documents, TextChunk, held_out_tail, is_held_out
from .files import DataFile
from .token_files import HELD_OUT_FILES, TRAIN_FILE, Sidecar, TokensOnDisk
from .tokenizer import BYTES, TOKENIZER_FILE, BPETokenizer, Tokenizer, digest, dtype_for, num_bytes, read_tokenizer

ENCODE_BATCH = 64  # text chunks encoded at a time


def prepare_data(
    sources: list[str], out: Path, tokenizer: str, vocab_size: int, field: str
) -> tuple[Tokenizer, list[Sidecar]]:
    """Encode the documents of `sources` into a new folder `out`, which appears only when it is complete.

    tokenizer: "bpe" (trained on the text, at most `vocab_size` tokens), "bytes", or the path of a tokenizer.json.
    Returns the tokenizer and the sidecars of train.bin and held_out.bin. Raises ValueError if a source is not text.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} already exists and is not empty: choose another folder")
    found = [Documents.find(source, field) for source in sources]
    counts = [sum(chunk.ends_document for chunk in documents) for documents in found]
    if 0 in counts:
        raise found[counts.index(0)].empty_error()
    if tokenizer == "bpe":
        chosen: Tokenizer = BPETokenizer.train((chunk.text for documents in found for chunk in documents), vocab_size)
    else:
        chosen = BYTES if tokenizer == "bytes" else read_tokenizer(Path(tokenizer))
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        (unfinished / TOKENIZER_FILE).write_bytes(chosen.to_json())
        sidecars = _write((chunk for documents in found for chunk in documents), sum(counts), chosen, unfinished)
        unfinished.replace(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return chosen, sidecars


def _write(chunks: Iterator[TextChunk], num_documents: int, tokenizer: Tokenizer, folder: Path) -> list[Sidecar]:
    dtype, paths = dtype_for(tokenizer.vocab_size), [folder / TRAIN_FILE, folder / HELD_OUT_FILES[0]]
    end = np.array([tokenizer.end_id], dtype).tobytes()
    document, documents, size = 0, [0, 0], [0, 0]  # number of the next document; documents and bytes of each file
    with paths[0].open("wb") as train, paths[1].open("wb") as held_out:
        while batch := list(islice(chunks, ENCODE_BATCH)):
            for chunk, tokens_N in zip(batch, tokenizer.encode_batch([c.text for c in batch]), strict=True):
                held = is_held_out(document, num_documents)
                (held_out if held else train).write(tokens_N.tobytes() + end * chunk.ends_document)
                size[held] += len(chunk.text.encode()) + chunk.ends_document
                documents[held] += chunk.ends_document
                document += chunk.ends_document
    if not documents[1]:
        tokens_N = _tokens(paths[0], dtype)
        cut = len(tokens_N) - held_out_tail(len(tokens_N))
        tail_N = tokens_N[cut:]
        paths[1].write_bytes(tail_N.tobytes())
        size[1], documents[1] = num_bytes(tokenizer, tail_N), int((tail_N == tokenizer.end_id).sum())
        size[0], documents[0] = size[0] - size[1], documents[0] - documents[1]
        os.truncate(paths[0], cut * dtype.itemsize)
    return [_write_sidecar(*each, tokenizer, dtype) for each in zip(paths, documents, size, strict=True)]


def _write_sidecar(path: Path, documents: int, size: int, tokenizer: Tokenizer, dtype: np.dtype) -> Sidecar:
    if not path.stat().st_size:
        raise ValueError("too little text to hold out some for validation: add more")
    tokens_N = _tokens(path, dtype)
    sums = [zlib.crc32(chunk.data) for chunk in tokens_N.chunks()]
    vocab_size, end_id = tokenizer.vocab_size, tokenizer.end_id
    sidecar = Sidecar(dtype.name, vocab_size, end_id, len(tokens_N), documents, size, digest(tokenizer), sums)
    path.with_name(path.name + ".json").write_text(json.dumps(dataclasses.asdict(sidecar)) + "\n")
    return sidecar


def _tokens(path: Path, dtype: np.dtype) -> TokensOnDisk:
    file = DataFile(path)
    return TokensOnDisk(file, dtype, 0, file.size // dtype.itemsize)
