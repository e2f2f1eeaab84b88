"""Training data at a URL: the same batches as from a folder, read before the steps need them."""

import os
from pathlib import Path

import numpy as np
import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.data import BYTES, ReadAhead, load_data, read_stream
from tests.support.object_store import access, first, in_environment, slow
from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, change, losses, settings, train

SEQ_LEN, COUNT = 32, 3
TOKENS = 100_000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder as `moe-dualpipe data prepare` writes it, a bare file of many blocks, and some texts."""
    base = tmp_path_factory.mktemp("data")
    texts = base / "texts"
    (texts / "below").mkdir(parents=True)
    for i in range(3):
        (texts / f"{i}.md").write_text(f"text {i} " * 400)
    (texts / "below" / "3.md").write_text("another one " * 400)
    (texts / "rows.jsonl").write_text('{"text": "a row of text"}\n' * 300)
    assert main(["data", "prepare", str(texts / "*.md"), "--out", str(base / "corpus"), "--tokenizer", "bytes"]) == 0
    np.random.default_rng(1).integers(0, 256, TOKENS).astype("<u1").tofile(base / "bare.bin")
    return base


@pytest.fixture
def stored(corpus, s3):
    s3.put_folder(corpus, "data")
    s3.reset_faults()
    return s3


def load(source):
    return load_data(source, SEQ_LEN, dtype="uint8")


def batches(text, steps=3):
    return [text.batch(7, step, COUNT, SEQ_LEN) for step in range(steps)] + [text.held_out_batch(0, 4, 4, SEQ_LEN)]


def equal(one, other):
    return all(a.equal(b) for pair, others in zip(one, other, strict=True) for a, b in zip(pair, others, strict=True))


@pytest.mark.parametrize("name", ["corpus", "bare.bin", "texts/0.md", "texts/rows.jsonl", "texts/*.md", "texts"])
@pytest.mark.quick("corpus", "bare.bin", "texts/*.md")
@pytest.mark.usefixtures("stored")
def test_a_url_gives_the_batches_of_the_same_files_in_a_folder(corpus, name):
    local, remote = load(f"{corpus}/{name}=2"), load(f"s3://bucket/data/{name}=2")
    assert equal(batches(local), batches(remote)) and local.fingerprint() == remote.fingerprint()
    assert [source.weight for source in remote.sources] == [2.0]
    described = remote.description.replace("s3://bucket/data", str(corpus))
    assert described == local.description


@pytest.mark.usefixtures("stored")
def test_the_whole_stream_of_a_url_is_read_for_an_evaluation(corpus):
    remote = read_stream("s3://bucket/data/corpus", BYTES)
    held_out = np.fromfile(corpus / "corpus" / "held_out.bin", "u1")
    assert np.array_equal(remote[:], held_out)
    assert np.array_equal(read_stream(str(corpus / "corpus"), BYTES)[:], held_out)


@pytest.mark.parametrize("source,message", [
    ("s3://bucket/data/none", r"^--data s3://bucket/data/none: there is no such file or folder$"),
    ("s3://bucket/none.bin", r"^--data s3://bucket/none.bin: no such file or folder|there is no such file"),
    ("s3://other/texts", r"^--data s3://other/texts: there is no such bucket"),
    ("s3://bucket/data/*.none", r"there is no such file or folder$"),
])  # fmt: skip
@pytest.mark.usefixtures("stored")
def test_what_cannot_be_read_is_one_line(source, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(source)
    assert "\n" not in str(caught.value)


def test_a_sidecar_that_does_not_fit_is_refused(stored):
    stored.put("data/corpus/train.bin", stored.content("data/corpus/train.bin")[:-1])
    with pytest.raises(ValueError, match=r"^s3://bucket/data/corpus/train.bin has \d+ uint8 token ids, but"):
        load("s3://bucket/data/corpus")


def run_steps(text, steps, ahead=3, rows=range(COUNT)):
    """The waits of a loop of steps that take as long as reading what is ahead of them."""
    reader = ReadAhead(text, 7, COUNT, SEQ_LEN, rows, steps)
    reader.ahead = min(reader.ahead, ahead)
    reader.fill(2)
    for step in range(2, steps):
        found = reader.batch(step)
        assert equal([found], [text.batch(7, step, COUNT, SEQ_LEN, rows)])
        for future in [*reader._coming.values()]:
            future.result()
    assert not reader._coming
    return reader.take_waits()


def test_no_step_waits_if_the_store_is_slow_but_fast_enough(stored):
    """Each read takes 50 ms, and a step at least as long as the reads of one step."""
    stored.fault = slow(0.05)
    assert run_steps(load("s3://bucket/data/bare.bin"), 7) == 0
    reader = ReadAhead(load("s3://bucket/data/bare.bin"), 7, COUNT, SEQ_LEN, range(COUNT), 9)
    reader.batch(0)
    assert reader.take_waits() == 1 and reader.take_waits() == 0


def test_only_the_windows_of_the_steps_are_read_and_none_is_kept(stored):
    """A corpus may be larger than the disk, and than memory."""
    text = load("s3://bucket/data/bare.bin")
    stored.bytes_read = 0
    run_steps(text, 10, rows=range(1, COUNT))
    assert stored.bytes_read == 2 * 8 * (COUNT - 1) * (SEQ_LEN + 1) < TOKENS / 4  # ahead, and to compare
    assert not [path for path in Path(os.environ["TMPDIR"]).rglob("*.bin") if path.is_file()]


@pytest.mark.parametrize("arguments", [
    ["prepare", "s3://bucket/notes", "--out", "corpus"], ["prepare", "notes", "--out", "s3://bucket/corpus"],
    ["check", "s3://bucket/corpus/train.bin"],
])  # fmt: skip
def test_commands_for_local_files_refuse_urls(arguments, capsys):
    assert main(["data", *arguments]) == 2
    printed = capsys.readouterr().err
    assert "is a URL: this command reads and writes local files only" in printed and printed.count("\n") == 1


def test_local_data_is_not_read_ahead(corpus):
    ahead = ReadAhead(load(str(corpus / "bare.bin")), 7, COUNT, SEQ_LEN, range(COUNT), 10)
    ahead.fill(0)
    assert equal([ahead.batch(5)], [load(str(corpus / "bare.bin")).batch(7, 5, COUNT, SEQ_LEN)])
    assert ahead.ahead == 0 == ahead.take_waits() and not ahead._coming


@pytest.mark.long
def test_a_run_with_data_at_a_url_computes_the_same_and_counts_waits(stored, corpus, tmp_path):
    stored.fault = first(10, 503)
    small = {"model": SHALLOW, "steps": 3}
    local = settings(tmp_path / "local", data=(f"{corpus}/corpus", f"{corpus}/texts/*.md=3"), **small)
    remote = change(
        local, data=("s3://bucket/data/corpus", "s3://bucket/data/texts/*.md=3"), out=str(tmp_path / "remote")
    )
    expected = run_ranks(2, train, local)[0]
    found = run_ranks(2, in_environment, access(stored), train, remote)[0]
    assert losses(found) == losses(expected) and losses(found, "validation_loss") == losses(expected, "validation_loss")
    assert losses(found, "data_waits") == {1: 0, 2: 0, 3: 0} and losses(expected, "data_waits") == {}
