"""Documents from files: find them, check that they are text, and read them.

Training on a binary or damaged file would give a useless model without an error, so every file is checked. Errors give
the file, the line and the problem. A file that the user names must be text. A folder or glob may contain other files,
such as images: they are skipped and reported. A file of rows may be larger than memory; a text file is one document.

Links may give a file several names: files are told apart by device and inode. Links to folders are not followed within
a folder or by "**", as they may lead in circles.

The `datasets` library downloads "hf:NAME" once, as .arrow files, which are then read like any others. In its streaming
mode, every rank would download the data again at every start, and a change of the data would go unnoticed.
"""

import os
import stat
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ..messages import printable, quoted
from .chats import Chat
from .files import DataFile, FileStatus
from .rows import KINDS, PLAIN, read_rows, row_format
from .strict_json import UTF_16, not_utf8

STANDARD_LIBRARY = "stdlib"
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_HUB, _WILD, NEWLINE = "hf:", {*"*?["}, b"\n"
_START = 1 << 16  # bytes; a binary file has a zero in them, and is not read to its end


class NotTextError(ValueError):
    """A file is not text, which is UTF-8 without zero bytes. The message gives the line and the reason."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents in the files of a source or of a shard, none of them empty. Each iteration reads the files again.

    field: the key of the text in rows. name: of the source in messages. skipped: files that are not text, each with the
    reason in parentheses.
    """

    files: tuple[tuple[Path, FileStatus], ...]
    field: str
    name: str = ""
    skipped: tuple[str, ...] = ()

    @classmethod
    def find(cls, source: str, field: str = "text", option: str = "--data ") -> "Documents":
        """Find the documents of a file, a folder (recursively), a glob, "stdlib", or a dataset "hf:NAME".

        option: of the source, in messages. Raises ValueError if nothing matches, or if `source` is a single file that
        is not text.
        """
        if not source:
            raise ValueError(f'{option}is empty: name a file, a folder, a glob, or "stdlib"')
        name = f"{option}{printable(source)}"
        is_dataset = source.startswith(_HUB) and not os.path.lexists(source)
        found, skipped = (_load_dataset(source, name), {}) if is_dataset else _find_files(source, name)
        # Empty files, and those of the kernel, have no documents; an empty table would be a damaged one.
        files = {path: status for path, status in found.items() if status.size}
        alone = [*files] == [Path(source)]
        problems = {path: problem for path in files if (problem := _problem_of(path, "" if alone else field))}
        if problems and alone:
            known = f"; other formats are {', '.join(KINDS)}" if Path(source).suffix else ""
            raise ValueError(f"{name} is not text: {problems[Path(source)]}{known}")
        kept = tuple((path, status) for path, status in files.items() if path not in problems)
        reasons = sorted((skipped | problems).items())
        return cls(kept, field, name, tuple(f"{printable(path)} ({reason})" for path, reason in reasons))

    def __iter__(self) -> Iterator[str | Chat]:
        """Raises ValueError, with file and row, for an invalid row, and if a file is damaged or has changed."""
        for path, status in self.files:
            with DataFile(path, status) as file:
                yield from filter(None, read_rows(file, self.field) if row_format(path) else [_read_text(file)])

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(status.size for _, status in self.files)

    def empty_error(self) -> ValueError:
        """The error for a source without any text."""
        return ValueError(f"no text in {self.name}: its files are empty or not text{self.describe_skipped()}")

    def describe_skipped(self) -> str:
        """The number of skipped files and the names of the first three, or "" if there are none."""
        if not self.skipped:
            return ""
        more = f", and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
        return f"; {len(self.skipped)} skipped as not text: {', '.join(self.skipped[:3])}{more}"


# ---- Files ----


def list_files(source: str) -> dict[Path, FileStatus]:
    """The regular files of a source; none if it cannot be read."""
    with suppress(ValueError):
        return _find_files(source, "")[0]
    return {}


