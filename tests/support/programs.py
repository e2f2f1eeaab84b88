"""Programs of examples/, run in this process with other constants."""

import re
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, **constants: str) -> dict[str, Any]:
    """Run examples/`name` with expressions in place of those of some lines `CONSTANTS = ...`. Returns its globals."""
    text = (EXAMPLES / name).read_text()
    for left, right in constants.items():
        lines = re.findall(rf"^{re.escape(left)} = .*$", text, re.MULTILINE)
        assert len(lines) == 1, f"{name} has {len(lines)} lines {left} = ..."
        text = text.replace(lines[0], f"{left} = {right}")
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), variables)
    return variables
