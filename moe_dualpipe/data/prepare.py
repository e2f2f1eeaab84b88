"""Encode text into a folder of token ids, once, instead of at the start of every run.

The documents are divided into parts (work_units.py), which several processes read and encode (engines.py). Their token
ids are written in order as they arrive, so the files do not depend on the number of processes. A journal says how far
they are valid: after a kill, the same call continues there.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, compress, repeat
from pathlib import Path
from typing import Any

import numpy as np

from ..messages import check_range, printable, unknown_name
from .documents import Documents
from .duplicates import find_duplicates
from .engines import Engine, InProcess, Processes, threads
from .files import DataFile
from .held_out import ContentHash, Split
from .journal import JOURNAL, Finished, Journal
from .progress import Progress
from .ray_engine import Ray
from .rows import RowError, TextField
from .split_writer import Encoder, SplitWriter
from .tasks import DIGEST_BYTES, Encode, Encoded, HashDocuments, Measure, Setup, pack, without
from .token_files import HELD_OUT_FILES, TRAIN_FILE, Sidecar, TokensOnDisk
from .tokenizer import BYTES, TOKENIZER_FILE, BPETokenizer, Tokenizer, digest, read_tokenizer
from .work_units import PART_BYTES, Blocks, Rows, SourceFile, WorkUnit, divide, has_known_size

FILES = (TRAIN_FILE, HELD_OUT_FILES[0])
HASHES = "hashes.bin"
SMALL = 2 * PART_BYTES  # less than this is encoded without starting processes
ENGINES = ("processes", "ray")


def prepare_data(
    sources: list[str], out: Path, tokenizer: str, vocab_size: int, field: str, *,
    workers: int | None = 1, engine: str = "processes", drop_duplicates: bool = False,
    progress: Progress | None = None, part_bytes: int = PART_BYTES,
) -> tuple[Tokenizer, list[Sidecar]]:  # fmt: skip
    """Encode the documents of `sources` into a new folder `out`, which appears only when it is complete.

    A file that is in several sources is encoded once. The files in `out` do not depend on `workers`. If an earlier call
    with the same arguments was killed, this one continues where it was; `workers` may differ.

    tokenizer: "bpe" (trained on the text, at most `vocab_size` tokens), "bytes", or the path of a tokenizer.json.
    workers: processes that encode, with one thread each; None for one per CPU core, of this machine or of the cluster.
    engine: "processes" on this machine, or "ray" for a cluster (ray_engine.py). With one process on this machine, or if
    the text is short, this process encodes it.
    drop_duplicates: of documents that are equal byte by byte, encode only the first.
    progress: is filled in. part_bytes: of text that a worker encodes at a time.

    Returns the tokenizer and the sidecars of train.bin and held_out.bin. Raises ValueError if a source is not text, and
    ChildProcessError if a worker is killed.
    """
    if not sources or "" in sources:
        raise ValueError('name at least one SOURCE of text: a file, a folder, a glob, or "stdlib"')
    check_range("--workers", 1 if workers is None else workers, 1)
    if engine not in ENGINES:
        raise unknown_name("--engine", engine, ENGINES)
    folder = Path(os.path.realpath(out))
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
    size = sum(status.size for documents in found for status in documents.files.values())
    with (
        _unfinished(folder, out) as unfinished,  # before the text is read, which may take hours
        closing(_start_engine(engine, workers, size)) as started,
    ):
        job = _Job(found, started, unfinished, progress or Progress(), part_bytes)
        chosen, sidecars = job.run(tokenizer, vocab_size, workers or os.cpu_count() or 1, drop_duplicates)
        (unfinished / JOURNAL).unlink(missing_ok=True)
        unfinished.replace(folder)
    return chosen, sidecars


def _start_engine(name: str, workers: int | None, size: int) -> Engine:
    """size: of the files, in bytes."""
    if size < SMALL or (name == "processes" and workers == 1):
        return InProcess()
    return Ray(workers) if name == "ray" else Processes(workers or os.cpu_count() or 1)


@contextmanager
def _unfinished(folder: Path, out: Path) -> Iterator[Path]:
    """Create a folder next to `folder`, and lock it. After an error it is removed, unless it has a journal.

    Raises ValueError, naming `out`, if that fails, or if another process has the lock.
    """
    path = folder.with_name(f".{folder.name}.unfinished")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ValueError(f"cannot write to --out {printable(out)}: {error.strerror}") from None
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"--out {printable(out)}: another process prepares this folder") from None
        try:
            if not (path / JOURNAL).exists():
                _empty(path)  # of a process that was killed
            yield path
        except BaseException:
            if not (path / JOURNAL).exists():
                shutil.rmtree(path, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _empty(folder: Path) -> None:
    for name in os.listdir(folder):
        (folder / name).unlink()


@dataclass
class _Job:
    """A call of `prepare_data`, after its arguments were checked."""

    found: list[Documents]
    engine: Engine
    folder: Path
    progress: Progress
    part_bytes: int

    def run(
        self, tokenizer: str, vocab_size: int, workers: int, drop_duplicates: bool
    ) -> tuple[Tokenizer, list[Sidecar]]:
        given = None if tokenizer == "bpe" else BYTES if tokenizer == "bytes" else read_tokenizer(Path(tokenizer))
        where = "the trained tokenizer" if given is None else printable(tokenizer)
        field = self.found[0].field
        for documents in self.found:
            if next(iter(documents), None) is None:
                raise documents.empty_error()
        entries = Finished.read(self.folder)
        tasks, dropped_N = [Encode(part) for part in self._divide(field)], np.zeros(0, bool)
        if drop_duplicates:
            tasks, dropped_N = self._without_duplicates(tasks, field)
            self.progress.duplicates = int(dropped_N.sum())
        kept = chain(~dropped_N, repeat(True))
        split = Split.of([compress(chain.from_iterable(map(_sizes, self.found)), kept)], shortest=1)
        # A trained tokenizer depends on all of the text, so then no file may change.
        source = digest(given) if given else ("bpe", vocab_size, _hash(tasks).hexdigest())
        options = (source, field.name, drop_duplicates, self.part_bytes, sorted(split.small.items()))
        job = hashlib.blake2b(repr(options).encode(), digest_size=16).hexdigest()
        fitting = (e for e in entries if e.job == job and e.files == _hash(tasks[: e.parts]).hexdigest())
        before = next(fitting, None)
        if before is None:
            _empty(self.folder)
        path = self.folder / TOKENIZER_FILE
        if given:
            chosen = given
        elif before:
            chosen = read_tokenizer(path)
        else:
            texts = (chunk.text for chunk in without(chain.from_iterable(self.found), dropped_N))
            with threads(workers):
                chosen = BPETokenizer.train(texts, vocab_size)
        path.write_bytes(chosen.to_json())
        setup = Setup(field, chosen.to_json(), where, split)
        start = Finished(job, files=_hash([]).hexdigest())
        journal = Journal(self.folder, entries[-1] if before else start)
        return chosen, self._write(tasks, setup, Encoder(chosen, split), before or start, journal)

    def _divide(self, field: TextField) -> list[WorkUnit]:
        files = [SourceFile(*file) for documents in self.found for file in documents.files.items()]
        unknown = [file for file in files if not has_known_size(file)]
        measured = self.engine.map(Setup(field), None, [Measure(file, self.part_bytes) for file in unknown])
        return list(divide(files, measured, self.part_bytes))

    def _without_duplicates(self, tasks: list[Encode], field: TextField) -> tuple[list[Encode], np.ndarray]:
        """The tasks without the documents that are equal to earlier ones, and for each document whether it is one."""
        hashing = [HashDocuments(task.part) for task in tasks]
        path, counts = self.folder / HASHES, []
        results = self.engine.map(Setup(field), None, hashing)
        with path.open("wb") as file, self.progress.bar("comparing", _disk_bytes(tasks)) as bar:
            for task, (result, _) in zip(tasks, _numbered(tasks, results), strict=True):
                file.write(result.digests)
                counts.append(len(result.digests) // DIGEST_BYTES)
                bar.update(task.part.disk_bytes)
        duplicate_N = find_duplicates(path)
        path.unlink()
        flags = np.split(duplicate_N, np.cumsum(counts)[:-1])
        # A long file is one document in several parts.
        dropped = {task.part.file for task, flag in zip(tasks, flags, strict=True)
                   if isinstance(task.part, Blocks) and flag.any()}  # fmt: skip
        kept = [
            Encode(task.part, b"" if isinstance(task.part, Blocks) else pack(flag))
            for task, flag in zip(tasks, flags, strict=True)
            if not (isinstance(task.part, Blocks) and task.part.file in dropped)
        ]
        return kept, duplicate_N

    def _write(
        self, tasks: list[Encode], setup: Setup, encoder: Encoder, before: Finished, journal: Journal
    ) -> list[Sidecar]:
        """Encode what is not finished, and write all that belongs to the token ids."""
        progress = self.progress
        progress.parts, progress.parts_before, progress.parts_done = len(tasks), before.parts, before.parts
        left, prefix = tasks[before.parts :], _hash(tasks[: before.parts])
        if len(tasks) > 1:
            journal.write(before)
        with ExitStack() as stack:
            writer = before.restore(encoder, self.folder, FILES)
            stack.enter_context(writer.train)
            stack.enter_context(writer.held_out)
            bar = stack.enter_context(progress.bar("encoding", _disk_bytes(tasks), _disk_bytes(tasks[: before.parts])))
            results = self.engine.map(setup, encoder.tokenizer, left)
            last, finished = tasks[before.parts - 1].part if before.parts else None, before
            for task, (result, rows) in zip(left, _numbered(left, results, before.rows, last), strict=True):
                if not _same_file(task.part, last):
                    journal.start_file(finished, writer)
                last = task.part
                progress.tokens += _append(writer, task.part, result, encoder.dtype)
                progress.parts_done += 1
                prefix.update(repr(task).encode())
                bar.set_postfix_str(f"{progress.tokens_per_second:,.0f} tokens/s", refresh=False)
                bar.update(task.part.disk_bytes)
                finished = Finished(before.job, progress.parts_done, prefix.hexdigest(), rows)
                if progress.parts_done < progress.parts:
                    journal.update(finished, writer)
        paths = [self.folder / name for name in FILES]
        counts = zip(paths, writer.documents, writer.text_bytes, strict=True)
        return [_write_sidecar(*each, encoder.tokenizer, encoder.dtype) for each in counts]


def _append(writer: SplitWriter, part: WorkUnit, encoded: Encoded, dtype: np.dtype) -> int:
    """Write the token ids of a part. Returns their number."""
    if isinstance(part, Blocks):
        writer.add_tokens(np.frombuffer(encoded.train, dtype), encoded.text_bytes[0])
        if encoded.ended is not None:
            writer.end_document(encoded.ended)
    else:
        writer.train.write(encoded.train)
        writer.held_out.write(encoded.held_out)
        writer.documents = [a + b for a, b in zip(writer.documents, encoded.documents, strict=True)]
        writer.text_bytes = [a + b for a, b in zip(writer.text_bytes, encoded.text_bytes, strict=True)]
    return (len(encoded.train) + len(encoded.held_out)) // dtype.itemsize + (encoded.ended is not None)


def _numbered(
    tasks: Iterable[Encode], results: Iterator[Any], rows: int = 0, last: WorkUnit | None = None
) -> Iterator[tuple[Any, int]]:
    """Yield each result and the number of rows of its file so far. The rows in errors are counted from the first one.

    last, rows: the part before the first one, and the rows of its file so far.
    """
    for task in tasks:
        if not _same_file(task.part, last):
            rows = 0
        last = task.part
        try:
            result = next(results)
        except RowError as error:
            raise error.moved(rows) from None
        rows += result.rows
        yield result, rows


def _same_file(part: WorkUnit, last: WorkUnit | None) -> bool:
    """Whether two parts belong to one file."""
    return isinstance(part, Rows | Blocks) and isinstance(last, Rows | Blocks) and part.file == last.file


def _sizes(documents: Documents) -> Iterator[tuple[int, int]]:
    """The hash and the bytes of each document."""
    content_hash, size = ContentHash(), 0
    for chunk in documents:
        content_hash.update(text := chunk.text.encode())
        size += len(text)
        if chunk.ends_document:
            yield content_hash.value(), size + 1
            content_hash, size = ContentHash(), 0


def _disk_bytes(tasks: Iterable[Encode]) -> int:
    return sum(task.part.disk_bytes for task in tasks)


def _hash(tasks: Iterable[Encode]) -> Any:
    """A hash of the parts, of what is left out, and of their files' names, sizes and times."""
    found = hashlib.blake2b(digest_size=16)
    for task in tasks:
        found.update(repr(task).encode())
    return found


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