def _find_files(source: str, name: str) -> tuple[dict[Path, FileStatus], dict[Path, str]]:
    """The regular files of a source, sorted by name, each once; and what is skipped, with the reason.

    Raises ValueError, which starts with `name`, if there is nothing, or if `source` is a single file of another kind.
    """
    found, skipped = dict[tuple[int, int], tuple[Path, FileStatus]](), dict[Path, str]()
    reason = "no such file or folder, and no file matches it as a glob"
    try:
        paths = sorted(_paths(source), key=lambda path: (path.is_symlink(), path))  # a file rather than a link to it
    except OSError as error:
        paths, reason = [], error.strerror
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            skipped[path] = f"cannot read: {error.strerror}"
            continue
        if not os.access(path, os.R_OK):
            skipped[path] = "cannot read: Permission denied"
        elif stat.S_ISREG(status.st_mode):
            found.setdefault((status.st_dev, status.st_ino), (path, FileStatus.of(status)))
        elif path.is_symlink() or not stat.S_ISDIR(status.st_mode):
            skipped[path] = "not a regular file"
    if not paths:
        hint = "; a weight must be a number, as in notes.jsonl=2" if "=" in source else ""
        raise ValueError(f"{name}: {reason}{hint}")
    if [*skipped] == [Path(source)]:
        raise ValueError(f"{name}: {skipped[Path(source)]}: name a file, a folder or a glob")
    return dict(sorted(found.values())), skipped


def _paths(source: str) -> Iterator[Path]:
    """The file that a source names, or all files and folders below a folder or matching a glob.

    Hidden files and folders are left out, unless the glob names hidden ones.
    """
    root, pattern = Path(source), "**/*"
    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        yield from (path for path in root.rglob("*.py") if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts))
        return
    if root.is_dir():
        yield root.resolve()
    else:
        if os.path.lexists(root):
            yield root
            return
        parts = root.parts
        wild = next((i for i, part in enumerate(parts) if not _WILD.isdisjoint(part)), len(parts))
        root, pattern = Path(*parts[:wild]), "/".join(parts[wild:])
        if not pattern:
            return
        pattern += "/*" * pattern.endswith("**")
    for path in root.glob(pattern):
        if "/." in f"/{pattern}" or not any(part.startswith(".") for part in path.relative_to(root).parts):
            yield path


def _problem_of(path: Path, field: str) -> str:
    """Why a file is not text; "" if it is.

    field: of .json, .csv and .tsv files, which may be other things than documents; "": they must be documents.
    """
    kind = row_format(path)
    try:
        with DataFile(path) as file:
            if not kind:
                _read_text(file)
            elif field and kind in PLAIN:
                next(read_rows(file, field), None)
    except NotTextError as error:
        return str(error)
    except ValueError:
        if not kind:
            raise
        return f"no documents with a field {quoted(field)}"
    return ""


def _read_text(file: DataFile) -> str:
    """The text of a UTF-8 file. Raises NotTextError, with the line number."""
    content = file.read(0, min(_START, file.size))
    if b"\0" not in content and len(content) < file.size:
        content = file.read(0, file.size)
    if (zero := content.find(b"\0")) >= 0 and not content.startswith(UTF_16):
        raise NotTextError(f"zero byte in line {1 + content.count(NEWLINE, 0, zero)}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content.count(NEWLINE, 0, error.start)
        raise NotTextError(f"line {line} is {not_utf8(error)}") from None
    file.check_unchanged()
    return text


# ---- Datasets ----


def _load_dataset(source: str, name: str) -> dict[Path, FileStatus]:
    """The .arrow files of hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, in the order of its rows.

    Raises ValueError, which starts with `name`, if the `datasets` library is missing or cannot load the dataset.
    """
    dataset, config, split, *others = [*source.removeprefix(_HUB).split(":"), "", ""]
    if not dataset or any(others) or not set("[+").isdisjoint(split):
        raise ValueError(f"{name}: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, with a whole split")
    try:
        library = import_module("datasets")
    except ImportError:
        raise ValueError(f"{name} needs the datasets library: pip install 'moe-dualpipe[data]'") from None
    try:
        loaded = library.load_dataset(dataset, config or None, split=split or "train")
        paths = [Path(file["filename"]) for file in loaded.cache_files]
        return {path: FileStatus.of(os.stat(path)) for path in paths}
    except Exception as error:  # of the library, of HTTP, of the loading script's format
        reason = printable(str(error).strip().partition("\n")[0] or type(error).__name__)
        raise ValueError(f"{name} cannot be loaded: {reason}") from None
