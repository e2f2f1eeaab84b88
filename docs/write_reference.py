"""Write docs/reference.md: the options of train.py, keys of JSON files, and what the profiler knows, from the code.

PYTHONPATH=. python docs/write_reference.py
"""

import re
from collections.abc import Iterable
from pathlib import Path

from moe_dualpipe.command_line import fields_of, shown
from moe_dualpipe.tools.profiler.analyze import COMPUTED, Analysis, Phase
from moe_dualpipe.tools.profiler.communication import LIBRARIES
from moe_dualpipe.tools.profiler.doctor.verdict import CAUSES
from moe_dualpipe.training.metrics import FIELDS
from moe_dualpipe.training.options import FLAGS, Key, sections

PAGE = Path(__file__).with_name("reference.md")
HEAD = """\
# Reference

This page is generated from the code by `python docs/write_reference.py`. The options of other commands are in their
`--help`, and the Python API is in [api/](api/index.md).

## Options of train.py

`--set KEY=VALUE` sets any key, and a TOML file has the keys in tables named after their sections. A flag sets the same
key. `none` leaves a value unset. [Training](training.md#options) explains the precedence.
"""


def escape(cell: str) -> str:
    """Outside of code, as Markdown shows it; in code, only what would end the cell."""
    return cell if cell.startswith("`") else re.sub(r"([|*_<\\])", r"\\\1", cell)


def code(text: str) -> str:
    return f"`{text}`"


def table(titles: str, rows: Iterable[tuple[str, ...]]) -> str:
    names = titles.split(" | ")
    lines = [names, ["---"] * len(names), *([escape(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def option_row(key: Key) -> tuple[str, ...]:
    flag = next((f"`--{flag}`" for flag, name in FLAGS.items() if name == key.name), "")
    default = "none" if key.default is None else shown(key.default) if key.default != () else ""
    values = f" One of: {', '.join(key.choices)}." if key.choices else ""
    return code(key.name), flag, f"`{default}`" if default else "", key.text + values


def page() -> str:
    parts = [HEAD]
    for section, keys in sections().items():
        parts += [
            f"### {section or 'Without a section'}\n",
            table("key | flag | default | meaning", map(option_row, keys)),
        ]
    parts += [
        "## Fields of metrics.jsonl\n",
        table("field | meaning", ((code(name), text) for name, text in FIELDS.items())),
    ]
    parts += [
        "## Keys of a report in JSON\n",
        "What `profile analyze --json` prints: an object for one device, or a list of them. Times in microseconds.\n",
    ]
    computed = [(name, getattr(Analysis, name).__doc__) for name in COMPUTED]
    for title, found in (
        ("key", [*((name, text) for name, _, _, text in fields_of(Analysis)), *computed]),
        ("key of a phase", [(name, text) for name, _, _, text in fields_of(Phase)]),
    ):
        parts.append(table(f"{title} | meaning", ((code(name), text) for name, text in found)))
    parts += [
        "## Causes of lost time\n",
        "What `profile analyze` may name, and what it then advises. After a slash: a variant.\n",
        table("cause | what happens | what to change", ((code(name), *row[:2]) for name, row in CAUSES.items())),
        "## Kernels that communicate\n",
        "The names that `profile analyze` knows, and the files that define them.\n",
        table(
            "kernels of | names such as | defined in",
            ((library.name, *(", ".join(map(code, texts)) for texts in (library.examples, library.sources)))
             for library in LIBRARIES),
        ),
    ]  # fmt: skip
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
