"""Find the files of a source, each of them once, even if links give it several names.

Links may lead to a folder or file that is found under another name, or back to a folder above. So files are told apart
by device and inode, and "**" visits each folder once. The search always ends, and its time does not depend on the
number of paths through the links.
"""

import errno
import fnmatch
import os
import stat
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..messages import printable
from .files import FileStatus, not_regular

STANDARD_LIBRARY = "stdlib"
Result = TypeVar("Result")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def find_files(source: str, name: str) -> tuple[dict[Path, FileStatus], tuple[str, ...]]:
    """Find a file, the files of a folder (recursively), those that match a glob, or those of "stdlib".

    Returns them, sorted by name, and why others were skipped: "path (reason)". Only regular files are found. Links are
    followed. Hidden files and folders are left out unless they are named.
    Raises ValueError, which starts with `name`, if there are none, or if `source` is a single file of another kind.
    """
    search, missing = _Search(), None
    try:
        if source == STANDARD_LIBRARY:
            root = Path(sysconfig.get_path("stdlib"))
            paths = [path for path in root.rglob("*.py") if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts)]
        elif stat.S_ISDIR(mode := os.stat(source).st_mode):
            paths = search.matches(Path(source), ("**", "*"))
        elif problem := not_regular(mode):
            raise ValueError(f"{name} is {problem}: name a regular file, a folder or a glob")
        else:
            paths = [Path(source)]
    except OSError as error:
        parts, missing = Path(source).parts, error
        ending = ("*",) if parts[-1:] == ("**",) else ()
        paths = search.matches(Path(), (*parts, *ending)) if any(map(_is_pattern, parts)) else []
    for path in paths:
        search.add(path)
    if missing and not search.found and not search.skipped:
        raise _not_found(source, name, missing)
    files = {path: status for _, path, status in sorted(search.found.values(), key=lambda file: file[1])}
    return files, tuple(f"{printable(path)} ({why})" for path, why in sorted(search.skipped.items()))


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

    def add(self, path: Path) -> None:
        """Add a regular file; skip other files. Of several names the first is taken, but not that of a link."""
        status = self._call(os.stat, path)
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

    def matches(self, folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
        """The paths below a folder that match the pattern with these parts; "**" is any number of folders."""
        if not parts:
            yield folder
            return
        part, *rest = parts
        if part == "**":
            paths = self._folders(folder)
        elif _is_pattern(part):
            names = (name for name in self._names(folder) if name.startswith(".") <= part.startswith("."))
            paths = (folder / name for name in names if fnmatch.fnmatchcase(name, part))
        else:
            paths = [folder / part]
        for path in paths:
            yield from self.matches(path, tuple(rest))

    def _folders(self, start: Path) -> Iterator[Path]:
        """A folder and those below it, each once: under the name of a link only if it has no other."""
        searched, later = set(), deque([start])
        while later:
            status = self._call(os.stat, folder := later.pop())
            if status is None or not stat.S_ISDIR(status.st_mode) or (status.st_dev, status.st_ino) in searched:
                continue
            searched.add((status.st_dev, status.st_ino))
            yield folder
            for path in (folder / name for name in self._names(folder) if not name.startswith(".")):
                (later.appendleft if path.is_symlink() else later.append)(path)

    def _names(self, folder: Path) -> list[str]:
        return sorted(self._call(os.listdir, folder) or (), reverse=True)  # the last one is searched first

    def _call(self, function: Callable[[Path], Result], path: Path) -> Result | None:
        """Skip what does not exist, or must not be read. Raises ValueError for other errors: the text is there."""
        try:
            return function(path)
        except PermissionError as error:
            self.skipped[path] = f"cannot read: {error.strerror}"
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise ValueError(f"cannot read {printable(path)}: {error.strerror}") from None
            self.skipped[path] = f"cannot read: {error.strerror}"
        return None


def _is_pattern(part: str) -> bool:
    return any(character in part for character in "*?[")
