"""The error that ends a rank, as torchrun reports it."""

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from moe_dualpipe.health.report import report_error


def test_torchrun_reports_the_line_that_a_rank_printed(tmp_path, monkeypatch, capfd):
    file, line = str(tmp_path / "error.json"), "train.py: error: own.py:7 in Own.forward: KeyError: 'a'"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
    report_error(f"Traceback\n{line}\n")  # torchrun would print it again below the rank's own
    assert not (tmp_path / "error.json").exists()
    report_error(f"{line}\n")
    assert capfd.readouterr().err == f"Traceback\n{line}\n{line}\n"
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=1, error_file=file)
    assert f"traceback : {line}\n" in str(ChildFailedError("train.py", {1: failure}))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    report_error(f"{line}\n")  # prints, and does not fail
