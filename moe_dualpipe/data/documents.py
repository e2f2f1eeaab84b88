"""Documents from files: check that they are text, and read them.

Training on a binary or broken file would give a useless model without an error, so every file is checked. Errors give
the file, the line and the problem. A file that the user names must be text. A folder or glob may contain other files,
such as images: they are skipped and reported. Files are read in blocks or lines, so they may be larger than memory.
"""

import codecs
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from ..messages import printable, quoted
from .files import DataFile, FileStatus
from .find import find_files

BLOCK_BYTES = 1 << 20  # read and encode long files in blocks of this size
JSONL, NEWLINE = ".jsonl", b"\n"


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Part of a document, in whole lines; a line longer than a block is split."""

    text: str
    ends_document: bool


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of one source, none of them empty. Each iteration reads the files again.

    name: of the source in messages. skipped: files that are not text, each with the reason in parentheses.
    """

    name: str
    files: dict[Path, FileStatus]
    field: str = "text"
    num_empty: int = 0
    skipped: tuple[str, ...] = ()

    @classmethod
    def find(cls, source: str, field: str = "text", option: str = "--data ") -> "Documents":
        """Find the documents of a file, a folder (recursively), a glob, or "stdlib".

        Raises ValueError if nothing matches, or if `source` is a single file that is not text.
        """
        name = f"{option}{printable(source)}"
        found = find_files(source, name)
        # Not read: files of size 0, because those of the kernel, as in /proc, may never end.
        files = {path: status for path, status in found.files.items() if status.size}
        problems = {path: problem for path in files if path.suffix != JSONL and (problem := _problem(path))}
        if problems and [*files] == [Path(source)]:
            raise ValueError(f"{name} is not text: {problems[Path(source)]}")
        skipped = (*found.skipped, *(f"{printable(path)} ({problem})" for path, problem in problems.items()))
        kept = {path: status for path, status in files.items() if path not in problems}
        return cls(name, kept, field, len(found.files) - len(files), tuple(sorted(skipped)))

    def __iter__(self) -> Iterator[TextChunk]:
        """Raises ValueError, with file and line, for an invalid line of a .jsonl file, and if a file has changed."""
        for path, status in self.files.items():
            with DataFile(path, status) as file:
                yield from _read_jsonl(file, self.field) if path.suffix == JSONL else _read_text(file)

    @property
    def unit(self) -> str:
        """What a document is: "file" or "document"."""
        return "document" if any(path.suffix == JSONL for path in self.files) else "file"

    def shared_with(self, others: "Iterable[Documents]") -> set[Path]:
        """The files that are also in one of `others`, under any name."""
        theirs = {(status.device, status.inode) for other in others for status in other.files.values()}
        return {path for path, status in self.files.items() if (status.device, status.inode) in theirs}

    def without(self, files: Collection[Path]) -> "Documents":
        """These documents without some files."""
        return replace(self, files={path: status for path, status in self.files.items() if path not in files})

    def empty_error(self) -> ValueError:
        """The error for a source without any text."""
        count = len(self.files) + self.num_empty + len(self.skipped)
        what = "the file is" if count == 1 else f"all {count} files are"
        return ValueError(f"no text in {self.name}: {what} empty or not text{self.describe_skipped(': ')}")

    def describe_skipped(self, separator: str = "; ") -> str:
        """The number of skipped files and the names of the first three, or "" if there are none."""
        if not self.skipped:
            return ""
        more = f", and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
        return f"{separator}{len(self.skipped)} skipped as not text: {', '.join(self.skipped[:3])}{more}"


def _blocks(file: DataFile) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines; a line longer than a block is split."""
    rest = b""
    for first in range(0, file.size, BLOCK_BYTES):
        block = file.read(first, min(BLOCK_BYTES, file.size - first))
        cut = block.rfind(NEWLINE) + 1
        if cut or len(rest) >= BLOCK_BYTES:
            yield rest + block[:cut]
            rest = b""
        rest += block[cut:]
    if rest:
        yield rest
    file.check_unchanged()


def _lines(file: DataFile) -> Iterator[bytes]:
    """Yield the lines of any length, without their ends."""
    parts: list[bytes] = []
    for block in _blocks(file):
        first, *others = block.split(NEWLINE)
        parts.append(first)
        for line in others:
            yield b"".join(parts)
            parts = [line]
    yield b"".join(parts)


def _problem(path: Path) -> str:
    """Why a file is not text (UTF-8 without zero bytes), with the line number; "" if it is text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    with DataFile(path) as file:
        for block in chain(_blocks(file), [b""]):
            if (zero := block.find(b"\0")) >= 0:
                return f"zero byte in line {line + block[:zero].count(NEWLINE)}"
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return f"not UTF-8 in line {line + error.object[: error.start].count(NEWLINE)}: {error.reason}"
            line += block.count(NEWLINE)
    return ""


def _read_text(file: DataFile) -> Iterator[TextChunk]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = ""
    for block in _blocks(file):
        if before:
            yield TextChunk(before, ends_document=False)
        before = decoder.decode(block)
    if before := before + decoder.decode(b"", final=True):
        yield TextChunk(before, ends_document=True)


def _read_jsonl(file: DataFile, field: str) -> Iterator[TextChunk]:
    for number, line in enumerate(_lines(file), 1):
        try:
            text = _field(line, field) if line.strip() else ""
        except ValueError as error:
            raise ValueError(f"{printable(file.path)}:{number}: {error}") from None
        if text:
            yield TextChunk(text, ends_document=True)


def _field(line: bytes, field: str) -> str:
    """The text of one .jsonl line. Raises ValueError; the caller adds file and line."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {printable(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {_kind(value)}")
    if field not in value:
        found = ", ".join(quoted(key, 50) for key in list(value)[:5]) or "none"
        raise ValueError(f"no field {quoted(field)}; its fields are {found}: choose one with --data-field")
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f"field {quoted(field)} must be a string, got {_kind(text)}")
    if "\0" in text:
        raise ValueError(f"field {quoted(field)} contains a zero character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"field {quoted(field)} has an unpaired surrogate at character {error.start}") from None
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
