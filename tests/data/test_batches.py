"""Sources and batches: reproducible, shares by weight, held-out text, and errors that name file and line."""

import dataclasses
import hashlib
import itertools
import json
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.data import BYTES, Source, TextData, encode, load_data
from moe_dualpipe.data.encode import Split, encode_documents, is_held_out
from moe_dualpipe.data.samples import Text
from moe_dualpipe.data.sources import split_weight
from moe_dualpipe.data.tokenizer import ByteTokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i:02}>" * 20)
    (tmp_path / "image.bin").write_bytes(b"\x00\x01\x02" * 50)
    (tmp_path / ".hidden").write_text("secret" * 50)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "deep.txt").write_text("<deep>" * 20)
    return tmp_path


def source_of(tokens, name="", weight=1.0):
    stream = np.array(tokens, np.uint8)
    return Source(name, weight, Text(stream), Text(stream), "")


# ---- Batches ----


def test_batches_are_a_pure_function_of_seed_and_step_whoever_reads_which_rows(folder):
    for sources in ([str(folder)], [f"{folder}=2", str(folder / "0*.txt"), str(folder / "17.txt")]):
        text, other = load_data(sources, 16), load_data(sources, 16)
        x, y, _ = text.batch(seed=1, step=7, count=12, seq_len=16)
        assert x.shape == y.shape == (12, 16) and torch.equal(x[:, 1:], y[:, :-1])
        other.batch(seed=1, step=3, count=9, seq_len=16)  # earlier batches do not matter
        for count in (1, 3, 4, 12):
            parts = [other.batch(1, 7, 12, 16, range(first, first + count)) for first in range(0, 12, count)]
            for tensor, *found in zip((x, y), *(part[:2] for part in parts), strict=True):
                assert torch.equal(torch.cat(found), tensor)
        different = [text.batch(*key, count=12, seq_len=16)[0] for key in [(2, 7), (1, 8), (3, 7)]]
        assert not any(torch.equal(x, batch) for batch in different)


def test_batches_of_one_source_never_change_between_versions():
    """Golden values: resuming an old run must continue with the same batches."""
    text = TextData((source_of(np.arange(1000) % 251),))
    assert text.batch(3, 5, 4, 8)[0][:, 0].tolist() == [213, 174, 188, 228]


def test_windows_stay_inside_their_stream_and_each_is_drawn():
    short = TextData((source_of(range(10)), source_of(range(30, 43))))
    x, y, _ = short.batch(0, 0, 500, 8)
    assert {(first, last) for first, last in zip(x[:, 0].tolist(), y[:, -1].tolist(), strict=True)} == {
        (first, first + 8) for first in (0, 1, 30, 31, 32, 33, 34)
    }


def test_shares_converge_to_the_weights_for_sources_of_different_sizes():
    sources = [source_of([i] * size, weight=w) for i, (size, w) in enumerate([(90, 3), (9, 1.5), (400, 0.5)])]
    text = TextData(tuple(sources))
    drawn = torch.cat([text.batch(1, step, 40, 8)[0][:, 0] for step in range(100)])
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    assert shares.tolist() == pytest.approx([0.6, 0.3, 0.1], abs=4 * (0.25 / 4000) ** 0.5)
    held_out = text.held_out_batch(0, 31, 31, 8)[0][:, 0]
    assert torch.bincount(held_out).tolist() == [19, 9, 3]


@pytest.mark.parametrize("total", [1, 2, 6, 7])
def test_held_out_batches_cover_the_held_out_text_evenly(folder, total):
    for sources in ([str(folder)], [f"{folder}=2.5", f"{folder}/0*"]):
        text = load_data(sources, 16)
        whole = text.held_out_batch(0, total, total, 16)
        assert len(whole[0]) == total
        parts = [text.held_out_batch(first, 1, total, 16)[0] for first in range(total)]
        assert torch.equal(whole[0], torch.cat(parts))
        assert whole[0][0].tolist() == text.sources[0].held_out.streams[0][:16].tolist()
        if total > 5:
            assert whole[1][-1].tolist() == text.sources[-1].held_out.streams[0][-16:].tolist()


def test_the_fingerprint_is_that_of_the_text_and_its_weights():
    one, other = source_of(range(10)), source_of(range(30, 43), weight=2.5)
    texts = [TextData(sources) for sources in ((one, other), (other, one), (one,), (one, source_of(range(30, 43))))]
    assert len({text.fingerprint() for text in texts}) == 4
    renamed = source_of(range(10), "elsewhere"), source_of(range(30, 43), weight=2.5)
    assert TextData(renamed).fingerprint() == texts[0].fingerprint()
    unlike = dataclasses.replace(other, bytes_per_token=4.5)
    assert TextData((one, unlike)).bytes_per_token == pytest.approx((1 + 2.5 * 4.5) / 3.5)


