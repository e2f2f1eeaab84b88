"""Signals that ask a run to stop, and a terminal that is closed."""

import io
import os
import signal
import time
from contextlib import redirect_stdout

import pytest
import torch.distributed as dist

from moe_dualpipe.health.signals import ORDERS, STOP_SIGNALS, Stop
from moe_dualpipe.training.loop import train_loop
from tests.support import ranks
from tests.support.killed_runs import Processes, newest
from tests.support.ranks import run_ranks, started
from tests.support.runs import losses, make_trainer, records, settings


@pytest.mark.parametrize("number,signalled", [
    (signal.SIGTERM, [1]), (signal.SIGINT, [0, 1]), (signal.SIGUSR1, [0]), (signal.SIGHUP, [1]),
])  # fmt: skip
@pytest.mark.quick("15-signalled0", "2-signalled1")
def test_a_signal_to_any_rank_stops_all_after_the_same_step_and_a_checkpoint(tmp_path, number, signalled):
    config = settings(tmp_path / "run", steps=12, seq_len=16, eval_sequences=1)
    with Processes(2, config) as run:
        run.wait_for_steps(2)
        for rank in signalled:
            run.kill(rank, number)
        assert run.exit_codes(0, 1) == [0, 0]
        done = int(newest(config.checkpoint.out)[-6:])
        assert list(losses(records(config.checkpoint.out))) == list(range(1, done + 1)) and done < 12
        assert f"stopped after step {done}, saved {newest(config.checkpoint.out)}, to resume: " in run.output(0)
        assert f" --resume {config.checkpoint.out} --steps 12\n" in run.output(0)
        repeat = "; repeat to stop now" * (number in ORDERS)
        assert f"{number.name}: stopping after this step and a checkpoint{repeat}\n" in run.output(signalled[0])


def stuck_in_cpp(port, completes, log):
    os.dup2(os.open(log, os.O_WRONLY), 2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with Stop().on_signals() as stop:
        stop.completes = completes
        store.set("ready", "yes")
        store.get("never")


@pytest.mark.parametrize("completes", ["this step and a checkpoint", ""])
def test_a_second_signal_ends_a_process_that_is_stuck_in_cpp_and_the_first_one_before_training(completes, tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    log = tmp_path / "log"
    log.touch()
    with started(stuck_in_cpp, [(store.port, completes, log)]) as [process]:
        store.wait(["ready"])
        if completes:
            os.kill(process.pid, signal.SIGTERM)
            while "SIGTERM: stopping after this step and a checkpoint; repeat to stop now\n" not in log.read_text():
                assert process.is_alive()
                time.sleep(0.01)
        os.kill(process.pid, signal.SIGTERM)
        process.join(30)
        assert process.exitcode == 128 + signal.SIGTERM


def listening(connection):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    stop = Stop()
    stop.completes = "this step"
    with stop.on_signals():
        connection.send(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
        while connection.recv():
            connection.send(stop.requested)


def test_announcements_may_be_repeated_and_nohup_keeps_its_meaning():
    """The kernel sends SIGXCPU every second."""
    ours, theirs = ranks._context.Pipe()
    with started(listening, [(theirs,)]) as [process]:
        assert ours.recv()
        announcements = [number for number in STOP_SIGNALS if number not in (*ORDERS, signal.SIGHUP)]
        assert len(announcements) == 3
        for number in [*announcements * 2, signal.SIGTERM, *announcements]:
            os.kill(process.pid, number)
            seen = False
            while not seen:
                ours.send(True)
                assert ours.poll(30), f"the process has ended after {number}"
                seen = ours.recv()
        os.kill(process.pid, signal.SIGINT)
        process.join(30)
        assert process.exitcode == 128 + signal.SIGINT


def stop_in(rank, config, method):
    """A run of which rank 1 gets a request to stop in the last call of a method. Returns what it printed."""
    trainer = make_trainer(rank, config)
    call, calls = getattr(trainer, method), []

    def stopping(*arguments):
        calls.append(arguments)
        trainer.stop.requested |= rank == 1 and len(calls) == 2
        return call(*arguments)

    setattr(trainer, method, stopping)
    with redirect_stdout(io.StringIO()) as printed:
        train_loop(trainer)
    assert trainer.progress.saves > 4 and trainer.progress.saving == ""  # the saves of a run are watched
    return printed.getvalue()


@pytest.mark.parametrize("method", ["step", "validation_loss"])
def test_a_request_at_the_end_is_followed_by_the_last_checkpoint_and_no_sample(tmp_path, method):
    config = settings(tmp_path / "run", steps=2, seq_len=16, sample_tokens=4, eval_sequences=1)
    printed = run_ranks(2, stop_in, config, method)[0]
    assert newest(tmp_path / "run").endswith("step-000002")
    assert "sample:" not in printed
    assert f" --resume {tmp_path}/run --steps 4\n" in printed
    assert ("stopped after step 2, saved " in printed) == (method == "step")
    assert ("validation loss 5." in printed) == (method == "validation_loss")
