"""Encode text into a folder of token ids, once, instead of at the start of every run.

A pool of processes writes shards into a folder beside the result, and this process joins them, in order. So the result
does not depend on the number of processes, and after a kill or an error the same call finds the shards that are
finished. It needs twice the disk space of the result for a while; in return, training reads two plain files.

A shard is a ZIP file: token ids and a table of documents. Each file of rows becomes one; small text files share one.
Its name is a hash of everything that it depends on: its files, their sizes and times, the tokenizer and the field. Its
contents are named after it, and have checksums. It is written under another name and renamed when it is complete. So a
shard is finished if it has contents of its name, and if the files still have the documents of its table. Any number of
processes on any machines may write shards into the same folder: each skips those that are finished.

A table has a row for each document: its hash, tokens and bytes. Chats also have the flags of their tokens (samples.py),
which become a file beside the token ids. So which documents are held out is decided when shards
are joined.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from ..messages import check_range, printable
from .chats import NO_TEMPLATE, Chat, ChatOptions, ChatTemplate, read_template
from .documents import Documents
from .encode import EncodedDocument, Split, encode_documents, hash_text, split_lines, text_of
from .files import LOCK_FILE, divide, make_folder, only_writer, replacing, sync, write_synced
from .pool import run_in_processes
from .rows import row_format
from .token_files import CHUNK, HELD_OUT_FILES, TRAIN_FILE, Sidecar, flags_file
from .tokenizer import (
    BYTES,
    TOKENIZER_FILE,
    BPETokenizer,
    Tokenizer,
    digest,
    dtype_for,
    num_bytes,
    read_tokenizer,
    tokenizer_files,
)

SHARDS = "shards"
FILES = (TRAIN_FILE, HELD_OUT_FILES[0])
SHARD_BYTES = 1 << 22
"""Text files are put together up to this size."""
_TOKENS, _FLAGS, _TABLE = ".tokens", ".flags", ".documents"
"""The contents of a shard: its name with one of these endings."""


# ---- Shards ----


def shards_of(found: Iterable[Documents], field: str) -> list[Documents]:
    """Divide the files of all sources into shards, in order."""
    files = [file for documents in found for file in documents.files]
    sizes = {i: math.inf if row_format(path) else status.size for i, (path, status) in enumerate(files)}
    return [Documents(tuple(files[i] for i in group), field) for group in divide(sizes, SHARD_BYTES)]


@dataclass(frozen=True)
class ShardWriter:
    """Writes shards into `folder`."""

    folder: Path
    tokenizer: Tokenizer
    special_tokens: bool = False
    chats: ChatOptions = NO_TEMPLATE

    def path(self, shard: Documents) -> Path:
        """The file of a shard. Its name is the same on machines that see other devices and inodes."""
        files = [(str(path), status.size, status.modified) for path, status in shard.files]
        chats = [] if self.chats.template is None else [repr(self.chats)]
        options = digest(self.tokenizer), shard.field, str(self.special_tokens), *chats
        key = hashlib.blake2b(repr((files, options)).encode(), digest_size=16).hexdigest()
        return self.folder / f"{key}.zip"

    def is_finished(self, shard: Documents) -> bool:
        """Whether the file of a shard is whole, and has the documents that its files have now, which are read."""
        with suppress(ValueError):  # missing or damaged
            hashes = [content_hash for content_hash, *_ in _read_table(self.path(shard))]
            return hashes == [hash_text(text_of(document)) for document in shard]
        return False

    def write(self, shard: Documents) -> bool:
        """Encode a shard, unless it is finished. Returns whether it was.

        Raises ValueError if its files are not text or have changed.
        """
        if self.is_finished(shard):
            return True
        path, table, flags = self.path(shard), list[tuple[int, int, int]](), bytearray()
        with replacing(path) as part:  # another process may write the same
            with zipfile.ZipFile(part, "w") as file:
                with file.open(path.stem + _TOKENS, "w", force_zip64=True) as tokens:
                    for document in encode_documents(shard, self.tokenizer, self.special_tokens, self.chats):
                        tokens.write(document.tokens_N.data)
                        flags += b"" if document.flags_N is None else document.flags_N.tobytes()
                        table.append((document.hash, len(document.tokens_N), document.text_bytes))
                if flags:
                    file.writestr(path.stem + _FLAGS, bytes(flags))
                file.writestr(path.stem + _TABLE, np.array(table, np.uint64).tobytes())
            sync(part)
        return False


def join(paths: list[Path], folder: Path, tokenizer: Tokenizer) -> tuple[Sidecar, Sidecar]:
    """Join shards, in order, into FILES in `folder`, and return their sidecars.

    Raises ValueError if a shard is damaged, or if there is too little text.
    """
    dtype = dtype_for(tokenizer.vocab_size)
    sizes = ((content_hash, tokens) for path in paths for content_hash, tokens, _ in _read_table(path))
    split = Split.of([sizes], shortest=1)
    documents, text_bytes, kinds = [0, 0], [0, 0], set[bool]()
    with ExitStack() as stack:
        paths_of = [(folder / name, flags_file(folder / name)) for name in FILES]
        sides = [[stack.enter_context(path.open("wb")) for path in pair] for pair in paths_of]
        for document in (document for path in paths for document in read_shard(path, dtype)):
            head, tail = split.divide(document)
            kinds.add(document.flags_N is not None)
            for part, (tokens, flags) in zip((head, tail), sides, strict=True):
                tokens.write(part.tokens_N.data)
                if part.flags_N is not None:
                    flags.write(part.flags_N.data)
            documents[len(tail.tokens_N) > 0] += 1
            tail_bytes = num_bytes(tokenizer, tail.tokens_N) if len(head.tokens_N) else document.text_bytes
            text_bytes[0] += document.text_bytes - tail_bytes
            text_bytes[1] += tail_bytes
    if len(kinds) > 1:
        raise ValueError("the sources have rows with chats and rows with text: prepare them in two folders")
    train, held_out = (
        _describe(folder / name, count, size, tokenizer)
        for name, count, size in zip(FILES, documents, text_bytes, strict=True)
    )
    return train, held_out


def read_shard(path: Path, dtype: np.dtype) -> Iterator[EncodedDocument]:
    """The documents of a shard, in order. Raises ValueError if it is damaged."""
    name = path.stem
    with _open_shard(path) as shard, shard.open(name + _TOKENS) as tokens, ExitStack() as stack:
        flags = stack.enter_context(shard.open(name + _FLAGS)) if name + _FLAGS in shard.namelist() else None
        for content_hash, size, text_bytes in _table(shard.read(name + _TABLE)):
            tokens_N = np.frombuffer(tokens.read(size * dtype.itemsize), dtype)
            flags_N = np.frombuffer(flags.read(size), np.uint8) if flags else None
            yield EncodedDocument(content_hash, tokens_N, text_bytes, flags_N)


def _read_table(path: Path) -> list[list[int]]:
    with _open_shard(path) as shard:
        return _table(shard.read(path.stem + _TABLE))


def _table(content: bytes) -> list[list[int]]:
    """Hash, tokens and bytes of each document of a shard."""
    return np.frombuffer(content, np.uint64).reshape(-1, 3).tolist()


@contextmanager
def _open_shard(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a shard. Raises ValueError if it is damaged: at once, or at the end of a file whose checksum differs."""
    try:
        with zipfile.ZipFile(path) as shard:
            yield shard
    except Exception:  # zipfile raises many types
        raise ValueError(f"{printable(path)} is damaged: remove it, and repeat the command") from None


