"""Packages whose exports are imported on first use: reading options, or showing help, then needs no torch.

An `__init__.py` imports its exports inside `if TYPE_CHECKING:`, where editors and type checkers find them, and ends in
`__getattr__ = on_first_use(__name__)`. An export must not have the name of a submodule: once imported, the submodule
would hide it.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def on_first_use(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package`: it imports a name as the `if TYPE_CHECKING:` of its `__init__.py` does."""

    def find(name: str) -> Any:
        if name not in sys.modules[package].__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = _origins(package)[name]
        value = getattr(import_module(module, package), attribute)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    return find


@cache
def _origins(package: str) -> dict[str, tuple[str, str]]:
    """The module, relative to `package`, and the attribute of each name that its `__init__.py` imports."""
    statements = ast.walk(ast.parse(inspect.getsource(sys.modules[package])))
    return {
        alias.asname or alias.name: ("." * node.level + (node.module or ""), alias.name)
        for node in statements
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
