"""Find the files of a source, each of them once, even if links give it several names.

Links may lead to a folder or file that is found under another name, or back to a folder above. So files are told apart
by device and inode, and a folder is searched only once for the same remaining pattern. The search always ends, and
its time does not depend on the number of paths through the links.
"""

import errno
import fnmatch
import os
import stat
import sysconfig
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..messages import printable
from .files import FileStatus, not_regular

STANDARD_LIBRARY = "stdlib"
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_BELOW = ("**", "*")


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files that a source names, sorted by name, and why others were skipped: "path (reason)"."""

    files: dict[Path, FileStatus]
    skipped: tuple[str, ...] = ()


def find_files(source: str, name: str) -> FoundFiles:
    """Find a file, the files of a folder (recursively), those that match a glob, or those of "stdlib".

    Only regular files are found. Links are followed. Hidden files and folders are left out unless they are named.
    Raises ValueError, which starts with `name`, if there are none, or if `source` is a single file of another kind.
    """
    search = _Search()
    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        for path in root.rglob("*.py"):
            if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts):
                search.add(path)
        return search.result()
    try:
        status = os.stat(source)
    except OSError as error:
        search.glob(Path(source))
        if not search.found and not search.skipped:
            raise _not_found(source, name, error) from None
        return search.result()
    if stat.S_ISDIR(status.st_mode):
        search.below(Path(source), _BELOW)
    elif problem := not_regular(status.st_mode):
        raise ValueError(f"{name} is {problem}: name a regular file, a folder or a glob")
    else:
        search.add(Path(source))
    return search.result()


def _not_found(source: str, name: str, error: OSError) -> ValueError:
    if os.path.islink(source) and isinstance(error, FileNotFoundError):
        return ValueError(f"{name} is a link to a file that does not exist: {printable(os.readlink(source))}")
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return ValueError(f"{name}: {error.strerror}")
    hint = "; a weight must be a number, as in notes.jsonl=2" if "=" in source else ""
    return ValueError(f"{name}: no such file or folder, and no file matches it as a glob{hint}")


@dataclass(slots=True)
class _Search:
    found: dict[tuple[int, int], tuple[bool, Path, FileStatus]] = field(default_factory=dict)  # by device and inode
    skipped: dict[Path, str] = field(default_factory=dict)

    def result(self) -> FoundFiles:
        files = {path: status for _, path, status in sorted(self.found.values(), key=lambda file: file[1])}
        return FoundFiles(files, tuple(f"{printable(path)} ({why})" for path, why in sorted(self.skipped.items())))

    def add(self, path: Path) -> None:
        """Add a regular file; skip other files. Of several names the first is taken, but not that of a link."""
        status = self._status(path)
        if status is None:
            if path.is_symlink():  # else it was removed since its folder was read
                self.skipped.setdefault(path, "link to a missing file")
            return
        if stat.S_ISDIR(status.st_mode):
            return
        if problem := not_regular(status.st_mode):
            self.skipped[path] = problem
        elif not os.access(path, os.R_OK):
            self.skipped[path] = "cannot read: Permission denied"
        else:
            key, entry = (status.st_dev, status.st_ino), (path.is_symlink(), path, FileStatus.of(status))
            self.found[key] = min(self.found.get(key, entry), entry, key=lambda file: file[:2])

    def glob(self, pattern: Path) -> None:
        """Add the files that match a pattern, with "**" for any number of folders."""
        start = Path(pattern.anchor)
        parts = pattern.parts[1:] if pattern.anchor else pattern.parts
        if any(_is_pattern(part) for part in parts):
            self.below(start, (*parts, "*") if parts[-1] == "**" else parts)

    def below(self, start: Path, parts: tuple[str, ...]) -> None:
        """Add the files below `start` that match the pattern with these parts."""
        searched, later = set(), deque([(start, parts)])  # folders that are reached by links come later
        while later:
            now = [later.popleft()]
            while now:
                folder, rest = now.pop()
                status = self._status(folder)
                if status is None or (key := (status.st_dev, status.st_ino, rest)) in searched:
                    continue
                searched.add(key)
                for path, remaining in self._matches(folder, rest):
                    if not remaining:
                        self.add(path)
                    elif (below := self._status(path)) and stat.S_ISDIR(below.st_mode):
                        (later if path.is_symlink() else now).append((path, remaining))

    def _matches(self, folder: Path, parts: tuple[str, ...]) -> Iterator[tuple[Path, tuple[str, ...]]]:
        """The paths in `folder` that match the first part, each with the parts that its own files must match."""
        part, rest = parts[0], parts[1:]
        if part == "**":
            yield folder, rest
            yield from ((folder / name, parts) for name in self._names(folder) if not name.startswith("."))
        elif not _is_pattern(part):
            yield folder / part, rest
        else:
            hidden = part.startswith(".")
            for name in self._names(folder):
                if name.startswith(".") <= hidden and fnmatch.fnmatchcase(name, part):
                    yield folder / name, rest

    def _names(self, folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(folder), reverse=True)  # the last one is searched first
        except OSError as error:
            self._skip(folder, error)
            return []

    def _status(self, path: Path) -> os.stat_result | None:
        try:
            return os.stat(path)
        except OSError as error:
            self._skip(path, error)
            return None

    def _skip(self, path: Path, error: OSError) -> None:
        """Skip what does not exist, or must not be read. Raises ValueError for other errors: the text is there."""
        if isinstance(error, PermissionError) or error.errno == errno.ELOOP:
            self.skipped[path] = f"cannot read: {error.strerror}"
        elif not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise ValueError(f"cannot read {printable(path)}: {error.strerror}") from None


def _is_pattern(part: str) -> bool:
    return any(character in part for character in "*?[")
