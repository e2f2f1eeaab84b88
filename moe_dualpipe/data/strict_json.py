"""Read and write strict JSON. The files that are read may come from anyone.

Python's json accepts NaN and numbers of any length. If a key has two values, it takes the last. If lists are nested too
deep, it raises RecursionError, at a depth that depends on the version. Here, each of these is a ValueError with a
message of one line. Numbers that are not finite are written as null, because other parsers reject NaN.
"""

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..messages import describe, printable, quoted

MAX_DEPTH = 32
MAX_BYTES = 2**28  # five times the size of a tensors.json with a million tensors
_MAX_DIGITS = 40


def parse(text: str | bytes, allow_nan: bool = False) -> Any:
    """Return the value of a JSON text. Raises ValueError.

    allow_nan: also accept NaN and Infinity.
    """
    hooks: Any = {} if allow_nan else {"parse_float": _finite_float, "parse_constant": _refuse_constant}
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_int=_short_int, **hooks)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not text: {error.reason} at byte {error.start}") from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        lists = [item for item in level if isinstance(item, dict | list)]
        if not lists:
            return value
        level = [item for inside in lists for item in (inside.values() if isinstance(inside, dict) else inside)]
    raise _too_deep()


def read_file(path: Path, follow_links: bool = True) -> Any:
    """Return the value in a JSON file. Raises OSError, and ValueError with a message that does not name the file.

    follow_links: whether `path` may be a symbolic link.
    """
    check_regular(path, follow_links)
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    return parse(data)


def read_named(path: Path) -> Any:
    """Return the value in a JSON file. Raises ValueError, "cannot read PATH: ..."."""
    try:
        return read_file(path)
    except json.JSONDecodeError as error:
        reason = f"it is not JSON: {printable(error)}"
    except OSError as error:
        reason = printable(error.strerror or error)
    except ValueError as error:
        reason = describe(error)
    raise ValueError(f"cannot read {printable(path)}: {reason}")


def check_regular(path: Path, follow_links: bool = True) -> os.stat_result:
    """Return the status of a file. Raises OSError if it does not exist, and ValueError if it is not a regular file.

    Reading other kinds of file may block forever (a pipe) or never end (a device).
    """
    status = path.stat() if follow_links else path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise ValueError("it is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a file")
    return status


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


def _too_deep() -> ValueError:
    return ValueError(f"its objects and lists are nested more than {MAX_DEPTH} levels deep")


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has two values for {quoted(key, 60)}")
    return found


def _short_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _finite_float(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{printable(digits, 20)} is not a finite number")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a finite number")
