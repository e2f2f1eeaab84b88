"""Options that several commands share. They have the names that train.py gives them."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from ..data import strict_json
from ..messages import LARGEST, check_range, nearest, with_suggestions, without_suggestions

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class DeviceOption:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu, cuda, or auto: a GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    json: bool = False
    """Print JSON instead."""

    def show(self, value: Any, text: str) -> None:
        """Print `value` as JSON with --json, otherwise `text`."""
        print(strict_json.write(value, indent=1) if self.json else text, flush=True)


def check_together(options: Any, names: Sequence[str], check: Callable[[Any], _T]) -> _T:
    """`check(options)`. Instead of its own, its ValueError gets suggestions that work.

    They are the nearest value of each of these fields with which alone `check` works, of those that the message names
    or else of all.
    """

    def works(name: str, number: int) -> bool:
        with suppress(ValueError):
            check(replace(options, **{name: number}))
            return True
        return False

    def ways(flags: Mapping[str, str]) -> list[str]:
        near = ((flag, nearest(getattr(options, name), 4096, partial(works, name))) for name, flag in flags.items())
        return [f"{flag} {number}" for flag, number in near if number]

    try:
        return check(options)
    except ValueError as error:
        problem = without_suggestions(str(error))
        flags = {name: f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None}
        found = ways({name: flag for name, flag in flags.items() if f"{flag} " in problem}) or ways(flags)
        if not found and not re.search("[:;] use \\d", str(error)):  # what it suggests is not a number
            raise
        raise ValueError(with_suggestions(problem, found)) from None


def check_ranges(options: Any, low: float, *names: str, high: float = LARGEST) -> None:
    """Raise ValueError unless these fields of `options` are in the range; None is valid."""
    for name in names:
        if (value := getattr(options, name)) is not None:
            check_range(f"--{name.replace('_', '-')}", value, low, high)
