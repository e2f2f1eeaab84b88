"""Invalid options end a process with one line and exit code 2."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ..health.program import program_name
from ..health.report import report_error
from ..messages import describe


@contextmanager
def exit_on_invalid_option(
    announce: bool, *kinds: type[Exception], full_traceback: bool = False
) -> Iterator[None]:  # fmt: skip
    """In this context, errors of these kinds end the process with code 2. announce: print them, on one line.

    full_traceback: also print the traceback of an error whose cause is one in a user's layer.
    """
    try:
        yield
    except kinds as error:
        if announce:
            if full_traceback and error.__cause__ is not None:
                report_error("".join(traceback.format_exception(error)))
            report_error(f"{program_name()}: error: {describe(error)}\n")
        raise SystemExit(2) from None
