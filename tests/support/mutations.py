"""Mutations of valid JSON files: each value replaced by each of a list of wrong ones, removed, or there twice."""

import json
from collections.abc import Iterator
from typing import Any

VALUES = (
    "null", "true", "0", "-1", "1e308", "1e999", "NaN", "-Infinity", '""', '"\\u001b[31m"', '"\\ud800"', "[]", "{}",
    '[{"a": [1, "b"]}]', "[" * 5000 + "]" * 5000, str(10**30), "9" * 5000, '"' + "long " * 2000 + '"',
)  # fmt: skip


def mutations(value: Any, values: tuple[str, ...] = VALUES) -> Iterator[tuple[str, str]]:
    """Yield (what was changed, JSON text) for each value inside `value`."""
    for path in _paths(value):
        for new in values:
            yield f"{path} = {new[:20]}", _replaced(value, path, new)
        if path and isinstance(path[-1], str):
            yield f"{path} removed", _replaced(value, path, None)
            yield f"{path} twice", _replaced(value, path, f"0, {json.dumps(path[-1])}: 0")


def _paths(value: Any, above: tuple = ()) -> Iterator[tuple]:
    yield above
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from _paths(item, (*above, key))


def _replaced(value: Any, path: tuple, text: str | None) -> str:
    hole, copy = "the value to replace", json.loads(json.dumps({"top": value}))
    inside, key = copy, "top"
    for following in path:
        inside, key = inside[key], following
    inside[key] = hole
    if text is None:
        del inside[key]
    return json.dumps(copy["top"]).replace(json.dumps(hole), text or "")


def check_message(error: BaseException, limit: int = 1000) -> None:
    """The message of `error` is one line, printable and short, and gives no advice of a library."""
    text = str(error)
    assert text.isprintable() and 5 < len(text) < limit, text[: 2 * limit]
    assert "weights_only" not in text and "sys." not in text, text
