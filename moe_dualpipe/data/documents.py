"""Documents from files: check that they are text, and read them.

Training on a binary or damaged file would give a useless model without an error, so every file is checked. Errors give
the file, the line and the problem. A file that the user names must be text. A folder or glob may contain other files,
such as images: they are skipped and reported. A file of rows may be larger than memory; a text file is one document.

The `datasets` library downloads "hf:NAME" once, as .arrow files, which are then read like any others. In its streaming
mode, every rank would download the data again at every start, and a change of the data would go unnoticed.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from ..messages import printable
from .files import DataFile, FileStatus
from .find import find_files
from .rows import FORMATS, TextField, read_rows, row_format
from .text_files import NotTextError, read_text

_HUB = "hf:"


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of one source, none of them empty. Each iteration reads the files again.

    name: of the source in messages. skipped: files that are not text, each with the reason in parentheses.
    """

    name: str
    files: dict[Path, FileStatus]
    field: TextField
    skipped: tuple[str, ...] = ()

    @classmethod
    def find(cls, source: str, field: str = "text", option: str = "--data ") -> "Documents":
        """Find the documents of a file, a folder (recursively), a glob, "stdlib", or a dataset "hf:NAME".

        option: of the source, in messages. Raises ValueError if nothing matches, or if `source` is a single file that
        is not text.
        """
        name = f"{option}{printable(source)}"
        is_dataset = source.startswith(_HUB) and not os.path.lexists(source)
        found, skipped = (_load_dataset(source, name), ()) if is_dataset else find_files(source, name)
        # Not read: files of size 0, because those of the kernel, as in /proc, may never end.
        files = {path: status for path, status in found.items() if status.size}
        problems = {path: problem for path in files if not row_format(path) and (problem := _problem_of(path))}
        if problems and [*files] == [Path(source)]:
            known = f"; other formats are {', '.join(FORMATS)}" if Path(source).suffix else ""
            raise ValueError(f"{name} is not text: {problems[Path(source)]}{known}")
        skipped = (*skipped, *(f"{printable(path)} ({problem})" for path, problem in problems.items()))
        kept = {path: status for path, status in files.items() if path not in problems}
        text_field = TextField(field) if option else TextField(field, "--field")
        return cls(name, kept, text_field, tuple(sorted(skipped)))

    def __iter__(self) -> Iterator[str]:
        """Raises ValueError, with file and number, for an invalid row, and if a file is damaged or has changed."""
        for path, status in self.files.items():
            yield from read_document(path, status, self.field)

    def without(self, others: "Iterable[Documents]") -> "Documents":
        """These documents without the files that are also in one of `others`, under any name."""
        theirs = {(status.device, status.inode) for other in others for status in other.files.values()}
        own = {path: status for path, status in self.files.items() if (status.device, status.inode) not in theirs}
        return replace(self, files=own)

    def empty_error(self) -> ValueError:
        """The error for a source without any text."""
        return ValueError(f"no text in {self.name}: its files are empty or not text{self.describe_skipped()}")

    def describe_skipped(self) -> str:
        """The number of skipped files and the names of the first three, or "" if there are none."""
        if not self.skipped:
            return ""
        more = f", and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
        return f"; {len(self.skipped)} skipped as not text: {', '.join(self.skipped[:3])}{more}"


def read_document(path: Path, status: FileStatus, field: TextField) -> Iterator[str]:
    """Read the documents of a file. Raises ValueError, with file and row, as `read_rows` and `DataFile`."""
    with DataFile(path, status) as file:
        yield from filter(None, read_rows(file, field) if row_format(path) else ["".join(read_text(file))])


def _problem_of(path: Path) -> str:
    """Why a file is not text; "" if it is."""
    try:
        with DataFile(path) as file:
            deque(read_text(file), maxlen=0)
    except NotTextError as error:
        return str(error)
    return ""


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
