"""Text from files and command lines, as messages show it.

A file may come from anyone. In a message, a newline in a name would look like a second message, an escape sequence
could change the terminal, and a long value would hide the rest. So messages never repeat such text unchanged.
"""

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

_SHOWN_AS: dict[str, str] = {}
_SECRET = re.compile(
    r"(?<=://)[^\s/]*:\S*(?=@)"  # user:password, which may have a slash
    r"|(?<=http://)[^\s/]+(?=@)|(?<=https://)[^\s/]+(?=@)"  # a token alone; abfss:// has the container there
    r"|(?<=[?&])([\w-]*(?:sig|token|secret|passw|key|credential)[\w-]*=)[^\s&#'\")]*",
    re.IGNORECASE,
)


def show_as(folder: str, name: str) -> None:
    """From now on, messages show paths in the local `folder`, which stands for something else, under `name`."""
    _SHOWN_AS[folder] = name


def with_shown_names(text: str) -> str:
    """`text` with the names from `show_as`, and without the passwords and signatures of URLs."""
    text = _SECRET.sub(lambda found: f"{found[1] or ''}***", text)
    for folder, name in _SHOWN_AS.items():
        text = text.replace(folder, name)
    return text


def printable(value: object, limit: int = 200) -> str:
    r"""Return `str(value)` on one line: at most `limit` characters, then "…", and unprintable ones escaped.

    Newlines, control and format characters (such as those that reverse the direction of text) and lone surrogates
    become "\n", "\x1b", "\u202e", "\udc80". Raises nothing, whatever the value.
    """
    return _shown(str, value, limit)


def quoted(value: object, limit: int = 200) -> str:
    """Like `printable`, but of `repr(value)`: strings are in quotes."""
    return _shown(repr, value, limit)


def typed_text(word: str) -> str:
    """`word` of a command line as UTF-8 text. In an ASCII locale, Python keeps its other bytes as surrogates."""
    return word.encode(errors="surrogateescape").decode(errors="replace")


def describe(error: BaseException) -> str:
    """Return the message of `error` on one line; for a file that cannot be read or written, its name and the reason."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{printable(os.fsdecode(error.filename))}: {printable(error.strerror)}"
    return printable(error, limit=4000)


def unknown_name(kind: str, name: str, names: Sequence[str], aliases: Mapping[str, str] | None = None) -> ValueError:
    """Return the error for a `name` that is not in `names`. It suggests a similar one, if there is one.

    aliases: other names of some `names`, which are only suggested.
    """
    meant, given = {**{known: known for known in names}, **(aliases or {})}, name.lower()[:100]
    longer = [known for known in meant if len(given) > 1 and known.startswith(given)]
    near = [*longer, *difflib.get_close_matches(given, meant, n=1)]
    suggestion = f"; did you mean {meant[near[0]]!r}? Choose" if near else "; choose"
    return ValueError(f"unknown {kind} {quoted(name, 60)}{suggestion} from: {', '.join(names)}")


def with_suggestions(problem: str, ways: Sequence[str]) -> str:
    """`problem`, and what to use instead: options as they are typed, such as "--pp 2", each of which works alone.

    Example: "--ep 2 does not divide 1 process: use --ep 1, or 2 processes".
    """
    return f"{problem}{';' if ': ' in problem else ':'} use {', or '.join(ways)}" if ways else problem


def without_suggestions(message: str) -> str:
    """The message of an error without what it suggests to use, for a caller that knows what works."""
    return re.split("[:;] use ", message)[0]


def nearest(value: int, most: int, works: Callable[[int], bool]) -> int | None:
    """The number nearest to `value` that `works`, at least 1 and at most `most` away; None if there is none."""
    near = (number for away in range(1, most + 1) for number in (value + away, value - away) if number > 0)
    return next(filter(works, near), None)


LARGEST = 2**31 - 1
"""The largest valid count or size."""


WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
"""How messages name the types of values."""


class Rule(NamedTuple):
    """What cannot be. applies: whether it is so. message: one line with the values and a way out."""

    applies: object
    message: str


def refuse(rules: Iterable[Rule]) -> None:
    """Raise ValueError with the message of the first rule that applies."""
    for rule in rules:
        if rule.applies:
            raise ValueError(rule.message)


def check_range(name: str, value: float, low: float, high: float = LARGEST, hint: str = "") -> None:
    """Raise ValueError, "NAME must be at least LOW: got VALUE" or "at most HIGH", unless `low <= value <= high`."""
    if not low <= value <= high:
        bound = f"at most {_number(high)}" if value > high else f"at least {_number(low)}"
        raise ValueError(f"{name} must be {bound}: got {printable(value, 60)}{hint}")


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Return a text such as "1 rank", "2 ranks" or, with the ending "es", "1,000 micro-batches"."""
    return f"{number:,} {noun}{ending if number != 1 else ''}"


def list_ranks(ranks: Sequence[int]) -> str:
    """Return a text such as "rank 3" or "ranks 0, 2, 5"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """A key for sorting in which gpu-9 comes before gpu-10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def shell_word(word: str) -> str:
    """`word` quoted for a shell, on one line."""
    return printable(shlex.quote(word), 1000)


def _shown(convert: Callable[[object], str], value: object, limit: int) -> str:
    try:
        text = with_shown_names(convert(value))
    except Exception:  # a list that is nested too deep, a number that is too long, a broken __str__
        text = f"<unprintable {type(value).__name__}>"
    short = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return short + "…" * (len(text) > limit)
