"""Encode text into a folder of token ids, once, instead of at the start of every run.

A pool of processes writes shards (shards.py) into a folder beside the result, and this process joins them, in order. So
the result does not depend on the number of processes, and after a kill or an error the same call finds the shards that
are finished. It needs twice the disk space of the result for a while; in return, training reads two plain files.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ..messages import check_range, printable
from .documents import Documents
from .encode import split_lines
from .pool import run_in_processes
from .shards import Shard, ShardWriter, divide, join
from .token_files import Sidecar
from .tokenizer import BYTES, TOKENIZER_FILE, BPETokenizer, Tokenizer, read_tokenizer

SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare_data` wrote.

    sidecars: of train.bin and held_out.bin. shards, finished_before: all, and those that an earlier call had finished.
    """

    tokenizer: Tokenizer
    sidecars: tuple[Sidecar, Sidecar]
    shards: int
    finished_before: int


def prepare_data(
    sources: list[str], out: Path, tokenizer: str, vocab_size: int, field: str, *,
    workers: int = 1, show: bool = False,
) -> Prepared:  # fmt: skip
    """Encode the documents of `sources` into a new folder `out`, which appears only when it is complete.

    The files in `out` do not depend on `workers`. If an earlier call with the same arguments was killed or failed, the
    shards that it finished are not encoded again.

    tokenizer: "bpe" (trained on the text, at most `vocab_size` tokens), "bytes", or the path of a tokenizer.json.
    workers: processes that encode, with one thread each. One file of rows is encoded by one process, and by more
    threads if there are less files than workers.
    show: a bar on standard error if that is a terminal; after an error, where the finished shards are.

    Raises ValueError if a source is not text or `out` is not a new folder, and ChildProcessError if a worker is killed.
    """
    check_range("--workers", workers, 1)
    if not sources or "" in sources:
        raise ValueError('name at least one SOURCE of text: a file, a folder, a glob, or "stdlib"')
    with _locked(out) as unfinished:
        try:
            folder = Path(os.path.realpath(out))
            if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
                raise ValueError(f"--out {printable(out)} already exists and is not empty: choose another folder")
            return _prepare(sources, folder, tokenizer, vocab_size, field, workers, show)
        except BaseException:
            if not any(unfinished.rglob("*.npz")):  # of a shard
                shutil.rmtree(unfinished, ignore_errors=True)
            elif show:
                message = f"finished shards are in {printable(unfinished)}: the same command uses them"
                print(message, file=sys.stderr)
            raise


def open_shards(
    sources: list[str], out: Path, tokenizer: Tokenizer, field: str = "text"
) -> tuple[ShardWriter, list[Shard]]:
    """For programs whose workers write the shards of `out` on other machines: what writes them, and the shards.

    Each worker calls `write` for some of the shards. Then `prepare_data` with the same arguments joins them. Raises
    ValueError if a source is not text, or if `out` cannot be written.
    """
    return ShardWriter(_unfinished(out) / SHARDS, tokenizer, field), divide(_find(sources, field))


def _find(sources: list[str], field: str) -> list[Documents]:
    return [Documents.find(source, field, option="") for source in sources]


def _prepare(
    sources: list[str], out: Path, tokenizer: str, vocab_size: int, field: str, workers: int, show: bool
) -> Prepared:
    found, unfinished = _find(sources, field), _unfinished(out)
    given = None if tokenizer == "bpe" else BYTES if tokenizer == "bytes" else read_tokenizer(Path(tokenizer))
    for documents in found:
        if next(iter(documents), None) is None:
            raise documents.empty_error()
    shards = divide(found)
    pieces = (piece for shard in shards for text in shard.documents(field) for piece, _ in split_lines(text))
    chosen = given or BPETokenizer.train(pieces, vocab_size)
    writer = ShardWriter(unfinished / SHARDS, chosen, field)
    paths = [writer.path(shard) for shard in shards]
    left = [shard for shard, path in zip(shards, paths, strict=True) if not path.exists()]
    size, hidden = sum(shard.size for shard in left), None if show else True
    with tqdm(desc="encoding", total=size, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
        for shard, _ in zip(left, run_in_processes(writer.write, left, workers), strict=True):
            bar.update(shard.size)
    result = unfinished / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    (result / TOKENIZER_FILE).write_bytes(chosen.to_json())
    sidecars = join(paths, result, chosen)
    result.replace(out)
    shutil.rmtree(unfinished)
    return Prepared(chosen, sidecars, len(paths), len(paths) - len(left))


@contextmanager
def _locked(out: Path) -> Iterator[Path]:
    """The folder of the shards of `out`, for one process at a time."""
    unfinished = _unfinished(out)
    lock = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"--out {printable(out)}: another process prepares this folder") from None
        yield unfinished
    finally:
        os.close(lock)


def _unfinished(out: Path) -> Path:
    """Make the folder where the shards of `out` are until it is complete. Raises ValueError."""
    folder = Path(os.path.realpath(out))
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        (unfinished / SHARDS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to --out {printable(out)}: {error.strerror}") from None
    return unfinished
