"""Checkpoints: write them in the background, verify and load them, export their weights as safetensors.

A checkpoint does not depend on the parallel layout of its run: any number of ranks can load it.
"""

from .destinations import list_checkpoints
from .load import check_model, find_checkpoint
from .manifest import RUN_FILE, Manifest, read_manifest, verify_checkpoint
from .model_folder import export_weights, find_model, load_spread_model, open_model
from .partial import PartialLoad
from .save import SaveError, Saver, SaveResult, save_checkpoint
from .tensor_folder import TensorFolder
from .weights import WEIGHTS_FILE, load_tensors
from .weights_folder import (
    check_weights,
    is_published,
    load_checkpoint,
    load_model,
    load_weights,
    model_of,
    open_weights,
    start_tokenizer,
)

__all__ = [
    "RUN_FILE", "WEIGHTS_FILE", "Manifest", "PartialLoad", "SaveError", "SaveResult", "Saver", "TensorFolder",
    "check_model", "check_weights", "export_weights", "find_checkpoint", "find_model", "is_published",
    "list_checkpoints", "load_checkpoint", "load_model", "load_spread_model", "load_tensors", "load_weights",
    "model_of", "open_model", "open_weights", "read_manifest", "save_checkpoint", "start_tokenizer",
    "verify_checkpoint",
]  # fmt: skip
