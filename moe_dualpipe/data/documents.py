"""Documents from files: what to read, and where it is broken.

A model learns whatever it is fed, so nothing that is not text may pass for it: every defect has a name, a file and a
line. A file that was asked for by name must be right; of a folder or a pattern, which also find pictures, files that
are no text are left out, and named. Files are read in pieces, twice (to check, then to use), so none has to fit into
memory.
"""

import codecs
import glob
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = 20  # one document in so many is kept for validation, or that share of the text where there are fewer
PIECE = 1 << 20  # bytes of a long file that are encoded at once
JSONL = ".jsonl"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text, whole lines of a document unless they are very long; `last` says that its document ends there."""

    text: str
    last: bool


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a source, read anew whenever they are iterated; none of them is empty."""

    source: str
    files: tuple[Path, ...]
    field: str = "text"
    skipped: tuple[str, ...] = ()
    """Files that are not text, each with the reason."""

    @classmethod
    def find(cls, source: str, field: str = "text") -> "Documents":
        """The documents of a file, a folder (all files below it), a glob, or "stdlib".

        Raises ValueError when there is nothing there, or a file that is asked for by its name is not text.
        """
        paths = _find(source)
        problems = {path: problem for path in paths if path.suffix != JSONL and (problem := _problem(path))}
        if problems and paths == [Path(source)]:
            raise ValueError(f"--data {source} is not text: {problems[paths[0]]}")
        skipped = tuple(f"{path} ({problem})" for path, problem in problems.items())
        return cls(source, tuple(path for path in paths if path not in problems), field, skipped)

    def __iter__(self) -> Iterator[Piece]:
        """Raises ValueError, with file and line, for a line of a .jsonl that holds no text."""
        for path in self.files:
            yield from _objects(path, self.field) if path.suffix == JSONL else _text(path)

    @property
    def unit(self) -> str:
        """What a document is."""
        return "documents" if any(path.suffix == JSONL for path in self.files) else "files"

    def nothing(self) -> ValueError:
        """The error for a source in which there is no text at all."""
        count = len(self.files) + len(self.skipped)
        return ValueError(f"no text in --data {self.source}: {count} files, all empty or not text{self.left_out(': ')}")

    def left_out(self, before: str = "; ") -> str:
        """How many files are not text, and the first few of them."""
        if not self.skipped:
            return ""
        more = f", and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
        return f"{before}{len(self.skipped)} left out as not text: {', '.join(self.skipped[:3])}{more}"


def is_held_out(document: int, num_documents: int) -> bool:
    """Whether a document is kept for validation; with few documents none is, but the end of the text."""
    return num_documents >= HELD_OUT and document % HELD_OUT == HELD_OUT // 2


def held_out_tail(num_tokens: int, seq_len: int = 0) -> int:
    """How many tokens at the end of a text of few documents are kept: at least a sequence, if that leaves half."""
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
        hint = "; a weight is a number, as in notes.jsonl=2" if "=" in source else ""
        raise ValueError(f"--data {source}: no such file or folder, and no file matches it as a pattern{hint}")
    return found


def _blocks(path: Path) -> Iterator[bytes]:
    """The file, in blocks that end with a line unless that is longer than a block."""
    try:
        with path.open("rb") as file:
            rest = b""
            while block := file.read(PIECE):
                cut = block.rfind(b"\n") + 1
                if cut or len(rest) >= PIECE:
                    yield rest + block[:cut]
                    rest = b""
                rest += block[cut:]
            if rest:
                yield rest
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _problem(path: Path) -> str:
    """Why the file is not text, with the line; "" if it is: UTF-8 without zero bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    for block in (*_blocks(path), b""):
        if (zero := block.find(b"\0")) >= 0:
            line += block.count(b"\n", 0, zero)
            return f"a zero byte in line {line}"
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
            return f"not UTF-8 in line {line}: {error.reason}"
        line += block.count(b"\n")
    return ""


def _text(path: Path) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = ""
    for block in _blocks(path):
        if before:
            yield Piece(before, last=False)
        before = decoder.decode(block)
    if before := before + decoder.decode(b"", final=True):
        yield Piece(before, last=True)


def _objects(path: Path, field: str) -> Iterator[Piece]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = _field(line, field) if line.strip() else ""
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
                if text:
                    yield Piece(text, last=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _field(line: bytes, field: str) -> str:
    """The text of one line. Raises ValueError, without the place."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"not an object but {_kind(value)}")
    if field not in value:
        has = ", ".join(map(repr, list(value)[:5])) or "nothing"
        raise ValueError(f"no field {field!r}: it has {has}; choose with --data-field")
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is not a string but {_kind(text)}")
    if "\0" in text:
        raise ValueError(f"a zero character in field {field!r}, which no text has")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair in field {field!r}, at character {error.start}") from None
    return text


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
