"""Files that are read: those of a source, each once; files that change meanwhile; and strict JSON."""

import os
import socket
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.data import DataFile, files, load_data, prepare_data, strict_json
from moe_dualpipe.data.documents import Documents
from tests.support.mutations import check_message


def test_the_default_text_is_the_standard_library_without_tests_and_packages():
    names = {path.name for path, _ in Documents.find("stdlib").files}
    assert len(names) > 500 and "dataclasses.py" in names and not names & {"pytest.py", "test_dataclasses.py"}


CHANGES = {
    "shorter": (lambda path: os.truncate(path, 4096), r"\(\d+ bytes then, 4096 now\)"),
    "longer": (lambda path: path.open("ab").write(b"\0\0"), r"\(\d+ bytes then, \d+ now\)"),
    "rewritten": (
        lambda path: path.write_bytes(bytes(path.stat().st_size)) and os.utime(path, ns=(0, 1)),
        r"\(\d+ byt",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_token_file_that_changes_in_place_is_named_when_a_batch_is_read(tmp_path, change):
    for name in ("train.bin", "held_out.bin"):
        (np.arange(4_000) % 251).astype("<u2").tofile(tmp_path / name)
    text, (apply, sizes) = load_data(str(tmp_path), 8), CHANGES[change]
    apply(tmp_path / "held_out.bin")
    text.batch(0, 0, 4, 8)  # the other file is as it was
    with pytest.raises(ValueError, match=f"{tmp_path}/held_out.bin was written to while it was in use {sizes}"):
        text.held_out_batch(0, 4, 4, 8)


def rename_over(old: Path, new: Path) -> None:
    """Another file takes the name of `old`."""
    part = old.with_name(f".{old.name}")
    part.write_bytes(new.read_bytes())
    part.replace(old)


TOKEN_FILES = ("held_out.bin", "train.bin.json", "train.bin", "held_out.bin.json")


@pytest.mark.parametrize(("kind", "changes"), [
    ("text", lambda old, new: [lambda: (old / "2.txt").unlink(), lambda: rename_over(old / "4.txt", new / "5.txt")]),
    ("tokens", lambda old, new: [partial(rename_over, old / name, new / name) for name in TOKEN_FILES]),
])  # fmt: skip
def test_a_source_whose_files_are_replaced_is_read_again(tmp_path, monkeypatch, kind, changes):
    """Each change is made just before a file is opened."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        text = folder if kind == "text" else tmp_path / f"text-{folder.name}"
        text.mkdir()
        for i in range(9):
            (text / f"{i}.txt").write_text(f"{folder.name} {i} " * (40 + i + 9 * (folder == new)))
        if text != folder:
            prepare_data([str(text)], folder, "bytes", 256, "text")
    left, open_file, versions = iter(changes(old, new)), DataFile.__init__, [load_data(str(old), 8).sources[0]]

    def opened(self, *arguments, **options):
        next(left, int)()
        open_file(self, *arguments, **options)

    monkeypatch.setattr(DataFile, "__init__", opened)
    (found,) = load_data(str(old), 8).sources
    assert next(left, None) is None, "not all changes were made"
    versions += load_data(str(old), 8).sources
    assert any(
        np.array_equal(found.train.streams[0][:], version.train.streams[0][:])
        and np.array_equal(found.held_out.streams[0][:], version.held_out.streams[0][:])
        for version in versions
    )


def test_reads_are_complete_or_an_error_that_names_the_file(tmp_path, monkeypatch):
    path, preadv, buffer = tmp_path / "a", os.preadv, bytearray(50)
    path.write_bytes(bytes(range(100)))

    def some_bytes(descriptor, buffers, first):
        if first > 60:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, [buffers[0][:7]], first)

    with DataFile(path) as file:
        monkeypatch.setattr(files.os, "preadv", some_bytes)
        file.read_into(3, memoryview(buffer))
        assert buffer == file.read(3, 50) == bytes(range(3, 53))
        with pytest.raises(ValueError, match=f"cannot read {path} at byte 61: Input/output error"):
            file.read(12, 60)
        monkeypatch.undo()
        with pytest.raises(ValueError, match=f"cannot read {path}: it ends at byte 100"):
            file.read(90, 20)


def found(source) -> list[str]:
    return [str(path) for path, _ in Documents.find(str(source)).files]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a/x.md", "a/b/y.md", "a/b/z.txt", "a/.hidden/h.md", "a/b/.h.md", "c/x.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name * 9)
    Path("a/empty.parquet").touch()
    return tmp_path


@pytest.mark.parametrize("source,expected", [
    ("a", ["a/b/y.md", "a/b/z.txt", "a/x.md"]),
    ("a/x.md", ["a/x.md"]),
    ("*/x.md", ["a/x.md", "c/x.md"]),
    ("**/*.md", ["a/b/y.md", "a/x.md", "c/x.md"]),
    ("a/**", ["a/b/y.md", "a/b/z.txt", "a/x.md"]),
    ("**/b/**/*.md", ["a/b/y.md"]),
    ("./a//**/?.md", ["a/b/y.md", "a/x.md"]),
    ("a/.hid*/*.md", ["a/.hidden/h.md"]),
    ("a/b/.*", ["a/b/.h.md"]),
    ("[ac]/*.md", ["a/x.md", "c/x.md"]),
])  # fmt: skip
def test_patterns_match_as_in_a_shell(tree, source, expected):
    assert found(source) == expected
    assert [os.path.relpath(path, tree) for path in found(tree / source)] == expected


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_folder_with_any_links_has_its_real_files_once(tmp_path_factory, data):
    """Also with links in circles, through which there are endless paths. A file is not named by a link to it."""
    root = tmp_path_factory.mktemp("links")
    folders = [root]
    for i in range(data.draw(st.integers(1, 5))):
        folders.append(data.draw(st.sampled_from(folders)) / f"d{i}")
        folders[-1].mkdir()
    files = []
    for i in range(data.draw(st.integers(1, 6))):
        files.append(data.draw(st.sampled_from(folders)) / f"f{i}")
        files[-1].write_text(f"text {i}")
    for i in range(data.draw(st.integers(0, 8))):
        name, target = data.draw(st.sampled_from(folders)) / f"e{i}", data.draw(st.sampled_from(folders + files))
        if target in files and data.draw(st.booleans()):
            os.link(target, name)
        else:
            name.symlink_to(target)
    keys = sorted((path.stat().st_dev, path.stat().st_ino) for path in files)
    for source in (root, f"{root}/**", f"{root}/**/*"):
        paths = [path for path, _ in Documents.find(str(source)).files]
        assert sorted((path.stat().st_dev, path.stat().st_ino) for path in paths) == keys
        assert paths == sorted(paths) and not any(path.is_symlink() for path in paths)


@pytest.mark.usefixtures("tree")
def test_a_file_that_changes_between_two_readings_or_during_one_is_named(monkeypatch):
    documents = Documents.find("a")
    Path("a/b/y.md").write_text("longer " * 99)
    with pytest.raises(ValueError, match=r"^a/b/y.md was written to while it was in use \(72 bytes then, 693 now\)"):
        list(documents)
    documents, read = Documents.find("a/x.md"), DataFile.read
    monkeypatch.setattr(DataFile, "read", lambda file, *part: (read(file, *part), os.utime(file.path, ns=(0, 1)))[0])
    with pytest.raises(ValueError, match=r"^a/x.md was written to while it was in use"):
        list(documents)


@pytest.mark.usefixtures("tree")
def test_unreadable_files_and_folders_are_skipped_and_named(monkeypatch):
    access, denied = os.access, (Path("a/b"), Path("c/x.md"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in denied and access(path, mode))
    documents = Documents.find("**")
    assert documents.skipped == tuple(f"{name} (cannot read: Permission denied)" for name in ("a/b", "c/x.md"))


# ---- Refusals ----


@pytest.fixture
def special(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    (tmp_path / "dangling").symlink_to("nowhere\nx")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "text").write_text("some text " * 9)
    return tmp_path


@pytest.mark.parametrize("name,problem", [
    *[(name, "not a regular file: name a file, a folder or") for name in ("fifo", "socket", "/dev/zero", "null")],
    ("dangling", "cannot read: No such file or directory"), ("loop", ": Too many levels of symbolic links"),
    ("text/below", ": no such file or folder"), ("/proc/kmsg", "empty or not text"), ("/proc/self/mem", "empty or not"),
    ("a" * 5000, "a{193}…: File name too long$"), ("a" * 5000 + "*", "a{193}…: (File name too long|no such file)"),
    ("a\n\x1b[31m\udcff", r"a\\n\\x1b\[31m\\udcff: no such file or folder"),
])  # fmt: skip
@pytest.mark.usefixtures("special")
def test_a_source_that_is_no_file_is_refused_in_one_line(name, problem):
    for run in (lambda: load_data(name, 8), lambda: prepare_data([name], Path("out"), "bytes", 1, "text")):
        with pytest.raises(ValueError, match=problem) as error:
            run()
        assert str(error.value).isprintable() and len(str(error.value)) < 500
    assert not Path("out").exists()


@pytest.mark.parametrize("source", ["", "/*", "/**"])
def test_special_files_in_a_folder_are_skipped_and_reported(special, source):
    documents = Documents.find(f"{special}{source}")
    assert [*documents] == ["some text " * 9]
    reasons = dict.fromkeys(("fifo", "null", "socket"), "not a regular file")
    reasons |= {"dangling": "cannot read: No such file or directory"}
    reasons |= {"loop": "cannot read: Too many levels of symbolic links"}
    assert documents.skipped == tuple(f"{special}/{name} ({reasons[name]})" for name in sorted(reasons))
    assert load_data(f"{special}{source}", 8).description.count("\n") == 0


INVALID = ("NaN", "[-Infinity]", "[1e999]", "1" * 5000, "", "[1", '{"a\x1b": 1}', "{1: 2}", "[" * 100_000, b'"\xff"')


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
        ("link", False, "it is a symbolic link"), *((name, True, "it is not a regular file") for name in ("pipe", "")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            strict_json.read_file(tmp_path / path, follow)
    monkeypatch.setattr(strict_json, "MAX_BYTES", 2)
    with pytest.raises(ValueError, match="it has more than 2 bytes"):
        strict_json.read_file(tmp_path / "file")
