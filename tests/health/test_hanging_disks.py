"""A disk that hangs while a checkpoint is written or read is named with its rank; a slow one is not."""

import queue
import threading
import time

import pytest
import torch

from moe_dualpipe.checkpoint import Saver, load_checkpoint
from moe_dualpipe.data import DataFile
from moe_dualpipe.health.heartbeat import CodePosition
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.training.loop import train_loop
from tests.support.checkpoints import state_of
from tests.support.ranks import run_ranks
from tests.support.runs import make_trainer, settings


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
