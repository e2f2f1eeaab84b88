"""Ranks that are killed, hang, fail or are asked to stop: the others end soon, name the rank, and the run goes on."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.health.signals import Stop
from moe_dualpipe.health.watch import watch_ranks
from moe_dualpipe.training import restart
from moe_dualpipe.training.command_line import parse_arguments
from moe_dualpipe.training.loop import TrainingRun
from moe_dualpipe.training.trainer import Trainer
from tests.support import ranks
from tests.support.checkpoints import write_manifest
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, SMALL, change, losses, make_plan, options, records, resolve, settings, train


def ranked_run(rank, size, port, config, patience, log, sabotage):
    """What train.py does after its command line, with what it prints in a file."""
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    store, wait = dist.TCPStore("127.0.0.1", port, size, is_master=False), timedelta(seconds=config.health.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    stop = Stop()
    with stop.on_signals(), watch_ranks(config.health.timeout, patience) as progress:
        trainer = Trainer(make_plan(config, rank, size), progress, stop)
        if sabotage is not None:
            sabotage(trainer)
        TrainingRun(trainer).run()
    dist.destroy_process_group()


class Processes:
    """Processes of one run; like torchrun, the test keeps the store that they meet at."""

    def __init__(self, size, config, patience=10.0, sabotage=None):
        self.config = config
        path = Path(config.checkpoint.out, "metrics.jsonl")
        if path.exists():  # what an earlier attempt did after its last checkpoint says nothing about this one
            kept = [
                line for line in path.open() if line.endswith("}\n") and json.loads(line)["step"] <= self.first_step()
            ]
            path.write_text("".join(kept))
        self.store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        folder = Path(config.checkpoint.out).parent
        self.logs = [
            folder / f"{Path(config.checkpoint.out).name}-rank{rank}-{self.store.port}.log" for rank in range(size)
        ]
        arguments = [(r, size, self.store.port, config, patience, self.logs[r], sabotage) for r in range(size)]
        self.processes = [ranks._context.Process(target=ranked_run, args=a, daemon=True) for a in arguments]

    def records(self):
        path = Path(self.config.checkpoint.out, "metrics.jsonl")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if '"loss"' in line and line.endswith("\n")]

    def __enter__(self):
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def wait_for_steps(self, count):
        """Until so many steps of this run are recorded."""
        first = self.first_step()
        end = time.monotonic() + 60
        while not any(json.loads(line)["step"] >= first + count for line in self.records()):
            assert time.monotonic() < end and self.processes[0].is_alive(), self.said(0)
            time.sleep(0.002)

    def first_step(self):
        return (
            int(Path(self.config.checkpoint.resume).name.removeprefix("step-")) if self.config.checkpoint.resume else 0
        )

    def kill(self, rank, number=signal.SIGKILL):
        os.kill(self.processes[rank].pid, number)

    def exit_codes(self, *which):
        for rank in which:
            self.processes[rank].join(60)
        return [self.processes[rank].exitcode for rank in which]

    def said(self, rank):
        return self.logs[rank].read_text(errors="replace")


def newest(out):
    found = sorted(Path(out, "checkpoints").glob("step-*"))
    return str(found[-1]) if found else None


def test_a_run_killed_at_ten_random_moments_ends_as_if_nothing_had_happened(tmp_path):
    """Each time the other rank exits by itself and names the one that was killed; the newest checkpoint loads."""
    chance = random.Random(5)
    small = {"steps": 24, "seq_len": 16, "eval_sequences": 1, "save_every": 1}
    config = settings(tmp_path / "killed", **small)
    for _ in range(10):
        victim = chance.randrange(2)
        with Processes(2, change(config, resume=newest(config.checkpoint.out))) as run:
            run.wait_for_steps(chance.randint(1, 2))
            time.sleep(chance.uniform(0, 0.1))
            run.kill(victim)
            assert run.exit_codes(victim, 1 - victim) == [-signal.SIGKILL, 1]
            assert f"train.py: rank {1 - victim} stops: rank {victim} vanished, last seen in " in run.said(1 - victim)
            assert f": its process {run.processes[victim].pid} is gone\n" in run.said(1 - victim)
            assert "Traceback" not in run.said(1 - victim)
    last = run_ranks(2, train, change(config, resume=newest(config.checkpoint.out)))[0]
    whole = run_ranks(2, train, settings(tmp_path / "whole", **small))[0]
    for kind in ("loss", "grad_norm"):
        assert losses(last, kind) == losses(whole, kind)
    assert losses(last, "validation_loss")[24] == losses(whole, "validation_loss")[24]


def test_all_of_four_ranks_name_the_one_that_was_killed(tmp_path):
    with Processes(4, settings(tmp_path / "run", steps=1000, pp=2, ep=2, seq_len=16)) as run:
        run.wait_for_steps(1)
        run.kill(2)
        assert run.exit_codes(0, 1, 3) == [1, 1, 1]
        for rank in (0, 1, 3):
            assert f"train.py: rank {rank} stops: rank 2 vanished, last seen in " in run.said(rank)


def test_a_rank_that_is_stopped_gives_no_sign_of_life(tmp_path):
    """The connections stay open, so that the other rank's main thread is stuck in C++."""
    with Processes(2, settings(tmp_path / "run", steps=1000, seq_len=16), patience=3.0) as run:
        run.wait_for_steps(1)
        run.kill(1, signal.SIGSTOP)
        assert run.exit_codes(0) == [1]
        seen = r"rank 1 vanished: no sign of life for 3 s, last seen in (step \d+|the start of the run)"
        assert re.search(seen, run.said(0))


