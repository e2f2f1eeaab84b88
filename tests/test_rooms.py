"""The wings and rooms of the package, and which may import which: arrows point down, so there are no circles."""

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_dualpipe"
CORE = {
    "schedule": set(),
    "kernels": set(),
    "overlap": {"kernels"},
    "expert_parallel": {"kernels", "overlap"},
    "runtime": {"schedule", "kernels", "overlap", "expert_parallel"},
    "models": {"kernels", "overlap", "expert_parallel"},
    "pipeline": {"schedule", "kernels", "overlap", "expert_parallel", "runtime", "models"},
}
APP = {
    "data": {*CORE},
    "health": {*CORE},
    "inference": {*CORE, "data", "checkpoint"},
    "checkpoint": {*CORE, "data"},
    "integrations": {*CORE, "checkpoint", "inference"},
    "training": {*CORE, "data", "checkpoint", "health", "inference", "integrations"},
}
TOOLS = {
    "tools/drawing": {*CORE, *APP},
    "tools/planner": {*CORE, *APP, "tools/drawing"},
    "tools/profiler": {*CORE, *APP, "tools/drawing"},
    "tools/cluster": {*CORE, *APP, "tools/drawing"},
    "tools/checks": {*CORE, *APP},
}
ALLOWED = {**CORE, **APP, **TOOLS, "commands": {*CORE, *APP, *TOOLS}}
"""The rooms that the modules of a room may import, besides messages.py and errors.py."""


def room_of(module: str) -> str:
    """Example: "moe_dualpipe.tools.planner.peak" -> "tools/planner"; "" outside of the rooms."""
    parts = module.split(".")[1:]
    room = "/".join(parts[: 2 if parts[:1] == ["tools"] else 1])
    return room if room in ALLOWED else ""


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """The modules of the package that a file imports, anywhere in it, absolutely or relatively."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(ROOT).with_suffix("").parts[: -node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("moe_dualpipe.")}


def test_every_room_is_listed():
    folders = [*PACKAGE.iterdir(), *(PACKAGE / "tools").iterdir()]
    rooms = {path.relative_to(PACKAGE).as_posix() for path in folders if (path / "__init__.py").exists()}
    assert rooms - {"tools"} == {*ALLOWED}


def test_there_is_no_circle_of_rooms():
    TopologicalSorter(ALLOWED).prepare()  # raises CycleError


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_is_below_it(room):
    for path in (PACKAGE / room).rglob("*.py"):
        above = {room_of(name) for name in imported_modules(path)} - ALLOWED[room] - {room, ""}
        assert not above, f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(above))}"


@pytest.mark.parametrize("room", ALLOWED)
def test_there_is_no_circle_of_modules(room):
    """Within a room, imports for type checkers included."""
    files = {}
    for path in (PACKAGE / room).rglob("*.py"):
        if path.name != "__init__.py":
            files[".".join(("moe_dualpipe", *path.relative_to(PACKAGE).with_suffix("").parts))] = path
    TopologicalSorter({name: imported_modules(path) & {*files} - {name} for name, path in files.items()}).prepare()
