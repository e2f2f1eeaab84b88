"""The small files beside published weights. A run keeps them, so that its exports contain them.

They say how to format a chat, which tokens end a generation, and how long the context is. A checkpoint stores them in
one file, published.json: file name -> text. For runs that did not start from a published model, an export gets files of
its tokenizer: without them, transformers would use the default special tokens of the architecture.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...data import TOKENIZER_FILE, Tokenizer
from ...data.strict_json import parse, parse_one, read_if_there, read_texts, reading
from ...kernels.fp8 import RECIPES, Fp8Recipe

COMPANIONS_FILE, FP8_FILE = "published.json", "fp8.json"
BLOCK = 128
"""Rows and columns of a block of published weights in fp8, which has one scale in fp32."""
NAMES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip


def read_companions(folder: Path, tokenizer: bool = False) -> dict[str, str]:
    """The texts of the files of a published model, by file name. Raises ValueError for one that is not a text.

    tokenizer: also tokenizer.json.
    """
    texts = read_texts(folder, (*NAMES, TOKENIZER_FILE) if tokenizer else NAMES)
    for name in (name for name in texts if name.endswith(".json")):
        with reading(folder / name):
            parse(texts[name], allow_nan=True)
    return texts


def companions_of(checkpoint: Path) -> dict[str, str]:
    """The texts that `companion_files` put into a checkpoint, by file name; {} if there are none. Raises ValueError."""
    return read_if_there(checkpoint / COMPANIONS_FILE, dict[Literal[NAMES], str]) or {}


def stop_ids(companions: Mapping[str, str]) -> list[int]:
    """The tokens that end a generation: those of generation_config.json among `companions`, or else of config.json."""
    configs = (parse_one(companions, name) for name in ("generation_config.json", "config.json"))
    named = [config.get("eos_token_id") for config in configs]
    found = next((ids for ids in named if ids is not None), [])
    return [token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)]


def companion_files(companions: Mapping[str, str]) -> dict[str, bytes]:
    """The file that keeps `companions` in a checkpoint: file name -> content."""
    return {COMPANIONS_FILE: json.dumps(companions).encode()} if companions else {}


def fp8_file(recipe: str | None) -> dict[str, bytes]:
    """The file in a checkpoint that names the recipe of its experts: file name -> content. None: not in FP8."""
    return {FP8_FILE: json.dumps({"recipe": recipe}).encode()} if recipe else {}


def published_recipe(checkpoint: Path) -> Fp8Recipe | None:
    """The recipe that `fp8_file` put into a checkpoint. None if it has none, or one with blocks of another size."""
    found = read_if_there(checkpoint / FP8_FILE, dict[str, str]) or {}
    recipe = RECIPES.get(found.get("recipe", ""))
    return recipe if recipe and recipe.weight_rows == recipe.block == BLOCK else None


def tokenizer_files(tokenizer: Tokenizer | None, alone: bool) -> dict[str, bytes]:
    """tokenizer.json, and unless `alone` tokenizer_config.json and generation_config.json: file name -> content.

    Returns {} without a known tokenizer.
    """
    if tokenizer is None or not tokenizer.end_text:
        return {}
    content = {TOKENIZER_FILE: tokenizer.library_json()}
    if alone:
        return content
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_text,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    generation = {"eos_token_id": tokenizer.end_id, "pad_token_id": tokenizer.end_id}
    return content | {"tokenizer_config.json": encoded(config), "generation_config.json": encoded(generation)}


def special_ids(tokenizer: Tokenizer | None, source: Mapping[str, Any]) -> dict[str, int | None]:
    """The ids of special tokens for config.json: those of `source`, or else of the tokenizer, or None."""
    end = tokenizer.end_id if tokenizer is not None and tokenizer.end_id >= 0 else None
    ids = {"bos_token_id": None, "eos_token_id": None if source else end, "pad_token_id": None}
    return {key: source.get(key, default) for key, default in ids.items()}


def encoded(value: Any) -> bytes:
    """A JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
