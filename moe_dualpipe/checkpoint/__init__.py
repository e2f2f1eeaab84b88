"""Checkpoints: write them in the background, verify and load them; read and write published models.

A checkpoint does not depend on the parallel layout of its run: any number of ranks can load it.
"""

from .destinations import list_checkpoints
from .load import (
    check_model,
    check_weights,
    find_checkpoint,
    find_weights,
    is_published,
    load_adapter,
    load_checkpoint,
    load_tensors,
    load_weights,
    open_weights,
    start_companions,
    start_model,
)
from .manifest import RUN_FILE, Manifest, read_manifest, verify_checkpoint
from .models import find_model, load_model, load_spread_model, open_model, start_tokenizer
from .save import SaveError, Saver, SaveResult, save_checkpoint
from .tensor_file import TensorFolder
from .weights import PREFIX, PartialLoad, global_weights

__all__ = [
    "PREFIX", "RUN_FILE", "Manifest", "PartialLoad", "SaveError", "SaveResult", "Saver", "TensorFolder", "check_model",
    "check_weights", "find_checkpoint", "find_model", "find_weights", "global_weights", "is_published",
    "list_checkpoints", "load_adapter", "load_checkpoint", "load_model", "load_spread_model", "load_tensors",
    "load_weights", "open_model", "open_weights", "read_manifest", "save_checkpoint", "start_companions", "start_model",
    "start_tokenizer", "verify_checkpoint",
]  # fmt: skip
