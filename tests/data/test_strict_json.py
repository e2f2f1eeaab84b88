"""JSON that other parsers accept, and errors for JSON that they do not."""

import json
import os

import pytest

from moe_dualpipe.data import strict_json
from tests.support.mutations import check_message

ODD = {"a": [1, -2.5, True, None, "\u202e\x00 é"], "b": {"c": [], "d": {}}}


def test_values_are_read_and_written_as_by_json():
    text = json.dumps(ODD)
    assert strict_json.parse(text) == strict_json.parse(text.encode()) == ODD
    assert strict_json.write(ODD) == text
    assert strict_json.write(ODD, indent=1) == json.dumps(ODD, indent=1)


INVALID = {
    "NaN": "NaN is not a finite number", '{"a": -Infinity}': "-Infinity is not a finite number",
    "[1e999]": "1e999 is not a finite number", '{"a": 1, "b": {"a": 1, "a": 1}}': "it has two values for 'a'",
    "1" * 5000: "a number has 5,000 digits", "": "Expecting value", "[1": "Expecting ',' delimiter",
    '{"a\x1b": 1}': "Invalid control character", "{1: 2}": "Expecting property name",
    **dict.fromkeys(
        ("[" * 33 + "]" * 33, "[" * 900 + "]" * 900, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000),
        "its objects and lists are nested more than 32 levels deep",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", INVALID, ids=range(len(INVALID)))
def test_invalid_json_is_an_error_of_one_line(text):
    with pytest.raises(ValueError) as refused:
        strict_json.parse(text)
    assert str(refused.value).startswith(INVALID[text])
    check_message(refused.value)


def test_limits_are_not_reached_by_valid_json():
    assert strict_json.parse("[" * 32 + "1" + "]" * 32)
    assert strict_json.parse("-" + "9" * 39) == 1 - 10**39
    with pytest.raises(ValueError, match="not text: invalid start byte at byte 1"):
        strict_json.parse(b'"\xff"')


def test_numbers_that_are_not_finite_are_written_as_null():
    nan, infinity = float("nan"), float("inf")
    written = strict_json.write({"a": [nan, 1.5], "b": (infinity, {"c": -infinity})})
    assert written == '{"a": [null, 1.5], "b": [null, {"c": null}]}'
    assert str(strict_json.parse('[NaN, Infinity, {"a": 1e999}]', allow_nan=True)) == "[nan, inf, {'a': inf}]"


def test_only_regular_files_are_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert (
        strict_json.read_file(tmp_path / "file", follow_links=False) == strict_json.read_file(tmp_path / "link") == [1]
    )
    for path, follow, message in (
        ("link", False, "it is a symbolic link"), ("pipe", True, "it is not a file"), ("", True, "it is not a file"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            strict_json.read_file(tmp_path / path, follow)
    with pytest.raises(FileNotFoundError):
        strict_json.read_file(tmp_path / "missing")
    monkeypatch.setattr(strict_json, "MAX_BYTES", 2)
    with pytest.raises(ValueError, match="it has more than 2 bytes"):
        strict_json.read_file(tmp_path / "file")