def on_rank_1_in_step_3(trainer, action):
    pipeline_step = trainer.pipeline_step

    def step(*batch):
        if trainer.layout.rank == 1 and trainer.progress.step == 3:
            action()
        return pipeline_step(*batch)

    trainer.pipeline_step = step


def fall_asleep():
    time.sleep(1000)


def hanging(trainer):
    on_rank_1_in_step_3(trainer, fall_asleep)


def test_a_rank_that_hangs_is_found_within_the_timeout(tmp_path):
    with Processes(2, settings(tmp_path / "run", seq_len=16, timeout=8.0), sabotage=hanging) as run:
        assert run.exit_codes(0, 1) == [1, 1]
        for rank in (0, 1):
            assert f"train.py: rank {rank} stops: rank 1 hangs in step 3 (test_faults.py:" in run.said(rank)
            assert "in fall_asleep), and others wait for it" in run.said(rank)


def refuse():
    raise ValueError("no such shard: 7\nmore of it")


def failing(trainer):
    on_rank_1_in_step_3(trainer, refuse)


def test_a_rank_that_fails_shows_its_traceback_and_the_others_its_reason(tmp_path):
    with Processes(2, settings(tmp_path / "run", seq_len=16), sabotage=failing) as run:
        assert run.exit_codes(0, 1) == [1, 1]
        assert "in refuse\n" in run.said(1) and "ValueError: no such shard: 7\nmore of it" in run.said(1)
        assert "train.py: rank 0 stops: rank 1 failed in step 3: ValueError: no such shard: 7\n" in run.said(0)
        assert "Traceback" not in run.said(0)


def leave():
    raise SystemExit(2)


def leaving(trainer):
    on_rank_1_in_step_3(trainer, leave)


def test_a_rank_that_leaves_without_an_error_is_named_by_those_who_wait_for_it(tmp_path):
    with Processes(2, settings(tmp_path / "run", seq_len=16), patience=3.0, sabotage=leaving) as run:
        assert run.exit_codes(0, 1) == [1, 2]
        assert "train.py: rank 0 stops: rank 1 exited in step 3 " in run.said(0)


# ---- Signals ----


@pytest.mark.parametrize("number,signalled", [(signal.SIGTERM, [1]), (signal.SIGINT, [0, 1])])
def test_a_signal_to_any_rank_stops_all_after_the_same_step_and_loses_nothing(tmp_path, number, signalled):
    steps = 12
    config = settings(tmp_path / "run", steps=steps, seq_len=16, eval_sequences=1)
    with Processes(2, change(config, steps=steps)) as run:
        run.wait_for_steps(2)
        for rank in signalled:
            run.kill(rank, number)
        assert run.exit_codes(0, 1) == [0, 0]
        done = int(newest(config.checkpoint.out)[-6:])
        assert list(losses(records(config.checkpoint.out))) == list(range(1, done + 1))
        assert f"stopped after step {done}, saved {newest(config.checkpoint.out)}, to resume: " in run.said(0)
        assert f" --resume {config.checkpoint.out} --steps {steps}\n" in run.said(0)
        assert "stopping after this step and a checkpoint; repeat to stop now" in run.said(signalled[0])
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


def test_a_second_signal_ends_at_once_even_what_is_stuck_outside_of_python():
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


def test_signals_mean_again_what_they_meant_before(request):
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored in the background
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


# ---- Restarts ----

KILLS_ITSELF = """
import os, signal
from moe_dualpipe.training.loop import main
from moe_dualpipe.training.trainer import Trainer

train_step = Trainer.train_step

def until_killed(self, step):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and step == 4 and self.layout.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, step)

Trainer.train_step = until_killed
main()
"""


def train_as_typed(rank, arguments):
    return train(rank, parse_arguments(arguments))


