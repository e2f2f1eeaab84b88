"""The small files beside published weights. A run keeps them, so that its exports contain them.

They say how to format a chat, which tokens end a generation, and how long the context is. A checkpoint stores them in
one file, published.json: file name -> text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...data import TOKENIZER_FILE
from ...data.strict_json import parse, read_named
from ...messages import describe, printable, quoted

COMPANIONS_FILE = "published.json"
NAMES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
LARGEST = 4 * 2**20  # bytes of one file; real chat templates and lists of special tokens are much smaller
LARGEST_TOKENIZER = 2**28


def read_companions(folder: Path) -> dict[str, str]:
    """The texts of the files of a published model, by file name. Raises ValueError for one that is not a text."""
    return {name: _read(folder / name, LARGEST) for name in NAMES if (folder / name).is_file()}


def read_tokenizer_text(folder: Path) -> dict[str, str]:
    """tokenizer.json of a published model: its name -> its text; {} without one. Raises ValueError."""
    path = folder / TOKENIZER_FILE
    return {path.name: _read(path, LARGEST_TOKENIZER)} if path.is_file() else {}


def _read(path: Path, largest: int) -> str:
    try:
        if path.stat().st_size > largest:
            raise ValueError(f"it has more than {largest:,} bytes")
        text = path.read_text("utf-8")
        if path.suffix == ".json":
            parse(text, allow_nan=True)
    except (ValueError, OSError) as error:
        raise ValueError(f"cannot read {printable(path)}: {describe(error)}") from None
    return text


def companions_of(checkpoint: Path) -> dict[str, str]:
    """The texts that `companion_files` put into a checkpoint, by file name; {} without any. Raises ValueError."""
    path = checkpoint / COMPANIONS_FILE
    if not path.is_file():
        return {}
    found = read_named(path)
    if not isinstance(found, dict):
        raise ValueError(f"{printable(path)} must be an object: got {quoted(found, 60)}")
    for name, text in found.items():
        if name not in NAMES or not isinstance(text, str):
            raise ValueError(f"{printable(path)} has {quoted(name, 60)}, which is not the text of a known file")
    return found


def companion_files(companions: Mapping[str, str]) -> dict[str, bytes]:
    """The file that keeps `companions` in a checkpoint: file name -> content."""
    return {COMPANIONS_FILE: json.dumps(companions).encode()} if companions else {}


def published_config(companions: Mapping[str, str]) -> dict[str, Any]:
    """The contents of config.json among `companions`; {} without one."""
    config = parse(companions.get("config.json", "{}"), allow_nan=True)
    return config if isinstance(config, dict) else {}
