"""Datasets of the Hugging Face Hub by name: "hf:NAME", "hf:NAME:CONFIG" or "hf:NAME:CONFIG:SPLIT".

The `datasets` library downloads a dataset once and keeps it as .arrow files in its cache. These are then read like any
others.
"""

import os
from importlib import import_module
from pathlib import Path

from ..messages import printable
from .files import FileStatus

_PREFIX = "hf:"


def is_dataset(source: str) -> bool:
    """Whether `source` names a dataset of the hub, rather than a file."""
    return source.startswith(_PREFIX) and not os.path.lexists(source)


def find_dataset(source: str, name: str) -> dict[Path, FileStatus]:
    """The .arrow files of a dataset, in the order of its rows; the default split is "train".

    Raises ValueError, which starts with `name`, if the `datasets` library is missing or cannot load the dataset.
    """
    dataset, config, split, *others = [*source.removeprefix(_PREFIX).split(":"), "", ""]
    if not dataset or any(others) or not set("[+").isdisjoint(split):
        raise ValueError(f"{name}: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, with a whole split")
    try:
        library = import_module("datasets")
    except ImportError:
        raise ValueError(f"{name} needs the datasets library: pip install 'moe-dualpipe[hub]'") from None
    try:
        loaded = library.load_dataset(dataset, config or None, split=split or "train")
        paths = [Path(file["filename"]) for file in loaded.cache_files]
        return {path: FileStatus.of(os.stat(path)) for path in paths}
    except Exception as error:  # of the library, of HTTP, of the loading script's format
        reason = printable(str(error).strip().partition("\n")[0] or type(error).__name__)
        raise ValueError(f"{name} cannot be loaded: {reason}") from None
