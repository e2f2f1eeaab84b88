"""Text from files and command lines, as messages show it.

A file may come from anyone. In a message, a newline in a name would look like a second message, an escape sequence
could change the terminal, and a long value would hide the rest. So messages never repeat such text unchanged.
"""

import os
from collections.abc import Callable


def printable(value: object, limit: int = 200) -> str:
    r"""Return `str(value)` on one line: at most `limit` characters, then "…", and unprintable ones escaped.

    Newlines, control and format characters (such as those that reverse the direction of text) and lone surrogates
    become "\n", "\x1b", "\u202e", "\udc80". Raises nothing, whatever the value.
    """
    return _shown(str, value, limit)


def quoted(value: object, limit: int = 200) -> str:
    """Like `printable`, but of `repr(value)`: strings are in quotes."""
    return _shown(repr, value, limit)


def describe(error: BaseException) -> str:
    """Return the message of `error` on one line; for a file that cannot be read or written, its name and the reason."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{printable(os.fsdecode(error.filename))}: {printable(error.strerror)}"
    return printable(error, limit=4000)


def _shown(convert: Callable[[object], str], value: object, limit: int) -> str:
    try:
        text = convert(value)
    except (RecursionError, ValueError):  # a list that is nested too deep, or a number that is too long
        text = f"<unprintable {type(value).__name__}>"
    short = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return short + "…" * (len(text) > limit)
