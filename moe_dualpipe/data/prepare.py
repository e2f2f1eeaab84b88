"""Encode text into a folder of token ids, once, instead of at the start of every run.

A pool of processes writes shards (shards.py) into a folder beside the result, and this process joins them, in order. So
the result does not depend on the number of processes, and after a kill or an error the same call finds the shards that
are finished. It needs twice the disk space of the result for a while; in return, training reads two plain files.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..messages import check_range, printable
from .documents import Documents
from .held_out import Split
from .pool import run_in_processes, tokenizer_threads
from .rows import TextField
from .shards import FILES, Shard, ShardWriter, divide, write_sidecar
from .token_files import Sidecar, TokenFile
from .tokenizer import BYTES, TOKENIZER_FILE, BPETokenizer, Tokenizer, read_tokenizer

SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare_data` wrote.

    sidecars: of train.bin and held_out.bin. duplicates: documents left out. shards, finished_before: all, and those
    that an earlier call had finished. tokens, seconds: encoded by this call, and the time that it took.
    """

    tokenizer: Tokenizer
    sidecars: tuple[Sidecar, Sidecar]
    duplicates: int
    shards: int
    finished_before: int
    tokens: int
    seconds: float


def prepare_data(
    sources: list[str], out: Path, tokenizer: str, vocab_size: int, field: str, *,
    workers: int = 1, drop_duplicates: bool = False, show: bool = False,
) -> Prepared:  # fmt: skip
    """Encode the documents of `sources` into a new folder `out`, which appears only when it is complete.

    A file that is in several sources is encoded once. The files in `out` do not depend on `workers`. If an earlier call
    with the same arguments was killed or failed, the shards that it finished are not encoded again.

    tokenizer: "bpe" (trained on the text, at most `vocab_size` tokens), "bytes", or the path of a tokenizer.json.
    workers: processes that encode, with one thread each. One file of rows is encoded by one process, and by more
    threads if there are less files than workers.
    drop_duplicates: of documents that are equal byte by byte, encode only the first.
    show: a bar on standard error if that is a terminal.

    Raises ValueError if a source is not text, and ChildProcessError if a worker is killed.
    """
    check_range("--workers", workers, 1)
    job = Preparation.open(sources, out, field)
    with _locked(job.unfinished, out):
        try:
            return job.run(tokenizer, vocab_size, workers, drop_duplicates, show)
        except BaseException:
            if not any(job.unfinished.rglob("*.json")):  # no shard, and no tokenizer
                shutil.rmtree(job.unfinished, ignore_errors=True)
            raise


def unfinished_folder(out: Path) -> Path:
    """Where the shards of `out` are until it is complete."""
    folder = Path(os.path.realpath(out))
    return folder.with_name(f".{folder.name}.unfinished")


