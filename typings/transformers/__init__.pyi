"""Everything is Any: to read the real package takes a type checker half a minute."""

from typing import Any

def __getattr__(name: str) -> Any: ...