# ---- Text ----


def test_a_glob_that_the_shell_has_expanded_is_described_on_one_line(folder):
    names = sorted(map(str, folder.glob("*.txt")))
    assert load_data(names, 1).description == (
        f"data {names[0]} to {names[-1]}: 40 sources, 3,080 tokens, 160 held out; "
        "quote a glob, as in 'notes/*.md', to make it one source"
    )
    assert len(load_data(names[:8], 1).description.splitlines()) == 8


@pytest.mark.parametrize("content,problem", [
    (b"ok\n" * 700_000 + b"\xc3(", "line 700001 is not UTF-8: invalid continuation byte; convert it, as in iconv"),
    (b"ok\n" * 700_000 + b"a\0", "zero byte in line 700001"),
    (b"line\nend \xe2\x82", "line 2 is not UTF-8: unexpected end of data"),
    (b"\xff\xfea\0b\0", "line 1 is not UTF-8: invalid start byte; convert it, as in iconv -f utf-16 -t utf-8"),
], ids=["utf8", "zero", "cut", "utf16"])  # fmt: skip
def test_an_error_names_the_line_where_a_file_is_not_text(tmp_path, content, problem):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"--data {tmp_path}/a.txt is not text: {problem}")):
        load_data(str(tmp_path / "a.txt"), 8)
    with pytest.raises(
        ValueError, match=re.escape(f"no text in --data {tmp_path}: its files are empty or not text; 1 skipped")
    ):
        load_data(str(tmp_path), 8)


@settings(max_examples=50)
@given(st.lists(st.text(st.sampled_from("äb\n"), max_size=40), max_size=9), st.integers(1, 9), st.integers(1, 5))
def test_documents_are_encoded_in_small_batches_of_whole_lines(texts, size, number):
    batches: list[list[str]] = []

    class Listening(ByteTokenizer):
        def encode_batch(self, texts, special_tokens=False):
            batches.append([*texts])
            return super().encode_batch(texts, special_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "PIECE", size)
        patch.setattr(encode, "BATCH_PIECES", number)
        found, taken = [], []
        for document in encode_documents(filter(lambda text: not taken.append(text), texts), Listening()):
            found.append(document)
            assert len(taken) <= len(found) + number  # the texts of one batch are in memory
    assert [one.tokens_N.tobytes() for one in found] == [text.encode() + b"\0" for text in texts]
    assert [one.text_bytes for one in found] == [len(text.encode()) + 1 for text in texts]
    assert all(len(batch) <= number and max(map(len, batch), default=0) <= size for batch in batches)
    pieces, ends = [piece for batch in batches for piece in batch], {*itertools.accumulate(map(len, texts))}
    assert all(len(piece) <= size for piece in pieces)
    for piece, end in zip(pieces, itertools.accumulate(map(len, pieces)), strict=True):
        assert piece.endswith("\n") or end in ends or (len(piece) == size and "\n" not in piece)


REFUSED = [
    ("*.nothing", "no such file or folder, and no file matches"),
    ("empty=x", "no such file or folder.*; a weight must be a number, as in notes.jsonl=2"),
    ("", "no text in --data .*: its files are empty or not text$"),
    ("short", "too little text in --data .*: 3 bytes for training and 2 held out, but one sequence needs 9; use more "
              "text or --seq-len 1"),
    ("empty=0", "the weight must be at least 1e-09: got 0.0$"), ("empty=nan", "the weight must be at least 1e-09: got"),
    (None, "--data is empty"),
]  # fmt: skip


@pytest.mark.parametrize("name,problem", REFUSED)
def test_unusable_sources_are_refused_in_one_line(tmp_path, name, problem):
    (tmp_path / "empty").touch()
    if name == "short":
        (tmp_path / "short").write_text("abcd")
    with pytest.raises(ValueError, match=problem) as error:
        load_data([f"{tmp_path}/{name}"] if name is not None else [], 8)
    assert str(error.value).isprintable() and "--data" in str(error.value)
    with pytest.raises(ValueError, match="--data is empty"):
        load_data("=2", 8)


def test_a_source_name_may_contain_an_equals_sign(tmp_path):
    (tmp_path / "lr=3").write_text("x" * 99)
    assert split_weight(f"{tmp_path}/lr=3") == (f"{tmp_path}/lr=3", 1.0)
    assert split_weight(f"{tmp_path}/lr=3=2.5") == (f"{tmp_path}/lr=3", 2.5)
    assert load_data([f"{tmp_path}/lr=3=2"], 8).sources[0].weight == 2


