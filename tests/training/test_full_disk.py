"""A full disk and a removed folder: training continues, and what can be written later is written later."""

import contextlib
import errno
import os
import subprocess
from pathlib import Path

import pytest

from moe_dualpipe.training import restart
from moe_dualpipe.training.metrics import Metrics, read_records


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with contextlib.ExitStack() as unmount:
        try:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("cannot mount a file system")
        unmount.callback(subprocess.run, ["umount", "-l", folder], check=True)
        yield folder


def test_records_wait_until_there_is_space(small_disk, capfd):
    ballast, out = small_disk / "ballast", small_disk / "run"
    writer = Metrics(out)
    writer.write(step=1)
    with contextlib.suppress(OSError):
        ballast.write_bytes(bytes(1 << 20))
    for step in range(2, 500):
        writer.write(step=step, save_error="x" * 20)
    found = [record["step"] for record in read_records(out)]
    assert found == [*range(1, len(found) + 1)]
    assert 1 < len(found) < 499
    assert (out / "metrics.jsonl").read_text().endswith("}\n"), "part of a record was left"
    ballast.unlink()
    writer.write(step=500)
    writer.close()
    assert [record["step"] for record in read_records(out)] == [*range(1, 501)]
    problem = f"{out}/metrics.jsonl cannot be written: No space left on device; the run continues and tries again"
    assert capfd.readouterr().err == f"\ntrain.py: warning: {problem}\n"


def test_a_resumed_run_removes_repeated_records_as_soon_as_it_can(tmp_path, monkeypatch, capfd):
    path = tmp_path / "metrics.jsonl"
    old = '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st'
    path.write_text(old)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full_disk)
        writer = Metrics(tmp_path, first_step=1)
        writer.write(step=2, again=True)
        assert path.read_text() == old
        assert list(tmp_path.iterdir()) == [path]
    writer.write(step=3, again=True)
    writer.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2, "again": true}\n{"step": 3, "again": true}\n'
    assert capfd.readouterr().err.count("No space left on device") == 1


def test_a_launcher_file_is_written_or_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for method in ("mkdir", "touch"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, full_disk)
            with pytest.raises(ValueError, match=r"cannot write .*launchers/.*json: No space left on device"):
                restart.mark_folder(tmp_path, 0)
    restart.mark_folder(tmp_path, 0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restart.is_own_folder(tmp_path)