def _describe(path: Path, documents: int, text_bytes: int, tokenizer: Tokenizer) -> Sidecar:
    """Describe the file of token ids `path`, and wait until both are on the disk."""
    dtype = dtype_for(tokenizer.vocab_size)
    if not (size := path.stat().st_size):
        raise ValueError("too little text to hold out some for validation: add more")
    flags, flag_sums = flags_file(path), None
    if flags.stat().st_size:
        flag_sums = _checksums(flags, CHUNK)
        sync(flags)
    else:
        flags.unlink()
    sidecar = Sidecar(
        dtype.name, tokenizer.vocab_size, tokenizer.end_id, size // dtype.itemsize, documents, text_bytes,
        digest(tokenizer), _checksums(path, CHUNK * dtype.itemsize), flag_sums,
    )  # fmt: skip
    write_synced(path.with_name(f"{path.name}.json"), json.dumps(dataclasses.asdict(sidecar)).encode() + b"\n")
    sync(path)
    return sidecar


def _checksums(path: Path, size: int) -> list[int]:
    """Of each `size` bytes."""
    with path.open("rb") as file:
        return [zlib.crc32(chunk) for chunk in iter(partial(file.read, size), b"")]


# ---- The result ----


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare_data` wrote.

    sidecars: of train.bin and held_out.bin. shards: their number. finished_before: those that an earlier call finished.
    """

    tokenizer: Tokenizer
    sidecars: tuple[Sidecar, Sidecar]
    shards: int
    finished_before: int


def prepare_data(
    sources: list[str], out: Path, tokenizer: str, vocab_size: int, field: str, *,
    special_tokens: bool = False, workers: int = 1, show: bool = False, chat_template: Path | None = None,
    train_on: Literal["assistant", "all"] = "assistant",
) -> Prepared:  # fmt: skip
    """Encode the documents of `sources` into a new folder `out`, which appears only when it is complete.

    The files in `out` do not depend on `workers`. If an earlier call with the same arguments was killed or failed, the
    shards that it finished are not encoded again.

    tokenizer: "bpe" (trained on the text, at most `vocab_size` tokens), "bytes", or the path of a tokenizer.json.
    special_tokens: whether special tokens in a text are one id each, as in chats; otherwise, they are characters.
    workers: processes that encode, with one thread each. One file of rows is encoded by one process, and by more
    threads if there are fewer files than workers.
    show: a bar on standard error if that is a terminal. chat_template: a file, for rows with chats; None: that beside
    `tokenizer`. train_on: which tokens of chats are labels.

    Raises ValueError if a source is not text or `out` is not a new folder, and ChildProcessError if a worker is killed.
    """
    check_range("--workers", workers, 1)
    if not sources or "" in sources:
        raise ValueError('name at least one SOURCE of text: a file, a folder, a glob, or "stdlib"')
    folder, unfinished = Path(os.path.realpath(out)), _unfinished(out)
    with only_writer(out, unfinished / LOCK_FILE, wait=0.0):
        try:
            if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
                raise ValueError(f"--out {printable(out)} already exists and is not empty: choose another folder")
            files = read_template(tokenizer, chat_template)
            return _prepare(
                sources, folder, tokenizer, vocab_size, field, special_tokens, workers, show, files, train_on
            )  # fmt: skip
        except BaseException:
            if not any(unfinished.rglob("*.zip")):
                shutil.rmtree(unfinished, ignore_errors=True)
            raise


def open_shards(
    sources: list[str], out: Path, tokenizer: Tokenizer, field: str = "text", special_tokens: bool = False
) -> tuple[ShardWriter, list[Documents]]:
    """For programs whose workers write the shards of `out` on other machines: a writer, and the shards.

    Each worker calls `write` for some of the shards. Then `prepare_data` with the same arguments joins them. Raises
    ValueError if a source is not text, or if `out` cannot be written.
    """
    found = [Documents.find(source, field, option="") for source in sources]
    return ShardWriter(_unfinished(out) / SHARDS, tokenizer, special_tokens), shards_of(found, field)


def _prepare(
    sources: list[str], out: Path, tokenizer: str, vocab_size: int, field: str, special_tokens: bool, workers: int,
    show: bool, files: Mapping[str, str], train_on: Literal["assistant", "all"],
) -> Prepared:  # fmt: skip
    found, unfinished = [Documents.find(source, field, option="") for source in sources], _unfinished(out)
    given = None if tokenizer == "bpe" else BYTES if tokenizer == "bytes" else read_tokenizer(Path(tokenizer))
    for documents in found:
        if (first := next(iter(documents), None)) is None:
            raise documents.empty_error()
        if isinstance(first, Chat) and given is None:
            raise ValueError(f"{first.place}: chats need the tokenizer of their model: use --tokenizer tokenizer.json")
    shards = shards_of(found, field)
    texts = (text_of(document) for shard in shards for document in shard)
    chosen = given or BPETokenizer.train((piece for text in texts for piece, _ in split_lines(text)), vocab_size)
    chats = ChatOptions(ChatTemplate.find(files, chosen), train_on)
    writer = ShardWriter(unfinished / SHARDS, chosen, special_tokens, chats)
    size, hidden, finished_before = sum(shard.size for shard in shards), None if show else True, 0
    with tqdm(desc="encoding", total=size, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
        for shard, was_finished in zip(shards, run_in_processes(writer.write, shards, workers), strict=True):
            bar.update(shard.size)
            finished_before += was_finished
    result = unfinished / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    for name, content in {TOKENIZER_FILE: chosen.to_json(), **tokenizer_files(chosen)}.items():
        (result / name).write_bytes(content)
    sidecars = join([writer.path(shard) for shard in shards], result, chosen)
    result.replace(out)
    shutil.rmtree(unfinished)
    return Prepared(chosen, sidecars, len(shards), finished_before)


def _unfinished(out: Path) -> Path:
    """Make the folder where the shards of `out` are until it is complete. Raises ValueError."""
    folder = Path(os.path.realpath(out))
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    make_folder(unfinished / SHARDS, f"--out {printable(out)}")
    return unfinished
