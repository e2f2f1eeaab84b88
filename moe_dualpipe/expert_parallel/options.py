"""The options of expert parallelism. This module imports no torch, so that a command line can be read without it."""

from typing import Literal

EpBackend = Literal["auto", "all_to_all", "symmetric", "copy_engine", "shared", "deepep"]
"""How ranks exchange tokens; choose.py describes them."""
