"""Elastic runs: options for another number of processes, the same sequences in the same steps, and the agreement."""

import contextlib
import dataclasses
import io
import os
import signal
import threading
import time
from bisect import bisect_left
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_dualpipe.training.division import NoDivisionError
from moe_dualpipe.training.elastic import divide, sequences_of_step
from moe_dualpipe.training.plan import plan_run

from moe_dualpipe.data import Source, TextData
from moe_dualpipe.health.signals import Stop
from moe_dualpipe.runtime.groups import leave_store
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.runtime.versions import OtherVersionsError, other_versions
from moe_dualpipe.training import agreement, elastic, relaunch, trainer
from moe_dualpipe.training.agreement import NOTHING_AGREED, Agreed, agree, elastic_folder
from moe_dualpipe.training.loop import train_loop
from moe_dualpipe.training.step import Trainer
from tests.support.checkpoints import write_manifest
from tests.support.pretended_machines import pretend
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, change, losses, records, settings

ASKED = {"pp": 2, "ep": 2, "elastic": 8, "micro_batches": 6}


def planned(config, processes, agreed=NOTHING_AGREED):
    return plan_run(config, Launch(0, 0, processes, processes), agreed=agreed)


# ---- Options ----


def test_options_for_other_processes_keep_the_batch(tmp_path):
    config = settings(tmp_path, model=MODEL, micro_batch_size=3, **ASKED)
    for processes, (pp, ep, schedule, micro_batches) in {
        8: (2, 2, "dualpipe", 6), 4: (2, 2, "dualpipe", 12), 2: (2, 1, "dualpipe", 24), 6: (3, 2, "1f1b", 12),
        3: (3, 1, "1f1b", 24), 1: (1, 1, "dualpipev", 24),
    }.items():  # fmt: skip
        plan = planned(config, processes)
        parallel, layout = plan.config.parallel, plan.setup.layout
        assert (parallel.pp, parallel.ep, parallel.schedule) == (pp, ep, schedule)
        assert plan.config.batch.micro_batches == plan.setup.schedule.num_micro_batches == micro_batches
        assert (layout.pp, layout.dp * layout.pp, layout.ep) == (pp, processes, ep)
        assert layout.dp * micro_batches == 4 * 6 and plan.sequences == 6 * 3


def test_the_line_says_what_was_what_is_and_why(tmp_path):
    config = settings(tmp_path, model=MODEL, **ASKED)
    asked = "dualpipe over 2 pipeline x 4 data-parallel ranks, experts over 2, 6 micro-batches each"
    four = "dualpipe over 2 pipeline x 2 data-parallel ranks, experts over 2, 12 micro-batches each"
    three = "1f1b over 3 pipeline x 1 data-parallel ranks, 24 micro-batches each"
    for processes, before, text in (
        (8, "", ""), (8, asked, ""), (4, four, ""),
        (4, "", f"elastic: 4 processes: {four}; asked for with --elastic 8: {asked}"),
        (4, three, f"elastic: 4 processes: {four}; before: {three}"),
        (3, four, f"elastic: 3 processes: {three} (--pp 2 does not divide 3 processes); before: {four}"),
        (8, four, f"elastic: 8 processes: {asked}; before: {four}"),
    ):  # fmt: skip
        assert divide(config, processes, Agreed(before=before))[1].text == text


def test_without_the_option_a_contradiction_is_an_error_and_so_are_contradictory_options_for_it(tmp_path):
    config = settings(tmp_path, **ASKED)
    with pytest.raises(ValueError, match="--pp 2 does not divide the number of processes, 3"):
        planned(change(config, elastic=None), 3)
    with pytest.raises(ValueError, match="--pp 3 does not divide the number of processes, 8"):
        planned(change(config, pp=3), 8)
    with pytest.raises(ValueError, match="--elastic 8: 2 layers cannot be divided over 4 pipeline stages"):
        planned(change(config, schedule="dualpipev"), 8)
    with pytest.raises(ValueError, match="--elastic must be at least 1: got -1"):
        planned(change(config, elastic=-1), 1)
    with pytest.raises(NoDivisionError, match="over 5 processes: use 2, 3, 4, 6, 8, 12 processes"):
        planned(config, 5)


