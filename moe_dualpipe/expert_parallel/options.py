"""The options of expert parallelism. This module imports no torch, so that a command line can be read without it."""

from typing import Literal

EpBackend = Literal["auto", "all_to_all", "symmetric", "copy_engine", "shared", "deepep"]
"""How ranks exchange tokens; backend.py describes them."""
MAX_COPIED = 16
"""The largest number of ranks of copy_engine, which sends the same number of rows to all of them."""
