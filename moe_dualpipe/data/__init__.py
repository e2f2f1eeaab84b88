"""Training data: read documents, tokenize them, store token ids on disk, and draw batches.

`load_data` opens everything that `--data` names and returns a `TextData`, which draws the batches.
"""

from .batches import Batches, GivenBatches, Source, TextData
from .files import DataFile
from .prepare import Prepared, open_shards, prepare_data
from .sources import load_data, read_stream
from .token_files import HELD_OUT_FILES, TRAIN_FILE, Sidecar, TokenFile
from .tokenizer import (
    BYTES,
    TOKENIZER_FILE,
    Tokenizer,
    UnknownTokenizer,
    find_tokenizer,
    num_bytes,
    read_tokenizer,
    tokenizer_files,
)

__all__ = [
    "BYTES", "HELD_OUT_FILES", "TOKENIZER_FILE", "TRAIN_FILE", "Batches", "DataFile", "GivenBatches",
    "Prepared", "Sidecar", "Source", "TextData", "TokenFile", "Tokenizer", "UnknownTokenizer",
    "find_tokenizer", "load_data", "num_bytes", "open_shards", "prepare_data", "read_stream",
    "read_tokenizer", "tokenizer_files",
]  # fmt: skip
