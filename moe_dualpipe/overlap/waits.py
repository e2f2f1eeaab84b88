"""Marks the functions that wait for other ranks: the report of a hanging run tells waiting from computing."""

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_marked: set[CodeType] = set()


def waits_for_ranks(function: Function) -> Function:
    """A decorator: a rank that executes `function`, or what it calls, waits for other ranks."""
    _marked.add(function.__code__)
    return function


def is_marked(code: CodeType) -> bool:
    return code in _marked


@waits_for_ranks
def wait_for_all(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
