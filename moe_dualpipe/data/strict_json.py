"""Read and write strict JSON. The files that are read may come from anyone.

msgspec reads it: unlike Python's json, it refuses NaN and infinities. Here, each error is a ValueError with a one-line
message. Numbers that are not finite are written as null, because other parsers reject NaN.
"""

import json
import math
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ..messages import printable, quoted
from .files import DataFile, FileError

UTF_16 = BOM_UTF16_LE, BOM_UTF16_BE
_MOST_NESTED = 200
MAX_BYTES = 2**28  # five times the size of a tensors.json with a million tensors


def parse(text: str | bytes, allow_nan: bool = False) -> Any:
    """Return the value of a JSON text. Raises ValueError.

    allow_nan: also accept NaN and Infinity, which only Python's json does.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode()) if allow_nan else msgspec.json.decode(text)
        _check_depth(value)
        return value
    except msgspec.DecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos :].strip()
        where, what = quoted(rest, 40) if rest else "its end", error.msg.removesuffix(" at")
        raise ValueError(f"it is not JSON: {what}, at {where}") from None
    except RecursionError:
        raise ValueError("its objects and lists are nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is {not_utf8(error)}") from None


def not_utf8(error: UnicodeDecodeError) -> str:
    """The message for bytes that are not UTF-8. Latin-1 is the most common encoding without a mark of its own."""
    encoding = "utf-16" if error.object.startswith(UTF_16) else "latin1"
    return f"not UTF-8: {error.reason}; convert it, as in iconv -f {encoding} -t utf-8 OLD > NEW"


def _check_depth(value: Any) -> None:
    """Raise RecursionError for objects and lists that functions cannot recurse into. How deep those can depends on
    the version of Python."""
    level = [value]
    for _ in range(_MOST_NESTED):
        inside = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [item for items in inside for item in items]
        if not level:
            return
    raise RecursionError


def read_bytes(path: Path, follow_links: bool = True) -> bytes:
    """Return the content of a small file. Raises FileError.

    follow_links: whether `path` may be a symbolic link.
    """
    with DataFile(path, follow_links=follow_links) as file:
        if file.size > MAX_BYTES:
            raise FileError(f"cannot read {printable(path)}: it has more than {MAX_BYTES:,} bytes")
        return bytes(file.read(0, file.size))


def read_text(path: Path) -> str:
    """Return the text of a small file in UTF-8. Raises ValueError, "cannot read PATH: ..."."""
    with reading(path):
        return read_bytes(path).decode()


def read_texts(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Read those of the named files that exist in the folder: name -> text. Errors: as in `read_text`."""
    return {name: read_text(folder / name) for name in names if (folder / name).is_file()}


def parse_one(texts: Mapping[str, str], name: str) -> dict[str, Any]:
    """The object in the JSON file `name` among texts by file name, which may have NaN; {} without such an object."""
    found = parse(texts.get(name, "{}"), allow_nan=True)
    return found if isinstance(found, dict) else {}


def read_file(path: Path, follow_links: bool = True) -> Any:
    """Return the value in a JSON file. Raises FileError, and ValueError with a message that does not name the file."""
    return parse(read_bytes(path, follow_links))


def read_named(path: Path, kind: Any = Any) -> Any:
    """Return the value in a JSON file. Raises ValueError, "cannot read PATH: ...".

    kind: the type that it must have; dicts become dataclasses.
    """
    with reading(path):
        return msgspec.convert(read_file(path), kind)


def read_if_there(path: Path, kind: Any = Any) -> Any:
    """`read_named`, or None without such a file."""
    return read_named(path, kind) if path.is_file() else None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors of reading an invalid file into ValueError("cannot read {path}: ...")."""
    try:
        yield
    except FileError:  # which says so
        raise
    except OSError as error:
        raise ValueError(f"cannot read {printable(path)}: {error.strerror or type(error).__name__}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else printable(error)
        raise ValueError(f"cannot read {printable(path)}: {reason}") from None


def write(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with null for NaN and infinities. options: of json.dumps."""
    return json.dumps(finite(value), allow_nan=False, **options)


def finite(value: Any) -> Any:
    """Return a copy of nested dicts and lists, with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
