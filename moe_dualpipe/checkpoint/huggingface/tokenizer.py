"""The files that tell transformers the tokenizer of an export, and the token that ends a generation.

A run that started from a published model already has these files (companions.py). For other runs this module makes
them. Without them, transformers would use the default special tokens of the architecture.
"""

import json
from collections.abc import Mapping
from typing import Any

from ...data import TOKENIZER_FILE, Tokenizer, library_json


def tokenizer_files(tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json: file name -> content.

    Returns {} without a known tokenizer.
    """
    found = library_json(tokenizer) if tokenizer is not None else None
    if found is None or tokenizer is None:
        return {}
    content, end = found
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    generation = {"eos_token_id": tokenizer.end_id, "pad_token_id": tokenizer.end_id}
    made = {"tokenizer_config.json": _encoded(config), "generation_config.json": _encoded(generation)}
    return {TOKENIZER_FILE: content, **made}


def special_ids(tokenizer: Tokenizer | None, source: Mapping[str, Any]) -> dict[str, int | None]:
    """The ids of special tokens for config.json: those of `source`, or else of the tokenizer, or None."""
    end = tokenizer.end_id if tokenizer is not None and tokenizer.end_id >= 0 else None
    ids = {"bos_token_id": None, "eos_token_id": None if source else end, "pad_token_id": None}
    return {key: source.get(key, default) for key, default in ids.items()}


def _encoded(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
