"""Files with a document in each row: the same documents from each format, and errors that name the file and the row."""

import csv
import gzip
import importlib
import importlib.util
import io
import json
import sys
from codecs import BOM_UTF8
from pathlib import Path

import numpy as np
import pytest

from moe_dualpipe.data import load_data, prepare_data, rows
from moe_dualpipe.data.documents import Documents
from tests.support.texts import corrupt

TEXTS = [f"{i} grün\n" * (i % 9) + "x" * (i % 5) for i in range(150)]


def library(name: str):
    """An optional library, whose types are not known here."""
    return pytest.importorskip(name, reason=f"{name} is not installed")


def jsonl_bytes(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def compressed(name: str, content: bytes) -> bytes:
    """The bytes of a file with this name. Those of a compressed one are in two parts."""
    first = len(content) // 3
    pack = {"gz": gzip.compress, "zst": lambda part: library("pyarrow").compress(part, "zstd", asbytes=True)}
    if (ending := name.lower().split(".")[-1]) not in pack:
        return content
    return b"".join(pack[ending](part) for part in (content[:first], content[first:]))


def plain_bytes(name: str, texts: list[str]) -> bytes:
    if name.startswith("list"):
        return json.dumps([{"id": i, "text": text} for i, text in enumerate(texts)], indent=1).encode()
    if not {".csv", ".tsv"}.isdisjoint(Path(name).suffixes):
        csv.writer(cells := io.StringIO(newline=""), delimiter=",\t"[".tsv" in name]).writerows(
            [("id", "text"), *enumerate(texts)]
        )
        return cells.getvalue().encode()
    return jsonl_bytes(texts)


def write(path: Path, texts: list) -> None:
    """Write a file with these texts, in the format that its name says."""
    if path.suffix not in (".parquet", ".arrow"):
        path.write_bytes(compressed(path.name, plain_bytes(path.name.lower(), texts)))
        return
    arrow = library("pyarrow")
    kind = arrow.string() if path.name.startswith("a.") else arrow.large_string()
    rows = arrow.table({"id": [*range(len(texts))], "text": arrow.array(texts, kind)})
    if path.suffix == ".parquet":
        importlib.import_module("pyarrow.parquet").write_table(rows, path, row_group_size=70)
        return
    form = arrow.ipc.new_file if path.name.startswith("indexed") else arrow.ipc.new_stream
    with form(path, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=33)


LINES = ("plain.jsonl", "a.jsonl.gz", "a.jsonl.zst", "A.JSON", "a.jsonlines", "a.NDJSON.gz")
NAMES = (*LINES, "a.parquet", "a.arrow", "indexed.arrow")
OTHERS = ("list.json", "list.json.zst", "a.csv", "a.CSV.gz", "a.tsv")


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_each_format_has_the_documents_and_token_ids_of_jsonl(tmp_path, monkeypatch, name):
    """Readers that guess types make dates, numbers or None of some."""
    monkeypatch.setattr(rows, "BATCH_ROWS", 16)
    texts = [*TEXTS, "2020-01-01", "2021-01-01 10:00:00", "3", "1e5", "true", "null", " ", "one\u2028two", "😀"]
    write(tmp_path / name, texts)
    assert [*Documents.find(str(tmp_path / name))] == [text for text in texts if text]
    (tmp_path / "same.jsonl").write_bytes(BOM_UTF8 + b"\n" + jsonl_bytes(texts).replace(b"\n", b"\n\n"))
    one, other = (load_data(str(tmp_path / path), 8).sources[0] for path in (name, "same.jsonl"))
    assert np.array_equal(one.train.streams[0][:], other.train.streams[0][:]) and np.array_equal(
        one.held_out.streams[0][:], other.held_out.streams[0][:]
    )


BAD_LINES = {
    b'{"text": "x"': "it is not JSON: Expecting ',' delimiter, at its end",
    b"[" * 100_000: "its objects and lists are nested too deep",
    b"[1]": "expected an object, got list",
    b"null": "expected an object, got NoneType",
    b'{"txt": "x", "id": 1}': "no field 'text'; its fields are 'txt', 'id': choose one with --set",
    b'{"text": 3}': "field 'text' must be a string, got int",
    b'{"text": {"text": "x"}}': "field 'text' must be a string, got dict",
    b'{"text": "a\\u0000b"}': "field 'text' contains a zero character",
    b'{"text": "a\\ud800b"}': "field 'text' contains half of a character, \\ud800",
    b'{"text": "\xff"}': "it is not UTF-8: invalid start byte; convert it, as in iconv -f latin1 -t utf-8 OLD > NEW",
    b"\0\0\0\0": "it is not JSON: Expecting value, at '\\x00",
    b'{"text": NaN}': "field 'text' must be a string, got float",
    b'{"text": "x"} {"text": "y"}': 'it is not JSON: Extra data, at \'{"text": "y"}\'',
    b'{"a\nb": 1}': "it is not JSON: ",
}
BAD_VALUES = {None: "field 'text' must be a string, got NoneType", "a\0": "field 'text' contains a zero character"}


def refusal(path: Path, out: Path, field: str = "text") -> str:
    """The error of preparing a file: one readable line, which leaves nothing behind."""
    with pytest.raises(ValueError) as error:
        prepare_data([str(path)], out, "bytes", 1, field)
    assert str(error.value).isprintable() and len(str(error.value)) < 500
    assert not [*out.parent.glob("*out*")]
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_an_error_names_the_file_and_the_row(tmp_path, name):
    path, at = tmp_path / name, 41
    if name in LINES:
        lines = [b"", *jsonl_bytes(TEXTS).splitlines()]
        for bad, problem in BAD_LINES.items():
            path.write_bytes(compressed(name, b"\n".join([*lines[:at], bad, *lines[at:]])))
            assert refusal(path, tmp_path / "out").startswith(f"{path}:{at + 1}: {problem}"), bad[:20]
        write(path, TEXTS)
        missing = f"{path}:1: no field 'body'; its fields are 'id', 'text': choose one with --set batch.data_field=NAME"
    else:
        for bad, problem in BAD_VALUES.items():
            write(path, [*TEXTS[:at], bad, *TEXTS[at:]])
            assert refusal(path, tmp_path / "out") == f"{path}:{at + 1}: {problem}"
        write(path, TEXTS)
        assert refusal(path, tmp_path / "out", "id") == f"{path}: field 'id' must have strings, got int64"
        missing = f"{path}: no field 'body'; its fields are 'id', 'text': choose one with --set batch.data_field=NAME"
    assert refusal(path, tmp_path / "out", "body").startswith(missing)


INVALID = {
    "cells.csv": (b"id,text\n1,x\n\n2\n", ":4: a row has 2 cells, but this one has 1"),
    "quote.csv": (b'id,text\n1,"x', ":2: unexpected end of data"),
    "latin.tsv": (b"id\ttext\n1\t\xfc", ":2: it is not UTF-8: invalid start byte; convert it, as in iconv -f latin1"),
    "wide.csv": (
        "id,text\n1,x\n".encode("utf-16"),
        ": it is not UTF-8: invalid start byte; convert it, as in iconv -f utf-16",
    ),
    "wide.jsonl": (
        jsonl_bytes(["x"]).decode().encode("utf-16"),
        ":1: it is not UTF-8: invalid start byte; convert it, as in iconv -f utf-16",
    ),
    "twice.csv": (b"text,text\nx,y\n", ": 2 columns are named 'text'"),
    "names.csv": (b"id,txt\n1,x\n", ": no field 'text'; its fields are 'id', 'txt': choose one with --set"),
    "long.json": (
        b"[1,%s]" % (b"2," * 40_000),
        ": a list of JSON has at most 65,536 bytes, but this one is longer: write",
    ),
    "cut.json": (b'[{"text": "x"}', ": it is not JSON: Expecting ',' delimiter, at its end"),
    "number.json": (b'[{"text": "x"}, 3]', ":2: expected an object, got int"),
    "object.json": (b'{\n"text": {}}', ":1: field 'text' must be a string, got dict"),
    "latin.txt": (b"a\ngr\xfcn", " is not text: line 2 is not UTF-8: invalid start byte; convert it, as in iconv -f"),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_file_is_refused_by_what_is_wrong_or_skipped_among_others(tmp_path, monkeypatch, name):
    """No file is trained on as text because its table is not the expected one."""
    monkeypatch.setattr(rows, "LONGEST_LINE", 1 << 16)
    path, (content, problem) = tmp_path / name, INVALID[name]
    path.write_bytes(content)
    assert f"{path}{problem}" in refusal(path, tmp_path / "out")
    if name in ("names.csv", "long.json", "cut.json", "object.json", "latin.txt"):
        (tmp_path / "a.jsonl").write_bytes(jsonl_bytes(["one"]))
        documents = Documents.find(str(tmp_path))
        assert [*documents] == ["one"] and documents.skipped[0].startswith(f"{path} (")


def test_what_is_wrong_beside_the_text_does_not_matter(tmp_path):
    content = BOM_UTF8 + b'{"text": "a", "score": NaN}\n\n{"other": "\\ud800", "text": "b"}\n'
    for name, found, texts in (
        ("a.jsonl", content, ["a", "b"]), ("one.json", BOM_UTF8 + b'{\n"text": "a"\n}', ["a"]),
        ("a.csv", BOM_UTF8 + b'text,"a\nb"\n"x, ""y""\r\n",z\n', ['x, "y"\r\n']), ("a.txt", BOM_UTF8 + b"a", ["a"]),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(found)
        assert [*Documents.find(str(tmp_path / name))] == texts


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_damaged_file_is_refused_by_its_name_or_has_its_rows(tmp_path, name):
    path, random, texts = tmp_path / name, np.random.default_rng(7), [text for text in TEXTS if text]
    write(path, TEXTS)
    content = path.read_bytes()
    spoiled = bytearray(content)
    spoiled[len(content) // 2 - 9 : len(content) // 2 + 9] = b"\xff" * 18
    cuts = [content[:-20], content[: len(content) // 2], content[:3], b"text" * 9, bytes(spoiled)]
    for damaged in [*cuts, *(corrupt(content, random) for _ in range(20))]:
        path.write_bytes(damaged)
        try:
            found = [*Documents.find(str(path))]
        except ValueError as error:
            message = str(error)
            assert message.startswith((f"cannot read {path}: ", f"{path}:", f"no text in --data {path}")), message
            assert message.isprintable() and len(message) < 500
        else:  # of an undamaged part, or of a format without a checksum
            assert damaged not in cuts[:4] and (not name.endswith(".gz") or found == texts)


@pytest.mark.parametrize("name,needed", [
    ("a.jsonl.zst", "pyarrow"), ("a.parquet", "pyarrow"), ("a.arrow", "pyarrow"), ("hf:owner/name", "datasets"),
])  # fmt: skip
def test_a_missing_library_is_one_line_that_says_how_to_install_it(tmp_path, monkeypatch, name, needed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, needed, None)
    if not name.startswith("hf:"):
        Path(name).write_bytes(b"some")
    with pytest.raises(ValueError, match=rf"{name} needs the {needed} library: pip install 'moe-dualpipe\[data\]'$"):
        prepare_data([name], tmp_path / "out", "bytes", 1, "text")


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_line_that_never_ends_is_named_and_not_read_into_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(rows, "LONGEST_LINE", 1 << 20)
    (tmp_path / name).write_bytes(compressed(name, jsonl_bytes(["one"]) + b'{"text": "' + b" " * (1 << 23)))
    read, of_line = [], rows._of_line
    monkeypatch.setattr(rows, "_of_line", lambda row: read.append(len(row)) or of_line(row))
    with pytest.raises(ValueError, match=f"^{tmp_path}/{name}:2: a line has at most 1,048,576 bytes, but this one is"):
        list(Documents.find(str(tmp_path)))
    assert max(read) == (1 << 20) + 1


# ---- Datasets by name ----


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
def test_a_dataset_is_loaded_by_name_and_split(tmp_path, monkeypatch):
    """One on this machine, whose name is its folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "set").mkdir()
    for name, texts in (("train", TEXTS), ("test", TEXTS[:9])):
        (tmp_path / "set" / f"{name}.jsonl").write_bytes(jsonl_bytes(texts))
    for source, texts in ((f"hf:{tmp_path}/set", TEXTS), (f"hf:{tmp_path}/set:default:test", TEXTS[:9])):
        assert [*Documents.find(source)] == [text for text in texts if text]
    for source, problem in (
        ("hf:owner/none", "cannot be loaded: "), ("hf:", "expected hf:NAME"), ("hf:a:b:c:d", "expected hf:NAME"),
        ("hf:a::train[:10%]", "expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, with a whole split"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=problem):
            Documents.find(source)
