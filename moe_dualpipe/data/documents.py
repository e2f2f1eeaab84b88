"""Documents from files: find them, check that they are text, read them.

Training on a binary or broken file would give a useless model without an error, so every file is checked. Errors give
the file, the line and the problem. A file that the user names must be text. A folder or glob may contain other files,
such as images: they are skipped and reported. Files are read in blocks or lines, so they may be larger than memory.
"""

import codecs
import glob
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = 20  # one document in 20 is held out for validation; of fewer documents, the last 1/20 of the tokens
BLOCK_BYTES = 1 << 20  # read and encode long files in blocks of this size
JSONL, NEWLINE = ".jsonl", b"\n"


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Part of a document, in whole lines; a line longer than a block is split."""

    text: str
    ends_document: bool


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of one source, none of them empty. Each iteration reads the files again."""

    source: str
    files: tuple[Path, ...]
    field: str = "text"
    skipped: tuple[str, ...] = ()  # files that are not text, each with the reason in parentheses

    @classmethod
    def find(cls, source: str, field: str = "text") -> "Documents":
        """Find the documents of a file, a folder (recursively), a glob, or "stdlib".

        Raises ValueError if nothing matches, or if `source` is a single file that is not text.
        """
        paths = _find(source)
        problems = {path: problem for path in paths if path.suffix != JSONL and (problem := _problem(path))}
        if problems and paths == [Path(source)]:
            raise ValueError(f"--data {source} is not text: {problems[paths[0]]}")
        skipped = tuple(f"{path} ({problem})" for path, problem in problems.items())
        return cls(source, tuple(path for path in paths if path not in problems), field, skipped)

    def __iter__(self) -> Iterator[TextChunk]:
        """Raises ValueError, with file and line, for an invalid line of a .jsonl file."""
        for path in self.files:
            yield from _read_jsonl(path, self.field) if path.suffix == JSONL else _read_text(path)

    def empty_error(self) -> ValueError:
        """The error for a source without any text."""
        count, skipped = len(self.files) + len(self.skipped), self.describe_skipped(": ")
        return ValueError(f"no text in --data {self.source}: all {count} files are empty or not text{skipped}")

    def describe_skipped(self, separator: str = "; ") -> str:
        """The number of skipped files and the names of the first three, or "" if there are none."""
        if not self.skipped:
            return ""
        more = f", and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
        return f"{separator}{len(self.skipped)} skipped as not text: {', '.join(self.skipped[:3])}{more}"


def is_held_out(document: int, num_documents: int) -> bool:
    """Whether document number `document` is held out. If there are few documents, no whole document is held out."""
    return num_documents >= HELD_OUT and document % HELD_OUT == HELD_OUT // 2


def held_out_tail(num_tokens: int, seq_len: int = 0) -> int:
    """Number of tokens to hold out at the end of a few documents: at least one sequence, at most half of the tokens."""
    return max(num_tokens // HELD_OUT, min(seq_len + 1, num_tokens // 2))


def _find(source: str) -> list[Path]:
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        return sorted(p for p in root.rglob("*.py") if skipped.isdisjoint(p.relative_to(root).parts))
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        below = (p for p in path.rglob("*") if p.is_file())
        return sorted(p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts))
    found = sorted(Path(match) for match in glob.glob(source, recursive=True) if Path(match).is_file())
    if not found:
        hint = "; a weight must be a number, as in notes.jsonl=2" if "=" in source else ""
        raise ValueError(f"--data {source}: no such file or folder, and no file matches it as a glob{hint}")
    return found


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines; a line longer than a block is split."""
    try:
        with path.open("rb") as file:
            rest = b""
            while block := file.read(BLOCK_BYTES):
                cut = block.rfind(NEWLINE) + 1
                if cut or len(rest) >= BLOCK_BYTES:
                    yield rest + block[:cut]
                    rest = b""
                rest += block[cut:]
            if rest:
                yield rest
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _problem(path: Path) -> str:
    """Why a file is not text (UTF-8 without zero bytes), with the line number; "" if it is text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    for block in (*_blocks(path), b""):
        if (zero := block.find(b"\0")) >= 0:
            return f"zero byte in line {line + block[:zero].count(NEWLINE)}"
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            return f"not UTF-8 in line {line + error.object[: error.start].count(NEWLINE)}: {error.reason}"
        line += block.count(NEWLINE)
    return ""


def _read_text(path: Path) -> Iterator[TextChunk]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = ""
    for block in _blocks(path):
        if before:
            yield TextChunk(before, ends_document=False)
        before = decoder.decode(block)
    if before := before + decoder.decode(b"", final=True):
        yield TextChunk(before, ends_document=True)


def _read_jsonl(path: Path, field: str) -> Iterator[TextChunk]:
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):  # noqa: B007 - the error below gives the number
                if line.strip() and (text := _field(line, field)):
                    yield TextChunk(text, ends_document=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}:{number}: {error}") from None


def _field(line: bytes, field: str) -> str:
    """The text of one .jsonl line. Raises ValueError; the caller adds file and line."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {_kind(value)}")
    if field not in value:
        found = ", ".join(map(repr, list(value)[:5])) or "none"
        raise ValueError(f"no field {field!r}; its fields are {found}: choose one with --data-field")
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} must be a string, got {_kind(text)}")
    if "\0" in text:
        raise ValueError(f"field {field!r} contains a zero character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"field {field!r} has an unpaired surrogate at character {error.start}") from None
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
