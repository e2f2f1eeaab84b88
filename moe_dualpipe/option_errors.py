"""Errors of tyro, which parses the command lines, as messages of one line."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import groupby


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Inside this context, tyro raises ValueError with a message of one line; otherwise it prints a box and exits."""
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            yield
    except SystemExit as exit_:
        if not exit_.code:  # after --help
            raise
        raise ValueError(_one_line(errors.getvalue())) from None


def _one_line(box: str) -> str:
    """The text in the box, without frame, colours, help texts of flags, and the last paragraph, which names --help."""
    lines = [line.strip("│").rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()[1:-1]]
    paragraphs = ["\n".join(group) for text, group in groupby(lines, lambda line: bool(line.strip("─- "))) if text]
    shown = [text for text in paragraphs[:-1] if not text.startswith(" Argument helptext:")] or paragraphs
    flags = (re.sub(r"(\n {5}-.*)(\n {9}.*)+", r"\1", text) for text in shown)  # flags are indented, help texts more
    message = ". ".join(" ".join(text.split()) for text in flags).removeprefix("Error parsing model: ")
    return re.sub("^Expected one of", "Missing subcommand: expected one of", message)