def test_torchrun_restarts_a_run_that_was_killed_and_it_picks_itself_up(tmp_path):
    """Without --out, beside another run: the second attempt finds the folder of the first."""
    script = tmp_path / "kills_itself.py"
    script.write_text(KILLS_ITSELF)
    (tmp_path / "runs" / "tiny" / "checkpoints").mkdir(parents=True)
    small = [str(a) for a in SMALL]
    arguments = [
        *small,
        "--steps",
        "7",
        "--save-every",
        "2",
        "--no-save-async",
        "--sample-tokens",
        "0",
        "--device",
        "cpu",
    ]
    torchrun = ["--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *torchrun, str(script), *arguments],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "train.py: rank 0 stops: rank 1 vanished" in done.stderr
    # Step 4 was being saved when the rank was killed: it may or may not have been in time.
    assert re.search(r"resumed from runs/tiny-2/checkpoints/step-00000(2, steps 3|4, steps 5) to 7", done.stdout)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"tiny", "tiny-2"}
    whole = run_ranks(2, train_as_typed, [*arguments, "--out", str(tmp_path / "whole")])[0]
    again = records(tmp_path / "runs" / "tiny-2")
    assert losses(again) == losses(whole)
    assert losses(again, "validation_loss")[7] == losses(whole, "validation_loss")[7]


def torchrun_says(monkeypatch, restarts, run_id="none"):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))


def checkpoint_in(out, step, age=0.0):
    folder = Path(out, "checkpoints", f"step-{step:06d}")
    write_manifest(folder, step)
    now = time.time()
    os.utime(folder, (now - age, now - age))
    return folder


def test_only_a_restart_takes_the_folder_that_its_own_launcher_marked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, new, named = "runs/tiny", options(device="cpu"), options(device="cpu", out="runs/tiny")
    Path(out).mkdir(parents=True)
    restart.mark_folder(Path(out), 0)
    assert not Path(out, "launchers").exists()  # nobody would come back
    torchrun_says(monkeypatch, 0)
    restart.mark_folder(Path(out), 1)
    assert not Path(out, "launchers").exists()  # one rank of each machine is enough
    restart.mark_folder(Path(out), 0)
    assert len(list(Path(out, "launchers").iterdir())) == 1
    checkpoint_in(out, 3)
    assert resolve(new).folder == Path("runs/tiny-2")
    with pytest.raises(ValueError, match="already holds a run"):
        resolve(named)
    torchrun_says(monkeypatch, 1)
    assert resolve(new).folder == Path(out)
    assert resolve(named).folder == Path(out)
    monkeypatch.setattr(os, "getppid", lambda: 1)  # another launcher
    assert resolve(new).folder == Path("runs/tiny-2")
    assert restart.newest_checkpoint(Path(out)) is None


def if_complete(path):
    if not Path(path, "run.json").exists():
        raise ValueError
    return Path(path)


def test_a_restart_takes_the_newest_checkpoint_of_its_own_attempts(tmp_path, monkeypatch):
    monkeypatch.setattr(restart, "find_checkpoint", if_complete)
    torchrun_says(monkeypatch, 1)
    restart.mark_folder(tmp_path, 0)
    assert restart.newest_checkpoint(tmp_path) is None
    checkpoint_in(tmp_path, 9, age=1000)  # the run was resumed from an earlier step than this
    assert restart.newest_checkpoint(tmp_path) is None
    second = checkpoint_in(tmp_path, 2, age=-1)
    unreadable = checkpoint_in(tmp_path, 4, age=-1)
    (unreadable / "run.json").unlink()
    os.utime(unreadable, (time.time() + 1,) * 2)
    assert restart.newest_checkpoint(tmp_path) == second
    (mark,) = (tmp_path / "launchers").iterdir()
    before = mark.stat().st_mtime_ns
    restart.mark_folder(tmp_path, 0)
    assert mark.stat().st_mtime_ns == before  # or the third attempt would not know the first one's checkpoints


def test_steps_are_compared_as_numbers(tmp_path, monkeypatch):
    torchrun_says(monkeypatch, 1)
    restart.mark_folder(tmp_path, 0)
    found = {step: checkpoint_in(tmp_path, step, age=-1) for step in (999_998, 1_000_000)}
    assert restart.newest_checkpoint(tmp_path) == found[1_000_000]


def test_a_restart_after_the_last_step_only_finishes(tmp_path, monkeypatch):
    config = settings(tmp_path / "run", steps=2)
    torchrun_says(monkeypatch, 1)
    Path(config.checkpoint.out).mkdir()
    restart.mark_folder(Path(config.checkpoint.out), 0)
    first = run_ranks(1, train, config)[0]
    assert make_plan(config).first_step == 2
    again = run_ranks(1, restarted, change(config, profile=1))[0]  # too late to record anything
    assert losses(again) == losses(first)


def restarted(rank, config):
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}
    (mark,) = Path(config.checkpoint.out, "launchers").iterdir()
    restart._launcher_file = lambda folder: folder / "launchers" / mark.name  # as if it had the same parent
    return train(rank, config)
