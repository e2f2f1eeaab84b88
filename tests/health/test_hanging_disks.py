"""A disk that hangs while a checkpoint is written or read is named with its rank; a slow one is not."""

import os
import queue
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.checkpoint import Saver, find_checkpoint, load_checkpoint, save, tensor_file
from moe_dualpipe.data import DataFile
from moe_dualpipe.health.heartbeat import SAVING, CodePosition
from moe_dualpipe.health.watch import watch_ranks
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.training.loop import train_loop
from tests.support.checkpoints import loaded_step, state_of
from tests.support.ranks import exits_and_logs, run_ranks
from tests.support.runs import make_trainer, settings

TIMEOUT = 5.0


def hang():
    time.sleep(1000)


def be_slow():
    """With its two files, the rank is slower than the timeout."""
    time.sleep(0.7 * TIMEOUT)


def saving_rank(rank, port, run, log, disk, background):
    """Save while the disk of rank 1 calls `disk` before each file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT))
    save_file = tensor_file.save_file

    def on_disk(*arguments):
        if rank == 1:
            disk()
        save_file(*arguments)

    setattr(tensor_file, "save_file", on_disk)  # noqa: B010
    setattr(save, "_FILE_BYTES", 1)  # noqa: B010
    with watch_ranks(TIMEOUT) as progress:
        saver = Saver(run, ModelConfig(), 0, background, progress.save.note)
        with progress.during(SAVING):
            saver.start(9, state_of(rank, 9))
        while background and saver.busy:  # as a main thread that trains on
            progress.note("training")
            time.sleep(0.1)
        saved = saver.wait()
        saver.close()
    dist.destroy_process_group()
    assert not saved.error


def saving_ranks(folder, disk, background):
    """Return the exit codes of two saving ranks, and what they print."""
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    logs = [folder / f"{rank}.log" for rank in range(2)]
    arguments = [(rank, server.port, folder, log, disk, background) for rank, log in enumerate(logs)]
    return exits_and_logs(saving_rank, arguments, logs)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.long
def test_a_rank_whose_disk_hangs_in_a_save_is_named(tmp_path, background):
    codes, logs = saving_ranks(tmp_path, hang, background)
    assert codes == [1, 1]
    hung = "rank 1 hangs in a checkpoint save, step 9: writing rank-1-0.safetensors"
    for rank, log in enumerate(logs):
        assert log.splitlines()[-1] == f"train.py: rank {rank} stops: {hung}"
    waits = [line for log in logs for line in log.splitlines() if " waits for " in line]
    if background:
        assert not waits
    else:
        assert len(waits) == 1 and waits[0].startswith("train.py: rank 0 waits for rank 1: checkpoint (for ")


@pytest.mark.long
def test_ranks_wait_for_a_slow_disk_longer_than_the_timeout(tmp_path):
    codes, logs = saving_ranks(tmp_path, be_slow, background=False)
    assert codes == [0, 0]
    waits, writes = "".join(logs).splitlines()  # no other message
    assert waits.startswith("train.py: rank 0 waits for rank 1: checkpoint (for ")
    assert writes.startswith(
        "train.py: rank 1: in the start of the run, checkpoint, step 9: writing rank-1-0.safetensors ("
    )
    assert loaded_step(find_checkpoint(str(tmp_path))) == 9


def load_from_a_disk_that_hangs(rank, run):
    saver = Saver(run, ModelConfig(), 0)
    saver.start(9, state := state_of(rank, 9))
    checkpoint = saver.wait().path
    saver.close()
    positions, data = [], queue.SimpleQueue()

    def hanging(*_):
        """Waits in C, as for a disk."""
        data.get()

    def look():
        time.sleep(0.3)
        positions.append(CodePosition.of_main_thread())
        while not ended.is_set():
            data.put(None)
            time.sleep(0.01)

    looker, ended = threading.Thread(target=look), threading.Event()
    looker.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataFile, "read_into", hanging)
        load_checkpoint(checkpoint, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    ended.set()
    looker.join()
    return positions[0].text, positions[0].waiting


def test_a_rank_that_reads_a_checkpoint_does_not_seem_to_wait_for_others(tmp_path):
    ((text, waiting),) = run_ranks(1, load_from_a_disk_that_hangs, tmp_path)
    assert text.endswith("in hanging") and not waiting


def count_operations(rank, config):
    trainer = make_trainer(rank, config)
    train_loop(trainer)
    return trainer.progress.save.count, trainer.progress.save.operation


def test_the_saves_of_a_run_are_watched(tmp_path):
    config = settings(tmp_path / "run", steps=2, save_every=1, seq_len=16, eval_sequences=1)
    for count, operation in run_ranks(2, count_operations, config):
        assert count > 10 and operation == ""
