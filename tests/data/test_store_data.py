"""Training data at a URL: the same batches as from a folder, copied once for all ranks of a machine."""

import numpy as np
import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.data import load_data, prepare_data
from moe_dualpipe.data.stores import copies

SEQ_LEN = 32


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder as `moe-dualpipe data prepare` writes it, a bare file of token ids, and some texts."""
    base = tmp_path_factory.mktemp("data")
    (base / "texts").mkdir()
    for i in range(3):
        (base / "texts" / f"{i}.md").write_text(f"text {i} " * 400)
    (base / "texts" / "rows.jsonl").write_text('{"text": "a row of text"}\n' * 300)
    prepare_data([str(base / "texts" / "*.md")], base / "corpus", "bytes", 1, "text")
    np.random.default_rng(1).integers(0, 256, 100_000).astype("<u1").tofile(base / "bare.bin")
    return base


@pytest.fixture
def stored(corpus, s3):
    s3.put_folder(corpus, "data")
    s3.reset_faults()
    return s3


def load(source):
    return load_data(source, SEQ_LEN, dtype="uint8")


def batches(text):
    return [text.batch(7, step, 3, SEQ_LEN)[0] for step in range(3)] + [text.held_out_batch(0, 4, 4, SEQ_LEN)[0]]


@pytest.mark.parametrize("name", ["corpus", "bare.bin", "texts/rows.jsonl", "texts"])
def test_a_url_gives_the_batches_of_the_same_files_in_a_folder(corpus, stored, name):
    local, remote = load(f"{corpus}/{name}=2"), load(f"s3://bucket/data/{name}=2")
    assert all(one.equal(other) for one, other in zip(batches(local), batches(remote), strict=True))
    assert local.fingerprint() == remote.fingerprint()
    assert remote.description.replace("s3://bucket/data", str(corpus)) == local.description
    read = stored.bytes_read
    load(f"s3://bucket/data/{name}")
    assert stored.bytes_read == read > 0  # nothing is copied again


@pytest.mark.parametrize("source,message", [
    ("s3://bucket/data/none", r"^--data s3://bucket/data/none: there is no such file$"),
    ("s3://other/texts", r"^--data s3://other/texts: there is no such bucket"),
    ("s3://bucket/data/*.md", r"there is no such file$"),
])  # fmt: skip
@pytest.mark.usefixtures("stored")
def test_what_cannot_be_read_is_one_line(source, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(source)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line_that_says_where_the_copies_are(s3, monkeypatch):
    s3.put("fresh/train.bin", b"123")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copies, "read_parts", full)
    with pytest.raises(ValueError, match=r"^--data s3://bucket/fresh cannot be copied: No space .*TMPDIR"):
        load("s3://bucket/fresh")


@pytest.mark.parametrize("arguments", [
    ["prepare", "s3://bucket/notes", "--out", "corpus"], ["prepare", "notes", "--out", "s3://bucket/corpus"],
    ["check", "s3://bucket/corpus/train.bin"],
])  # fmt: skip
def test_commands_for_local_files_refuse_urls(arguments, capsys):
    assert main(["data", *arguments]) == 2
    printed = capsys.readouterr().err
    assert "is a URL: this command reads and writes local files only" in printed and printed.count("\n") == 1