def test_a_division_must_fit_into_memory_by_the_estimate(tmp_path):
    config = settings(tmp_path, model=MODEL, pp=2, elastic=4, micro_batches=8)
    needed = {}
    for pp in (1, 2, 4):
        division = dataclasses.replace(elastic.division_asked_for(config), pp=pp, dp=4 // pp, schedule="1f1b")
        problem = elastic.memory_problem(config, division, 0)
        assert problem.startswith(str(division)) and problem.endswith("0.0 GiB are free")
        needed[pp] = bisect_left(range(1 << 26), 1, key=lambda b, d=division: not elastic.memory_problem(config, d, b))
    assert needed[4] < needed[2] < needed[1]
    assert planned(config, 2, Agreed(free=1 << 30)).setup.layout.pp == 2
    assert planned(config, 4, Agreed(free=0)).setup.layout.pp == 2  # as asked for
    with pytest.raises(NoDivisionError, match=r"needs 0.0 GiB on a rank, and 0.0 GiB are free, and no other division"):
        planned(config, 2, Agreed(free=0))
    assert planned(change(config, check_memory=False), 2, Agreed(free=0)).setup.layout.pp == 2


def test_experts_are_placed_by_a_file_only_for_the_ranks_that_it_is_for(tmp_path):
    config = settings(tmp_path, place_experts="file.json", move_experts_every=5, **ASKED)
    kept, other = (divide(config, processes, Agreed())[0].parallel for processes in (4, 2))
    assert (kept.place_experts, kept.move_experts_every) == ("file.json", 5)
    assert (other.ep, other.place_experts, other.move_experts_every) == (1, None, None)


# ---- Batches ----


@pytest.mark.parametrize("sources", [1, 2])
def test_any_division_reads_the_same_sequences(sources):
    streams = [np.random.default_rng(i).integers(0, 256, 5000) for i in range(sources)]
    text = TextData(tuple(Source(str(i), 1.0 + i, s, s, "") for i, s in enumerate(streams)))
    for step in (0, 9):
        whole, labels = sequences_of_step(text, 3, step, 0, 24, 6, 4)
        assert torch.equal(whole, torch.cat([text.batch(3, step, rank, 6, 4)[0] for rank in range(4)]))
        assert len({tuple(row) for row in whole.tolist()}) > 20
        for dp in (1, 2, 3, 4, 6, 8, 12, 24):
            parts = [sequences_of_step(text, 3, step, rank * 24 // dp, 24 // dp, 6, 4) for rank in range(dp)]
            inputs, outputs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            assert torch.equal(inputs, whole) and torch.equal(outputs, labels)


class LostError(Exception):
    """Stands for the loss of all processes."""


def attempt_of(rank, config, lost, stopped):
    """An attempt of a run, without torchrun: it is lost after step `lost`, or stopped after step `stopped`.

    Returns what this rank reads of each step, (number of the first sequence, sequences), and what it prints.
    """
    size, read = dist.get_world_size(), {}
    folder = elastic_folder(config)
    agreed = Agreed(resume=agreement.newest_checkpoint(folder), before=agreement.last_division(folder))
    dist.barrier()
    found = Trainer(plan_run(config, Launch(rank, rank, size, size), agreed=agreed))
    train_step = found.step

    def noted(text, seed, step, first, count, drawn, seq_len):
        batch = sequences_of_step(text, seed, step, first, count, drawn, seq_len)
        read[step + 1] = first, batch[0].tolist()
        return batch

    def limited(step):
        if step == lost:
            raise LostError
        if step + 1 == stopped:
            found.request_stop()
        return train_step(step)

    found.step = limited
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(trainer, "sequences_of_step", noted)
        with contextlib.suppress(LostError):
            train_loop(found)
    return read, printed.getvalue()


def sequences_read(attempts):
    """The sequences of each step in all attempts: a list of (first, sequence) without repetitions of other ranks."""
    steps = {}
    for attempt in attempts:
        whole = {}
        for read, _ in attempt:
            for step, (first, rows) in read.items():
                whole.setdefault(step, {}).update({first + i: tuple(row) for i, row in enumerate(rows)})
        for step, rows in whole.items():
            steps.setdefault(step, []).append([rows[i] for i in sorted(rows)])
    return steps


@pytest.mark.parametrize("changes,attempts", [
    ({"pp": 2}, [(4, 3, None), (2, None, 4), (3, None, 5), (4, None, None)]),
    ({"pp": 1, "ep": 2, "micro_batches": 3}, [(4, None, 2), (3, 5, None), (4, None, None)]),
], ids=["pp", "ep"])  # fmt: skip
@pytest.mark.quick("ep")
def test_a_run_goes_on_with_the_same_sequences_and_losses(tmp_path, changes, attempts):
    base = {"model": MODEL, "micro_batches": 4, "steps": 6, "seq_len": 16, "save_every": 2, "save_async": False}
    config = settings(tmp_path / "run", **{**base, "elastic": 4, **changes})
    read = [run_ranks(size, attempt_of, config, lost, stopped) for size, lost, stopped in attempts]
    whole = run_ranks(4, attempt_of, change(config, out=str(tmp_path / "whole")), None, None)
    expected, found = sequences_read([whole]), sequences_read(read)
    assert sorted(found) == sorted(expected) == [*range(1, 7)]
    assert all(rows == expected[step][0] for step, repeated in found.items() for rows in repeated)
    lost_steps = {step for step, repeated in found.items() if len(repeated) > 1}
    assert lost_steps == {3} if changes["pp"] == 2 else lost_steps == {5}
    run, plain = records(tmp_path / "run"), records(tmp_path / "whole")
    assert [losses(run, "tokens")[step] for step in range(1, 7)] == [losses(plain, "tokens")[1]] * 6
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
    first = next(step for size, lost, stopped in attempts for step in (stopped, lost and lost - lost % 2) if step)
    for step in range(1, first + 1):
        assert losses(run)[step] == losses(plain)[step]  # in the same division, bit for bit
    divisions = [record["division"].split(" data")[0] for record in run if "division" in record]
    assert len(divisions) == len(attempts) and divisions[0] == divisions[-1] != divisions[1]
    said = [[line for line in attempt[0][1].splitlines() if line.startswith("elastic: ")] for attempt in read]
    assert said[0] == [] and said[1][0].startswith(f"elastic: {attempts[1][0]} processes: {divisions[1]}")
    assert [len(lines) for lines in said[1:]] == [1] * (len(attempts) - 1)


def test_a_run_that_is_lost_and_goes_on_in_the_same_division_is_bit_equal(tmp_path):
    config = settings(tmp_path / "run", pp=2, elastic=2, steps=5, save_every=2, save_async=False)
    for lost in (4, None):
        run_ranks(2, attempt_of, config, lost, None)
    run_ranks(2, attempt_of, change(config, out=str(tmp_path / "whole"), elastic=None), None, None)
    assert losses(records(tmp_path / "run")) == losses(records(tmp_path / "whole"))


# ---- The agreement ----


def agreed_rank(rank, config, machines, own):
    with pytest.MonkeyPatch.context() as monkeypatch:
        launch = pretend(rank, machines, monkeypatch)
        monkeypatch.setenv(agreement.SEPARATE_STORE, "1")
        if rank in own:
            for name, value in own[rank].items():
                monkeypatch.setattr(agreement, name, lambda *_, value=value: value)
        try:
            agreed = agree(config, launch)
        except (ValueError, RuntimeError) as error:
            return type(error).__name__, str(error), getattr(error, "machines", None)
        leave_store(agreed.store, rank, launch.world_size, 60)  # it ends with `agreed`, and other ranks still read
        return agreed.free, agreed.resume and agreed.resume.name, agreed.before


def test_ranks_agree_on_the_least_memory_and_on_the_checkpoint_that_the_first_one_sees(tmp_path):
    config = settings(tmp_path, elastic=2)
    for step in (2, 4):
        write_manifest(tmp_path / "checkpoints" / f"step-{step:06d}", step)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "division": "one"}\n{"step": 2, "division": "two"}\n')
    own = {0: {"_free_memory": 900}, 1: {"_free_memory": 700}, 2: {"_free_memory": None}}
    own[1] |= {"newest_checkpoint": tmp_path / "checkpoints" / "step-000002", "last_division": "another"}
    assert run_ranks(3, agreed_rank, config, "abc", own) == [(700, "step-000004", "two")] * 3
    gone = {0: {"newest_checkpoint": tmp_path / "checkpoints" / "step-000006"}}
    for kind, text, _ in run_ranks(2, agreed_rank, config, "ab", gone):
        assert kind == "ValueError" and "step-000006 is not on " in text and "a folder that all machines share" in text


def test_a_machine_with_other_versions_is_named_to_all(tmp_path):
    own = {1: {"own_versions": {"moe-dualpipe": "0.1.0", "torch": "2.10.0"}}}
    found = run_ranks(3, agreed_rank, settings(tmp_path, elastic=3), "abc", own)
    assert {kind for kind, *_ in found} == {"OtherVersionsError"} and len({text for _, text, _ in found}) == 1
    assert found[0][1].startswith("b has torch 2.10.0, but ") and found[0][2] == ("b",)


def test_which_machines_are_odd():
    new, old = {"moe-dualpipe": "2", "torch": "3"}, {"moe-dualpipe": "1", "torch": "3"}
    assert other_versions([("a", new), ("b", new)]) == ("", [])
    assert other_versions([("a", old), ("b", new), ("c", new)]) == (
        "a has moe-dualpipe 1, but 2 is on most, such as b: install the same version", ["a"],
    )  # fmt: skip
    assert other_versions([("a", old), ("b", new)])[1] == ["b"]  # of two, the second
    both, odd = other_versions([("a", new), ("b", {"moe-dualpipe": "1", "torch": "0"}), ("c", old), ("d", new)])
    assert odd == ["b", "c"]
    assert both.startswith("b has moe-dualpipe 1 and torch 0 (also others: c), but 2 and 3 is on most, such as a")


def test_options_that_cannot_work(tmp_path, monkeypatch):
    alone, two = Launch(0, 0, 1, 1), Launch(0, 0, 2, 1)
    assert agree(settings(tmp_path), two) is NOTHING_AGREED
    config = settings(tmp_path, elastic=2)
    assert agree(config, alone).resume is None
    monkeypatch.delenv(agreement.SEPARATE_STORE, raising=False)
    with pytest.raises(ValueError, match="needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun"):
        agree(config, two)
    with pytest.raises(ValueError, match="--elastic needs --out: a machine that is added later"):
        agree(change(config, out=None), alone)
    step = tmp_path / "checkpoints" / "step-000002"
    write_manifest(step, 2)
    with pytest.raises(ValueError, match=r"goes on from the newest checkpoint of .*: use another --out to start at"):
        agree(change(config, resume=str(step)), alone)
    assert agree(change(config, out=None, resume=str(tmp_path)), alone).resume == step
    other = str(tmp_path / "other")
    start = change(config, out=other, resume=str(step))
    assert agree(start, alone).resume is None and elastic_folder(start) == Path(other)


# ---- The end ----


def test_a_stopped_rank_waits_for_the_signal_of_its_own_launcher(capfd):
    with Stop().on_signals() as stop:
        stop.completes = "this step and a checkpoint"
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        relaunch.end_after_stop(stop, 0, 20)
        timer.join()
    assert stop.requested and capfd.readouterr().err == ""
    with pytest.raises(SystemExit) as ended:
        relaunch.end_after_stop(Stop(), 3, 0.1)
    assert ended.value.code == 1
    assert capfd.readouterr().err.endswith("rank 3 stops: a machine leaves; torchrun starts the others again\n")


def test_a_run_without_a_division_waits_for_other_machines(capfd, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for launch in (Launch(0, 0, 2, 1), Launch(1, 0, 2, 1), Launch(0, 0, 2, 2)):
        with pytest.raises(SystemExit) as ended:
            relaunch.end_without_division(NoDivisionError("no"), launch, 30)
        assert ended.value.code == 2
    assert slept == [30, 30, 0]
    first, last = capfd.readouterr().err.splitlines()
    assert first.endswith("error: no; waiting 30 s for other machines") and last.endswith("error: no")


@pytest.mark.parametrize("elastic_run,machine,code,leaves", [
    (True, "b", 1, True), (True, "a", 1, False), (False, "b", 2, False),
])  # fmt: skip
def test_of_an_elastic_run_only_the_odd_machine_leaves(monkeypatch, capfd, elastic_run, machine, code, leaves):
    signals = []
    monkeypatch.setattr(os, "kill", lambda *sent: signals.append(sent))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for local_rank in (0, 1):
        with pytest.raises(SystemExit) as ended:
            error = OtherVersionsError("b has torch 1", ["b"])
            relaunch.end_with_other_versions(error, machine, Launch(local_rank, local_rank, 4, 2), elastic_run)
        assert ended.value.code == code
    assert signals == ([(os.getppid(), signal.SIGTERM)] if leaves else [])
    assert capfd.readouterr().err.count("error: b has torch 1\n") == 1
