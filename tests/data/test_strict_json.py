"""JSON that other parsers accept, and errors for JSON that they do not."""

import json
import os

import pytest

from moe_dualpipe.data import strict_json
from tests.support.mutations import check_message

ODD = {"a": [1, -2.5, True, None, "\u202e\x00 é", 10**25], "b": {"c": [], "d": {}}}
INVALID = ("NaN", "[-Infinity]", "[1e999]", "1" * 5000, "", "[1", '{"a\x1b": 1}', "{1: 2}", "[" * 100_000, b'"\xff"')


def test_values_are_read_and_written_as_by_json():
    text = json.dumps(ODD)
    assert strict_json.parse(text) == strict_json.parse(text.encode()) == ODD
    assert strict_json.write(ODD, indent=1) == json.dumps(ODD, indent=1)


def test_numbers_that_are_not_finite_are_written_as_null():
    nan, infinity = float("nan"), float("inf")
    written = strict_json.write({"a": [nan, 1.5], "b": (infinity, {"c": -infinity})})
    assert written == '{"a": [null, 1.5], "b": [null, {"c": null}]}'
    assert str(strict_json.parse('[NaN, Infinity, {"a": 1e999}]', allow_nan=True)) == "[nan, inf, {'a': inf}]"


@pytest.mark.parametrize("text", INVALID, ids=range(len(INVALID)))
def test_invalid_json_is_an_error_of_one_line(text):
    with pytest.raises(ValueError) as refused:
        strict_json.parse(text)
    check_message(refused.value)


def test_only_regular_files_are_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert strict_json.read_file(tmp_path / "file", follow_links=False) == strict_json.read_file(tmp_path / "link")
    for path, follow, message in (
        ("link", False, "it is a symbolic link"), ("pipe", True, "it is not a file"), ("", True, "it is not a file"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            strict_json.read_file(tmp_path / path, follow)
    monkeypatch.setattr(strict_json, "MAX_BYTES", 2)
    with pytest.raises(ValueError, match="it has more than 2 bytes"):
        strict_json.read_file(tmp_path / "file")
