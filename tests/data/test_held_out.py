"""The held-out text: a property of the content, so that no text is both trained on and held out."""

import hashlib
import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.data import BYTES, load_data
from moe_dualpipe.data.encode import encode_documents
from moe_dualpipe.data.held_out import Split, is_held_out


def content_hash(text: str) -> int:
    (document,) = encode_documents([text], BYTES)
    return document.hash


def documents(stream) -> list[str]:
    return [document for document in stream[:].tobytes().decode().split("\0") if document]


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