@dataclass(frozen=True)
class Preparation:
    """A result to write: for programs whose workers write the shards on other machines.

    Each of them opens it with the same arguments, and calls `writer(tokenizer).write(shard)` for some of `shards`. Then
    `prepare_data` with the same arguments joins them.
    """

    found: list[Documents]
    folder: Path
    unfinished: Path
    shards: list[Shard]

    @classmethod
    def open(cls, sources: list[str], out: Path, field: str = "text") -> "Preparation":
        """Find the files of `sources`. Raises ValueError if one is not text, or if `out` is not a new folder."""
        if not sources or "" in sources:
            raise ValueError('name at least one SOURCE of text: a file, a folder, a glob, or "stdlib"')
        folder, unfinished = Path(os.path.realpath(out)), unfinished_folder(out)
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--out {printable(out)} already exists and is not empty: choose another folder")
        if os.path.ismount(folder):  # cannot be replaced
            raise ValueError(f"--out {printable(out)} is a mount point: choose a folder in it")
        found: list[Documents] = []
        for source in sources:
            documents = Documents.find(source, field, option="")
            others = documents.without(documents.shared_with(found))
            if others.files or not documents.files:
                found.append(others)
        try:
            (unfinished / SHARDS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot write to --out {printable(out)}: {error.strerror}") from None
        return cls(found, folder, unfinished, [*divide(found)])

    @property
    def field(self) -> TextField:
        return self.found[0].field

    def writer(self, tokenizer: Tokenizer, shards: list[Shard] | None = None) -> ShardWriter:
        """What writes the shards. Reads only a few documents, unless there are only a few. shards: None for all."""
        documents = chain.from_iterable(shard.documents(self.field) for shard in shards or self.shards)
        return ShardWriter(self.unfinished / SHARDS, tokenizer, Split.of([documents], shortest=1), self.field)

    def run(self, tokenizer: str, vocab_size: int, workers: int, drop_duplicates: bool, show: bool) -> Prepared:
        """Write the shards and join them: `prepare_data`."""
        given = None if tokenizer == "bpe" else BYTES if tokenizer == "bytes" else read_tokenizer(Path(tokenizer))
        for documents in self.found:
            if next(iter(documents), None) is None:
                raise documents.empty_error()
        shards, duplicates = self._without_duplicates(workers) if drop_duplicates else (self.shards, 0)
        chosen = given or self._trained(shards, vocab_size, workers)
        writer = self.writer(chosen, shards)
        paths = [writer.path(shard) for shard in shards]
        for path in writer.folder.iterdir():
            if path not in paths:  # of other arguments, or of a process that was killed
                shutil.rmtree(path)
        left = [shard for shard, path in zip(shards, paths, strict=True) if not path.exists()]
        size, start, tokens = sum(shard.size for shard in left), time.monotonic(), 0
        hidden = None if show else True
        with tqdm(desc="encoding", total=size, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
            for shard, count in zip(left, run_in_processes(writer.write, left, workers), strict=True):
                tokens += count
                bar.update(shard.size)
        seconds = time.monotonic() - start
        sidecars = self._join(paths, chosen)
        return Prepared(chosen, sidecars, duplicates, len(shards), len(shards) - len(left), tokens, seconds)

    def _without_duplicates(self, workers: int) -> tuple[list[Shard], int]:
        """The shards without the documents that are equal to earlier ones, and the number of those."""
        found = [*run_in_processes(partial(_sizes, self.field), self.shards, workers)]
        _, first_M = np.unique(np.concatenate(found), axis=0, return_index=True)
        dropped_N = np.ones(sum(map(len, found)), bool)
        dropped_N[first_M] = False
        flags = np.split(dropped_N, np.cumsum([*map(len, found)])[:-1])
        dropped = [np.packbits(flag).tobytes() if flag.any() else b"" for flag in flags]
        shards = [replace(shard, dropped=bits) for shard, bits in zip(self.shards, dropped, strict=True)]
        return shards, int(dropped_N.sum())

    def _trained(self, shards: list[Shard], vocab_size: int, workers: int) -> Tokenizer:
        """A tokenizer that is trained on the text, unless an earlier call has done it."""
        key = hashlib.blake2b(repr([shard.key(vocab_size, self.field.name) for shard in shards]).encode())
        path = self.unfinished / f"{key.hexdigest()[:32]}.json"
        if path.exists():
            return read_tokenizer(path)
        with tokenizer_threads(workers):
            texts = (chunk.text for shard in shards for chunk in shard.chunks(self.field))
            trained = BPETokenizer.train(texts, vocab_size)
        path.with_suffix(".new").write_bytes(trained.to_json())
        path.with_suffix(".new").replace(path)
        return trained

    def _join(self, paths: list[Path], tokenizer: Tokenizer) -> tuple[Sidecar, Sidecar]:
        """Join the shards, in order, into the result, and remove them."""
        result = self.unfinished / "result"
        shutil.rmtree(result, ignore_errors=True)
        result.mkdir()
        (result / TOKENIZER_FILE).write_bytes(tokenizer.to_json())
        train, held_out = (_join(paths, result / name, tokenizer) for name in FILES)
        result.replace(self.folder)
        shutil.rmtree(self.unfinished)
        return train, held_out


def _sizes(field: TextField, shard: Shard) -> np.ndarray:
    return np.array([*shard.documents(field)], np.uint64).reshape(-1, 2)


def _join(paths: list[Path], to: Path, tokenizer: Tokenizer) -> Sidecar:
    documents = text_bytes = 0
    with to.open("wb") as file:
        for path in paths:
            sidecar = Sidecar.read(path / f"{to.name}.json")
            documents, text_bytes = documents + sidecar.documents, text_bytes + sidecar.bytes
            if sidecar.tokens:
                opened = TokenFile.open(path / to.name, "")
                opened.scan(tokenizer.vocab_size)
                for chunk in opened.tokens_N.chunks():
                    file.write(chunk.data)
    if not to.stat().st_size:
        raise ValueError("too little text to hold out some for validation: add more")
    return write_sidecar(to, documents, text_bytes, tokenizer)


@contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    """Raises ValueError, naming `out`, if another process has the lock."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"--out {printable(out)}: another process prepares this folder") from None
        yield
    finally:
        os.close(lock)
