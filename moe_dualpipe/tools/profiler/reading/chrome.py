"""The events of a Chrome trace, one by one from the stream of its text, and the values before and behind them.

A trace can be larger than memory, incomplete, and damaged. So events are decoded one at a time; those that the analysis
never needs, such as Python functions, are passed over without being decoded; a damaged event is repaired or skipped
(damaged.py), and reading goes on with the next one.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....messages import quoted
from ..trace import Trace, TraceError
from .damaged import (
    INVALID_BYTE,
    NOT_AN_OBJECT,
    STRAY,
    Mended,
    end_of_list,
    mend,
    next_event,
    without_invalid_bytes,
)

MOST_EVENTS = 4_000_000
"""Later events are not read. So many events need 2 to 3 GB."""
WANTED = "name a trace of torch.profiler (.json, .json.gz) or an export of Nsight Systems (.sqlite)"
LONGEST_EVENT = 1 << 24
LONGEST_HEADER = 1 << 22

_SPACE = re.compile(r"[\s,]*")
_OPENING = re.compile(r'"traceEvents"\s*:\s*\[')
_NO_END = re.compile(r"\]\s*,\s*\{")

_TEXT = r'"[^"\\\x00-\x1f]*+"'
_PLAIN = rf"(?:{_TEXT}|[-+.\w]++)"
_FLAT_LIST = rf"\[(?:\s*+{_PLAIN}(?:\s*+,\s*+{_PLAIN})*+)?+\s*+\]"
_FLAT_OBJECT = rf"\{{(?:\s*+{_TEXT}\s*+:\s*+{_PLAIN}(?:\s*+,\s*+{_TEXT}\s*+:\s*+(?:{_PLAIN}|{_FLAT_LIST}))*+)?+\s*+\}}"
_FIELDS = rf"(?:\s*+,\s*+{_TEXT}\s*+:\s*+(?:{_PLAIN}|{_FLAT_OBJECT}))*+\s*+\}}(?=\s*+[,\]])"
_UNNEEDED = re.compile(
    r'\{\s*+"ph"\s*+:\s*+"(?:'
    r'[sft]"'  # arrows
    r'|X"\s*+,\s*+"cat"\s*+:\s*+"python_function"\s*+,\s*+"name"\s*+:\s*+"(?!nn\.Module: )[^"\\\x00-\x1f]*+"'
    r'|X"\s*+,\s*+"cat"\s*+:\s*+"(?:gpu_user_annotation|overhead|Trace)"'
    rf"){_FIELDS}"
    rf'|\{{\s*+"name"\s*+:\s*+{_TEXT}\s*+,\s*+"ph"\s*+:\s*+"M"{_FIELDS}'
)
"""A well-formed event that nothing is read from."""


class ChromeEvents:
    """Iterate over the objects of the list "traceEvents", or of a file that is a list.

    Counts events in the trace: all of them, the skipped and the repaired ones. Raises TraceError.
    """

    def __init__(self, pieces: Iterator[str], path: Path, trace: Trace):
        self.outside: list[str] = []
        """The text before the list and the text behind it, each as an object. What is too long is left out."""
        self._pieces, self._path, self._trace = pieces, path, trace
        self._text, self._at = "", 0
        self._has_invalid_bytes = self._ended = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._open()
        decode, trace = json.JSONDecoder().raw_decode, self._trace
        while not self._ended:
            self._pass_over()
            if self._at_end():
                return
            start = self._at
            try:
                event, self._at = decode(self._text, start)
            except ValueError as error:  # not RecursionError
                event = self._repaired(error)
            else:
                if not isinstance(event, dict):
                    event = self._not_an_object(event)
                elif self._has_invalid_bytes and INVALID_BYTE.search(self._text, start, self._at):
                    event = self._counted(without_invalid_bytes(event))
                trace.num_events += 1
            if event is not None:
                yield event

    def _pass_over(self) -> None:
        """Go to the next event that can be needed."""
        text, at, passed = self._text, self._at, 0
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        while unneeded := _UNNEEDED.match(text, at):
            at = _SPACE.match(text, unneeded.end()).end()  # type: ignore[union-attr]
            passed += 1
        self._at = at
        self._trace.num_events += passed

    def _at_end(self) -> bool:
        """Whether the list, or what is read of it, ends here."""
        if self._text.startswith("]", self._at) and not _NO_END.match(self._text, self._at):
            self._close()
            return True
        if self._trace.num_events >= MOST_EVENTS and (self._at < len(self._text) or self._read()):
            self._trace.truncated = not self._text[self._at :].lstrip(" \t\r\n,").startswith("]")
            return True
        return False

    def _repaired(self, error: ValueError) -> dict[str, Any] | None:
        """Read a damaged event and go behind it; if the event is not complete in the text, read more text."""
        text, start = self._text, self._at
        end = next_event(text, start + 1)
        if end is None:
            if len(text) - start > LONGEST_EVENT:
                what = error.msg if isinstance(error, json.JSONDecodeError) else "a number with too many digits"
                raise TraceError(f"{self._path}: not a trace: {what} in event {self._trace.num_events}") from None
            if self._read():
                return None
            end = end_of_list(text, start)
        if end is None:
            self._trace.truncated = self._ended = True
            return None
        self._at = end
        damaged = text[start:end].strip(" \t\r\n,]}")
        if not damaged.startswith("{"):
            self._trace.repaired[STRAY] += 1
            return None
        self._trace.num_events += 1
        found = mend(text[start:end].rstrip(" \t\r\n,"))
        if found.event is not None and INVALID_BYTE.search(damaged):
            found = without_invalid_bytes(found.event)
        return self._counted(found)

    def _counted(self, found: Mended) -> dict[str, Any] | None:
        (self._trace.skipped if found.event is None else self._trace.repaired)[found.damage] += 1
        return found.event

    def _not_an_object(self, value: object) -> None:
        if not self._trace.num_events:
            raise TraceError(f"{self._path}: not a trace: event 0 is {quoted(value, 40)}, not an object")
        self._trace.skipped[NOT_AN_OBJECT] += 1

    def _read(self) -> bool:
        """Read more text, and forget that before the present event."""
        if not (more := next(self._pieces, "")):
            return False
        self._text, self._at = self._text[self._at :] + more, 0
        self._has_invalid_bytes = not self._text.isascii() and INVALID_BYTE.search(self._text) is not None
        return True

    def _open(self) -> None:
        """Go to the first event."""
        self._text = text = next(self._pieces, "").lstrip()
        if not text.startswith(("[", "{")):
            raise TraceError(f"{self._path}: not a trace: {self._problem(text)}: {WANTED}")
        header = ""
        while not (opening := re.match(r"\[", text) or _OPENING.search(text)):
            if not (more := next(self._pieces, "")):
                raise TraceError(f'{self._path}: not a trace: it has no list "traceEvents": {WANTED}')
            header = (header + text[:-100])[:LONGEST_HEADER]
            text = text[-100:] + more
        if len(header) < LONGEST_HEADER:
            self.outside.append(f"{header}{text[: opening.start()]}".rstrip(" \t\r\n,") + "}")
        self._text = text[opening.end() :]
        self._has_invalid_bytes = INVALID_BYTE.search(self._text) is not None

    def _problem(self, text: str) -> str:
        if INVALID_BYTE.search(text):
            return "neither text nor gzip"
        if text:
            return f"it begins with {text[:20]!r}, not with an object or a list"
        return "it is cut off before its first event" if self._path.stat().st_size else "the file is empty"

    def _close(self) -> None:
        """Read the text behind the list."""
        footer = self._text[self._at + 1 :]
        while len(footer) < LONGEST_HEADER and (more := next(self._pieces, "")):
            footer += more
        if len(footer) < LONGEST_HEADER:
            self.outside.append("{" + footer.lstrip(" \t\r\n,"))
