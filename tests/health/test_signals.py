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
from tests.support.ranks import run_ranks
from tests.support.runs import change, losses, make_trainer, records, settings, train


@pytest.mark.parametrize("number,signalled", [
    (signal.SIGTERM, [1]), (signal.SIGINT, [0, 1]), (signal.SIGUSR1, [0]), (signal.SIGHUP, [1]),
])  # fmt: skip
@pytest.mark.quick("15-signalled0", "2-signalled1")
def test_a_signal_to_any_rank_stops_all_after_the_same_step_and_a_checkpoint(tmp_path, number, signalled):
    steps = 12
    config = settings(tmp_path / "run", steps=steps, seq_len=16, eval_sequences=1)
    with Processes(2, change(config, steps=steps)) as run:
        run.wait_for_steps(2)
        for rank in signalled:
            run.kill(rank, number)
        assert run.exit_codes(0, 1) == [0, 0]
        done = int(newest(config.checkpoint.out)[-6:])
        assert list(losses(records(config.checkpoint.out))) == list(range(1, done + 1))
        assert f"stopped after step {done}, saved {newest(config.checkpoint.out)}, to resume: " in run.output(0)
        assert f" --resume {config.checkpoint.out} --steps {steps}\n" in run.output(0)
        repeat = "; repeat to stop now" * (number in ORDERS)
        assert f"{number.name}: stopping after this step and a checkpoint{repeat}\n" in run.output(signalled[0])
    assert done < steps
    if number == signal.SIGTERM:
        last = run_ranks(2, train, change(config, resume=str(config.checkpoint.out)))[0]
        whole = run_ranks(2, train, change(config, out=str(tmp_path / "whole")))[0]
        assert losses(last) == losses(whole)


def stuck_in_cpp(port, completes):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with Stop().on_signals() as stop:
        stop.completes = completes
        store.set("ready", "yes")
        store.get("never")


@pytest.mark.parametrize("completes", ["this step and a checkpoint", ""])
def test_a_second_signal_ends_a_process_that_is_stuck_in_cpp_and_the_first_one_before_training(completes):
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    process = ranks._context.Process(target=stuck_in_cpp, args=(store.port, completes), daemon=True)
    process.start()
    try:
        store.wait(["ready"])
        if completes:
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.3)
            assert process.is_alive()
        os.kill(process.pid, signal.SIGTERM)
        process.join(30)
        assert process.exitcode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.join()


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
    process = ranks._context.Process(target=listening, args=(theirs,), daemon=True)
    process.start()
    try:
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
    finally:
        process.kill()
        process.join()


def interrupt_itself(trainer):
    if trainer.layout.rank == 1:
        os.environ["RANK"] = "1"  # as torchrun does
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


def test_a_signal_before_the_first_step_ends_a_rank_and_the_other_names_it(tmp_path):
    """After the model is built or loaded, and before there is anything to save."""
    with Processes(2, settings(tmp_path / "run", seq_len=16), sabotage=interrupt_itself) as run:
        assert run.exit_codes(1, 0) == [128 + signal.SIGTERM, 1]
        assert "train.py: rank 1 stops: SIGTERM before the first step\n" in run.output(1)
        assert "train.py: rank 0 stops: rank 1 vanished" in run.output(0)
    assert newest(tmp_path / "run") is None


def stop_in(rank, config, method):
    """A run of which rank 1 gets a request to stop in the last call of a method. Returns what it printed."""
    trainer = make_trainer(rank, config)
    call, calls = getattr(trainer, method), []

    def stopping(*arguments):
        calls.append(arguments)
        last = config.steps if method == "step" else 2
        trainer.stop.requested |= rank == 1 and len(calls) == last
        return call(*arguments)

    setattr(trainer, method, stopping)
    with redirect_stdout(io.StringIO()) as printed:
        train_loop(trainer)
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
