"""Errors of tyro, which parses the command lines, as messages of one line."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import groupby

from .messages import unknown_name


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
    """The text in the box, without frame, colours, help texts of flags, and the reference to --help.

    Only a terminal with UTF-8 gets a frame. Other output is indented like the text inside the frame.
    """
    lines = re.sub(r"\x1b\[[\d;]*m", "", box).replace("\n│", "\n ").splitlines()[1:]  # without the title
    lines = [line.rstrip("│╰─╯ ") for line in lines]
    paragraphs = ["\n".join(group) for text, group in groupby(lines, lambda line: bool(line.strip("- "))) if text]
    shown = [text for text in paragraphs if not text.startswith(("  Argument helptext", "  For full helptext"))]
    flags = (re.sub(r"(\n {6}-.*)(\n {10}.*)+", r"\1", text) for text in shown)  # flags are indented, help texts more
    message = ". ".join(" ".join(text.split()) for text in flags).removeprefix("Error parsing model: ")
    if found := re.fullmatch(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)\.", message):
        value, option, names = found.groups()
        return str(unknown_name(option, value, re.findall(r"'([^']*)'", names)))
    # The value of an option that also takes None fails for each type: show the last error.
    message = re.sub(r"no type matching .* Got errors: .* - <class '\w+'>: ", "", message)
    return re.sub("^Expected one of", "Missing subcommand: expected one of", message)
