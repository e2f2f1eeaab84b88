"""Find what a source of --data names: a path, or the local copies of what is at a URL.

Token ids stay on the store, and are read ahead (read_ahead.py). Text is copied, as it is read as a whole.
"""

import os
from pathlib import Path

from . import stores
from .files import DataFile
from .token_files import HELD_OUT_FILES, TRAIN_FILE
from .tokenizer import TOKENIZER_FILE

_DESCRIPTIONS = {TOKENIZER_FILE, *(f"{name}.json" for name in (TRAIN_FILE, *HELD_OUT_FILES))}


def locate(source: str) -> str:
    """The path of a source; of a URL, the folder or file that stands for it, with copies of all but token ids.

    Raises ValueError if there is nothing at the URL, or if it cannot be read.
    """
    if not stores.is_url(source):
        return source
    try:
        return str(_locate(source))
    except stores.StorageError as error:
        raise ValueError(f"--data {error}") from None


def _locate(source: str) -> Path:
    folder, url = stores.local_path(source), stores.Url(source)
    if stores.url_of(folder) is None:  # hf://
        return folder
    if source.endswith(".bin"):
        folder = stores.local_path(str(url.parent))
        stores.open_folder(folder, {f"{url.name}.json", TOKENIZER_FILE})
        return folder / url.name
    stores.open_folder(folder, _DESCRIPTIONS)
    names = stores.sizes_of(folder)
    if {TRAIN_FILE, f"{TRAIN_FILE}.json", *HELD_OUT_FILES} & names.keys():
        return folder
    return stores.fetch_all(url)


def is_file(path: Path) -> bool:
    """Whether there is a regular file on this machine, or a file on the store."""
    return os.path.isfile(path) or (stores.url_of(path) is not None and stores.exists(path))


def open_file(path: Path) -> DataFile | stores.RangedFile:
    """A local file, or one on a store. Raises ValueError if it cannot be read."""
    return DataFile(path) if stores.url_of(path) is None else stores.RangedFile(path)
