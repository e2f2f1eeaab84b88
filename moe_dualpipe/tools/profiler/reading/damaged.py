r"""Find the end of a damaged event in a Chrome trace, and read what can be read of it.

Versions of PyTorch and kineto write events that are not JSON. Nothing is guessed: an event is used if its name,
category, thread and times are certain, otherwise it is skipped.

    damage                          example                            the event is
    control characters in strings   "a<newline>b"                      used
    invalid escapes                 "C:\Users"                         used, with the backslash
    decimal commas                  "dur": 12,5                        used, as 12.5
    inf or nan                      "dur": inf  "bandwidth": inf       skipped if it is a time, otherwise used
    invalid UTF-8                   "name": "\xff"                     skipped, unless only in its arguments
    anything else                   {"ph": "X", "na                    skipped

Sources: pytorch/pytorch issues 130622, 136180 and 191032, pytorch/kineto issues 105 and 336.
"""

import json
import re
from typing import Any, NamedTuple

CUT, STRAY = "incomplete or not JSON", "stray characters between events"
INVALID_UTF8, NOT_AN_OBJECT = "invalid UTF-8", "not an object"

_STRING = r'"(?:[^"\\]|\\.)*+"'
_NOT_FINITE = re.compile(rf"{_STRING}|-?\b(?:inf(?:inity)?|nan(?:\([^)]*\))?|1\.#\w+)", re.IGNORECASE | re.DOTALL)
_DECIMAL_COMMA = re.compile(rf"{_STRING}|(:\s*-?\d+),(?=\d+(?:e[-+]?\d+)?\s*[,}}])", re.IGNORECASE | re.DOTALL)
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
INVALID_BYTE = re.compile("[\udc80-\udcff]")
_START = re.compile(r'\{\s*"(?:ph|cat|name|args|ts|dur|pid|tid|bp|s)"\s*:')
_END = re.compile(r'\}(?=\s*\]\s*(?:,\s*"|\}|$))')
_LIST_END = re.compile(
    r'\](?=\s*(?:\}\s*$|,\s*"(?:traceName|displayTimeUnit|baseTimeNanoseconds|distributedInfo)"\s*:))'
)
_LENIENT = json.JSONDecoder(strict=False)


class Mended(NamedTuple):
    """A damaged event."""

    event: dict[str, Any] | None
    """Its fields; None if it is skipped."""
    damage: str


def mend(text: str) -> Mended:
    """Read the damaged event in `text`, which starts with its opening brace."""
    if (event := _decoded(text)) is not None:
        return Mended(event, "control characters")
    for damage, repair in _REPAIRS.items():
        if (repaired := repair(text)) != text:
            text = repaired
            if (event := _decoded(text)) is not None:
                return Mended(event if _has_times(event) else None, damage)
    return Mended(None, CUT)


def without_invalid_bytes(event: dict[str, Any]) -> Mended:
    """An event that has invalid UTF-8 somewhere: only that in its arguments does no harm."""
    rest = {key: value for key, value in event.items() if key != "args"}
    return Mended(None if INVALID_BYTE.search(json.dumps(rest, ensure_ascii=False)) else event, INVALID_UTF8)


def next_event(text: str, at: int) -> int | None:
    """Return where the next event after position `at` starts, if it is in `text`.

    An object in the arguments of an event can look like an event. But it has no "ph", and stands behind a colon or a
    bracket.
    """
    for start in _START.finditer(text, at):
        if text[at : start.start()].rstrip()[-1:] in (":", "["):
            continue
        try:
            event = _LENIENT.raw_decode(text, start.start())[0]
        except ValueError:
            return start.start()
        if "ph" in event:
            return start.start()
    return None


def end_of_list(text: str, at: int) -> int | None:
    """Return where the last event, which starts at `at` and is damaged, ends; None if the list has no end."""
    ends = [found.end() for found in _END.finditer(text, at)]
    if not ends:
        # an event without its end: what follows the list tells a damaged event from a file that is cut off
        found = next(_LIST_END.finditer(text, at), None)
        own = found is not None and text.count("[", at, found.start()) > text.count("]", at, found.start())
        return None if found is None or own else found.start()
    return next((end for end in ends if mend(text[at:end]).event), ends[0])


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        event, end = _LENIENT.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and not text[end:].strip(" \t\r\n,") else None


def _has_times(event: dict[str, Any]) -> bool:
    return all(event.get(key, 0) == event.get(key, 0) for key in ("ts", "dur"))


def _escaped(found: re.Match[str]) -> str:
    return "\\\\" if found[0] == "\\" else found[0]


def _as_nan(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else "NaN"


def _as_point(found: re.Match[str]) -> str:
    return f"{found[1]}." if found[1] else found[0]


_REPAIRS = {
    "invalid escapes": lambda text: _ESCAPE.sub(_escaped, text),
    "inf or nan": lambda text: _NOT_FINITE.sub(_as_nan, text),
    "decimal commas": lambda text: _DECIMAL_COMMA.sub(_as_point, text),
}
