"""SIGTERM and SIGINT."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from moe_dualpipe.health.signals import Stop
from tests.support import ranks
from tests.support.killed_runs import Processes, newest
from tests.support.ranks import run_ranks
from tests.support.runs import change, losses, records, settings, train


@pytest.mark.parametrize("number,signalled", [(signal.SIGTERM, [1]), (signal.SIGINT, [0, 1])])
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
        assert "stopping after this step and a checkpoint; repeat to stop now" in run.output(signalled[0])
    assert done < steps
    if number == signal.SIGTERM:
        last = run_ranks(2, train, change(config, resume=str(config.checkpoint.out)))[0]
        whole = run_ranks(2, train, change(config, out=str(tmp_path / "whole")))[0]
        assert losses(last) == losses(whole)


def stuck_in_cpp(port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with Stop().on_signals():
        store.set("ready", "yes")
        store.get("never")


def test_a_second_signal_ends_a_process_that_is_stuck_in_cpp():
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    process = ranks._context.Process(target=stuck_in_cpp, args=(store.port,), daemon=True)
    process.start()
    try:
        store.wait(["ready"])
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.3)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGTERM)
        process.join(30)
        assert process.exitcode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.join()


def test_the_old_signal_handlers_are_restored(request):
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes may ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, outer))
    before = signal.getsignal(signal.SIGINT)
    stop = Stop(announce=False)
    with stop.on_signals():
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + 30
        while not stop.requested:
            assert time.monotonic() < end
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
