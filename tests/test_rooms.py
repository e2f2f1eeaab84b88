"""The rooms of the package, and which of them may import which: arrows point down, so there are no circles."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_dualpipe"
ALLOWED = {
    "schedule": set(),
    "kernels": set(),
    "integrations": {"kernels", "checkpoint", "inference"},
    "overlap": {"kernels"},
    "expert_parallel": {"kernels", "overlap"},
    "runtime": {"schedule", "kernels", "overlap", "expert_parallel"},
    "models": {"kernels", "overlap", "expert_parallel"},
    "storage": set(),
    "data": {"storage"},
    "planner": {"schedule", "expert_parallel", "runtime", "models"},
    "checkpoint": {"expert_parallel", "runtime", "models", "storage", "data"},
    "health": {"schedule", "overlap", "runtime"},
    "cluster": {"runtime"},
    "calibration": {"kernels", "planner"},
    "inference": {"schedule", "runtime", "models"},
    "profiler": {"schedule", "overlap", "expert_parallel", "runtime", "models"},
    "drawing": {"schedule", "overlap", "profiler", "planner", "cluster"},
    "training": {
        *("schedule", "kernels", "overlap", "expert_parallel", "runtime", "models", "storage", "data", "planner"),
        *("checkpoint",),
        *("health", "inference", "profiler", "drawing"),
    },
}
ALLOWED["testing"] = {*ALLOWED}
ALLOWED["commands"] = {*ALLOWED}


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a module imports, anywhere in it, absolutely or relatively."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(ROOT).with_suffix("").parts[: -node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        found |= {name.split(".")[1] for name in names if name.startswith("moe_dualpipe.")}
    return found & {*ALLOWED}


def test_every_room_is_listed():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == {*ALLOWED}


def test_there_is_no_circle():
    """Rooms can be taken away one by one, each when all that it imports are gone."""
    left = dict(ALLOWED)
    while left:
        lowest = [room for room, below in left.items() if not below & {*left}]
        assert lowest, f"a circle among {sorted(left)}"
        for room in lowest:
            del left[room]


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_is_below_it(room):
    for path in (PACKAGE / room).rglob("*.py"):
        above = imported_rooms(path) - ALLOWED[room] - {room}
        assert not above, f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(above))}"
