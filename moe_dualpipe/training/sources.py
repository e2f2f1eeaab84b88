"""Tell whether the text, or the file of a custom layer, has changed since a checkpoint, which contains neither.

Each checkpoint has their hashes in `sources.json`. A run that resumes from it prints what has changed.
"""

import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from ..data import TextData, strict_json
from ..messages import printable
from ..models import ModelConfig
from .preflight import Run

SOURCES_FILE = "sources.json"
DATA = "data"


def sources_of(model: ModelConfig, text: object, fingerprint: int) -> dict[str, str]:
    """The hash of the text, if a file has it, and of the file of each own layer, by the name of its field."""
    files = {field: _file_of(str(getattr(model, field))) for field in model.own_layers}
    found = {field: sha256(file.read_bytes()).hexdigest() for field, file in files.items() if file and file.is_file()}
    return found | ({DATA: f"{fingerprint:x}"} if isinstance(text, TextData) else {})


def sources_file(sources: Mapping[str, str]) -> dict[str, bytes]:
    """The file of a checkpoint, by its name."""
    return {SOURCES_FILE: strict_json.write(dict(sources)).encode()}


def changed_sources(run: Run, sources: Mapping[str, str]) -> list[str]:
    """What has changed since the checkpoint that `run` resumes from, one text each. Older ones have no hashes.

    The text is not mentioned if options of the data have changed as well.
    """
    file = run.resume and run.resume / SOURCES_FILE
    saved = strict_json.read_named(file) if file and file.is_file() else {}
    changed = [name for name, now in sources.items() if saved.get(name, now) != now]
    own = [
        f"the file of --{name} {printable(getattr(run.config.model, name))} since the checkpoint; "
        "this may change the mathematics"
        for name in changed if name != DATA
    ]  # fmt: skip
    text = DATA in changed and not any(change.startswith("batch.") for change in run.changes)
    return own + ["the text of --data since the checkpoint; this changes the data"] * text


def _file_of(layer: str) -> Path | None:
    """The file that an own layer, such as "my_layers.py:GELU" or "my_package.layers:GELU", was imported from."""
    place = layer.rpartition(":")[0]
    file = place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)
    return Path(file) if file else None
