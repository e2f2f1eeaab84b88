"""The files of a source: each once, whatever the links, and nothing but regular files."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.data import load_data, prepare_data
from moe_dualpipe.data.documents import Documents
from moe_dualpipe.data.find import find_files


def found(source) -> list[str]:
    return [str(path) for path in find_files(str(source), f"--data {source}")[0]]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a/x.md", "a/b/y.md", "a/b/z.txt", "a/.hidden/h.md", "a/b/.h.md", "c/x.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name * 9)
    return tmp_path


@pytest.mark.parametrize("source,expected", [
    ("a", ["a/b/y.md", "a/b/z.txt", "a/x.md"]),
    ("a/x.md", ["a/x.md"]),
    ("*/x.md", ["a/x.md", "c/x.md"]),
    ("**/*.md", ["a/b/y.md", "a/x.md", "c/x.md"]),
    ("a/**", ["a/b/y.md", "a/b/z.txt", "a/x.md"]),
    ("**/b/**/*.md", ["a/b/y.md"]),
    ("./a//**/../b/?.md", ["a/b/y.md"]),
    ("a/.hid*/*.md", ["a/.hidden/h.md"]),
    ("a/b/.*", ["a/b/.h.md"]),
    ("[ac]/*.md", ["a/x.md", "c/x.md"]),
])  # fmt: skip
def test_patterns_match_as_in_a_shell(tree, source, expected):
    assert [os.path.normpath(path) for path in found(source)] == expected
    assert [os.path.relpath(path, tree) for path in found(tree / source)] == expected


def test_links_lead_to_each_file_once(tree):
    for i in range(3):
        Path(f"a/loop{i}").symlink_to("..")
        Path(f"a/b/up{i}").symlink_to(tree / "a")
    Path("a/again.md").symlink_to("b/y.md")
    os.link("a/x.md", "a/b/hard.md")
    Path("0").symlink_to("c")
    names = {"a/b/y.md", "a/b/z.txt", "c/x.md"}
    for source in (".", "**", str(tree), "**/*", "a/**/loop1/**/*"):
        files = {os.path.relpath(os.path.realpath(path), tree) for path in found(source)}
        assert len(files) == len(found(source)) == 4 and names < files, source
    assert found(".") == ["a/b/hard.md", "a/b/y.md", "a/b/z.txt", "c/x.md"]  # not by the names of links
    Path("c/link").symlink_to("../a/b/z.txt")
    assert found("c") == found("c/**/*") == ["c/link", "c/x.md"]
    assert found("a/again.md") == ["a/again.md"]


def test_the_time_of_a_search_does_not_grow_with_the_number_of_paths(tmp_path, monkeypatch):
    for i in range(40):  # 2**40 paths to the last folder
        (tmp_path / str(i)).mkdir()
        for name in ("a", "b"):
            (tmp_path / str(i) / name).symlink_to(f"../{i + 1}")
    (tmp_path / "40").mkdir()
    (tmp_path / "40" / "x").write_text("x")
    listed, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder) or listdir(folder))
    for source in (tmp_path, f"{tmp_path}/0/**/*", f"{tmp_path}/0/**/x"):
        listed.clear()
        assert len(found(source)) == 1
        assert len(listed) <= 2 * 42


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_folder_with_any_links_has_its_real_files_once(tmp_path_factory, data):
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
        name, target = data.draw(st.sampled_from(folders)) / f"l{i}", data.draw(st.sampled_from(folders + files))
        if target in files and data.draw(st.booleans()):
            os.link(target, name)
        else:
            name.symlink_to(target)
    keys = sorted((path.stat().st_dev, path.stat().st_ino) for path in files)
    for source in (root, f"{root}/**", f"{root}/**/*"):
        assert sorted((path.stat().st_dev, path.stat().st_ino) for path in find_files(str(source), "")[0]) == keys


# ---- Paths other than regular files ----


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
    ("fifo", "is a FIFO: name a regular file, a folder or a glob$"),
    ("socket", "is a socket: name"),
    ("/dev/zero", "is a device: name"),
    ("/dev/stdin", "is a (FIFO|device|socket): name"),
    ("null", "is a device: name"),
    ("dangling", r"is a link to a file that does not exist: nowhere\\nx$"),
    ("loop", ": Too many levels of symbolic links$"),
    ("text/below", ": no such file or folder"),
    ("/proc/kmsg", "its files are empty or not text"),
    ("/proc/self/environ", "its files are empty or not text"),
    ("/proc/self/mem", "its files are empty or not text"),
    ("a" * 5000, "a{193}…: File name too long$"),
    ("a" * 5000 + "*", "a{193}…: (File name too long|no such file)"),
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
    reasons = {"dangling": "link to a missing file", "fifo": "a FIFO", "null": "a device", "socket": "a socket"}
    reasons["loop"] = "cannot read: Too many levels of symbolic links"
    assert documents.skipped == tuple(f"{special}/{name} ({reasons[name]})" for name in sorted(reasons))
    assert load_data(f"{special}{source}", 8).description.count("\n") == 0


@pytest.mark.usefixtures("tree")
def test_unreadable_files_and_folders_are_skipped_and_named(monkeypatch):
    listdir, access = os.listdir, os.access

    def deny(folder):
        if Path(folder).name == "b":
            raise PermissionError(13, "Permission denied", str(folder))
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", deny)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("c/x.md") and access(path, mode))
    documents = Documents.find("**")
    assert [*documents.files] == [Path("a/x.md")]
    assert documents.skipped == tuple(f"{name} (cannot read: Permission denied)" for name in ("a/b", "c/x.md"))

    def fail(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(ValueError, match=r"cannot read \.: Input/output error"):
        Documents.find("**")


@pytest.mark.usefixtures("tree")
def test_a_file_that_changes_between_two_readings_is_named():
    documents = Documents.find("a")
    Path("a/b/y.md").write_text("longer " * 99)
    with pytest.raises(ValueError, match=r"^a/b/y.md was written to while it was in use \(72 bytes then, 693 now\)"):
        list(documents)
    Path("a/b/new").write_bytes(b"\xff" * len("c/x.md" * 9))
    documents = Documents.find("c/x.md")
    Path("a/b/new").replace("c/x.md")
    with pytest.raises(ValueError, match=r"^c/x.md was written to while it was in use"):
        list(documents)
