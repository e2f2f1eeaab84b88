"""Runs that go on with other processes: the same sequences in the same steps, and what the ranks agree on."""

import contextlib
import io
import re

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.checkpoint import list_checkpoints
from moe_dualpipe.runtime.groups import leave_store
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.runtime.topology import other_versions
from moe_dualpipe.training import Trainer, restart
from moe_dualpipe.training.loop import train_loop
from moe_dualpipe.training.restart import agree
from moe_dualpipe.training.run import _open_folder
from tests.support.checkpoints import write_manifest
from tests.support.pretended_machines import pretend
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL, losses, make_run, note_sequences, records, sequences

RUN = [
    *map(str, SMALL), "--batch-size", "12", "--seq-len", "16", "--sample-tokens", "0",
    "--device", "cpu", "--steps", "5", "--set", "metrics.eval_sequences=1",
]  # fmt: skip


def attempt_of(rank, arguments, stop=None, restarted=False):
    """Do what train.py does, up to step `stop`. restarted: as if the launcher had begun the run before.

    Returns the layout, the sequences that this rank reads in each step, and what it prints.
    """
    size = dist.get_world_size()
    launch = Launch(rank, rank, size, size)
    newest = (lambda folder: list_checkpoints(folder / "checkpoints")[0]) if restarted else lambda _: None
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(restart, "newest_checkpoint", newest)
        run = make_run(arguments, rank, size)
        _open_folder(run, launch)
        dist.barrier()
        trainer = Trainer(run)
        read = note_sequences(trainer)
        train_loop(trainer, callbacks=[lambda one, record: record["step"] == stop and one.request_stop()])
    return (run.layout.pp, run.layout.dp, run.layout.ep), read, printed.getvalue()


def whole_and_first(rank, whole, first, stop):
    """A run without a stop, and the first attempt of another, on the same ranks."""
    return attempt_of(rank, whole), attempt_of(rank, first, stop)


@pytest.mark.parametrize("attempts", [
    [(4, 2, False), (2, 3, False), (6, 4, False), (3, None, False)],
    [(4, 2, False), (3, None, True)],
], ids=["resumed", "restarted"])  # fmt: skip
@pytest.mark.quick("restarted")
def test_a_run_goes_on_with_other_ranks_with_the_same_sequences_and_losses(tmp_path, attempts):
    start = [*RUN, "--pp", "2", "--ep", "2", "--out", str(tmp_path / "run")]
    seen, found, printed = [], {}, []
    whole, first = zip(
        *run_ranks(4, whole_and_first, [*start, "--out", str(tmp_path / "whole")], start, 2), strict=True
    )
    for number, (processes, stop, restarted) in enumerate(attempts):
        arguments = ["--resume", str(tmp_path / "run")] if not restarted else start
        ranks = run_ranks(processes, attempt_of, arguments, stop, restarted) if number else first
        seen.append(ranks[0][0])
        found |= sequences([read for _, read, _ in ranks])
        printed.append(ranks[0][2])
    assert found == sequences([read for _, read, _ in whole]) and [*found] == [*range(1, 6)]
    run, plain = losses(records(tmp_path / "run")), losses(records(tmp_path / "whole"))
    assert run == pytest.approx(plain, rel=1e-5) and [*run] == [*range(1, 6)]
    assert all(run[step] == plain[step] for step in (1, 2))
    assert seen[0] == (2, 2, 2)
    for (pp, dp, ep), (processes, _, restarted) in zip(seen, attempts, strict=True):
        assert pp * dp == processes and dp % ep == 0
        assert (pp, dp, ep) == seen[0] or processes < 4 or not restarted  # the launcher asks for the same again
    assert "another layout" not in printed[0]
    assert re.search(r"using another layout, because --(ep|pp) 2 does not divide ", printed[1])
    for text, step in zip(printed[1:], (stop for _, stop, _ in attempts[:-1]), strict=True):
        assert f"resumed from {tmp_path}/run/checkpoints/step-{step:06d}, steps {step + 1} to 5" in text


# ---- The agreement ----


def agreed_rank(rank, folder, machines, own):
    with pytest.MonkeyPatch.context() as monkeypatch:
        launch = pretend(rank, machines, monkeypatch)
        free, newest = own[rank]
        monkeypatch.setattr(restart, "_free", lambda *_: free)
        monkeypatch.setattr(restart, "newest_checkpoint", lambda _: newest)
        try:
            agreed = agree(folder, torch.device("cpu"), launch, 60)
        except ValueError as error:
            return str(error)
        assert agreed.store is not None
        leave_store(agreed.store, rank, launch.world_size, 60)  # it ends with `agreed`, and other ranks still read
        return agreed.free, agreed.resume and agreed.resume.name, str(agreed.folder)


def test_ranks_agree_on_the_least_memory_and_on_the_checkpoint_that_one_of_them_knows(tmp_path):
    """A machine that was added knows of no earlier attempt."""
    step = tmp_path / "checkpoints" / "step-000004"
    write_manifest(step, 4)
    own = [(900, None), (700, step), (None, None)]
    assert run_ranks(3, agreed_rank, tmp_path, "abc", own) == [(700, "step-000004", str(tmp_path))] * 3
    assert run_ranks(2, agreed_rank, tmp_path, "ab", [(None, None)] * 2) == [(None, None, str(tmp_path))] * 2
    gone = [(None, tmp_path / "checkpoints" / "step-000006"), (None, None)]
    for text in run_ranks(2, agreed_rank, tmp_path, "ab", gone):
        assert text.endswith("step-000006 cannot be read here: --out must be a folder or URL that all machines share")


def test_which_machines_are_odd():
    new, old = {"moe-dualpipe": "2", "torch": "3"}, {"moe-dualpipe": "1", "torch": "3"}
    assert other_versions([("a", new), ("b", new)]) == ""
    assert other_versions([("a", old), ("b", new), ("c", new)]) == (
        "a has moe-dualpipe 1, but 2 is on most, such as b: install the same version"
    )
    assert other_versions([("a", old), ("b", new)]).startswith("b has")  # of two, the second
    both = other_versions([("a", new), ("b", {"moe-dualpipe": "1", "torch": "0"}), ("c", old), ("d", new)])
    assert both.startswith("b has moe-dualpipe 1 and torch 0 (also others: c), but 2 and 3 is on most, such as a")