# ---- The held-out text: a property of the content, so that no text is both trained on and held out ----


def content_hash(text: str) -> int:
    (document,) = encode_documents([text], BYTES)
    return document.hash


def documents(stream) -> list[str]:
    return [document for document in stream.streams[0][:].tobytes().decode().split("\0") if document]


def sides(text) -> tuple[list[str], list[str]]:
    """The documents of all sources that are trained on, and those that are held out."""
    sources = text.sources
    train, held_out = ([d for s in sources for d in documents(getattr(s, side))] for side in ("train", "held_out"))
    return train, held_out


def write_files(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_text(text)
    return folder


# ---- Laws of the split ----

HASHES = st.integers(0, 59).map(lambda n: n if n % 20 else n * 1_000_003 * 20)  # many collisions with 0 modulo 20
SOURCE = st.lists(st.tuples(HASHES, st.integers(2, 40)), min_size=1, max_size=60).map(
    lambda documents: [(content_hash, dict(documents)[content_hash]) for content_hash, _ in documents]  # copies
)


@settings(max_examples=50)
@given(st.lists(SOURCE, min_size=1, max_size=3), st.integers(1, 20), st.randoms(use_true_random=False))
def test_the_split_does_not_depend_on_the_order_of_documents_and_sources(sources, shortest, random):
    split = Split.of(sources, shortest)
    shuffled = [random.sample(source, len(source)) for source in random.sample(sources, len(sources))]
    assert Split.of(shuffled, shortest) == split
    assert Split.of([*sources, sources[0]], shortest) == split


@settings(max_examples=50)
@given(SOURCE, st.integers(1, 20))
def test_a_source_has_text_on_both_sides(source, shortest):
    split, total = Split.of([source], shortest), sum(size for _, size in source)
    held_out = sum(split.tail(*document) for document in source)
    assert 0 < held_out < total
    if split.small:
        wanted = max(total // 20, min(shortest, total // 2))
        assert wanted <= held_out < wanted + len(source)  # rounded up for each copy of the document that is divided
        assert sum(0 < fraction < 1 for fraction in split.small.values()) <= 1
    else:
        assert held_out == sum(size for content_hash, size in source if is_held_out(content_hash))
        assert shortest <= min(held_out, total - held_out)
        assert len(dict(source)) >= 20


def test_about_one_document_in_twenty_is_held_out_by_a_hash_that_never_changes():
    assert content_hash("grün\n") == int.from_bytes(hashlib.blake2b("grün\n".encode(), digest_size=8).digest(), "big")
    assert content_hash("") == 0xE4A6A0577479B2B4
    found = [i for i in range(4000) if is_held_out(content_hash(f"document {i}"))]
    assert (found[:4], len(found)) == ([3, 15, 23, 28], 199)


def test_a_small_source_holds_out_documents_in_the_order_of_their_hashes():
    split = Split.of([[(5, 100), (3, 4), (4, 60), (4, 60), (9, 176)]], 1)  # 400: 20 are held out
    assert split.small == {3: 1, 4: Fraction(16, 120), 5: 0, 9: 0}
    assert [split.tail(*document) for document in [(3, 4), (4, 60), (5, 100), (40, 7), (41, 7)]] == [4, 8, 0, 7, 0]


# ---- Copies, links and sources ----

TEXTS = [" ".join(f"{i}:{j}" for j in range(30 + i % 4)) for i in range(60)]


@pytest.mark.parametrize("number", [1, 2, 3, 12, 60])
def test_copies_are_on_the_same_side_whatever_their_names_and_formats(tmp_path, number):
    write_files(tmp_path / "a", TEXTS[:number])
    write_files(tmp_path / "b", TEXTS[number - 1 :: -1] + TEXTS[:1])
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[number // 2 :]))
    names = [str(tmp_path / name) for name in ("a", "b", "c.jsonl")]
    for order in ([0], [1], [2, 1, 0], [0, 1, 2]):
        text = load_data([names[i] for i in order], 8)
        train, held_out = sides(text)
        assert held_out and train and not {*train} & {*held_out}
        assert not any(part in document for part in held_out if len(part) > 8 for document in train)  # of a divided one
    train, held_out = sides(load_data(names, 8))
    other = sides(load_data(names[::-1], 8))
    assert (sorted(other[0]), sorted(other[1])) == (sorted(train), sorted(held_out))
